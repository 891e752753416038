"""Stored token ids used again: what an engine has the KV of, and never a wrong prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.gateway.storage.conversations.ids import new_conversation_id, new_response_id
from penstock.gateway.storage.conversations.prompt_ids import Reused, rendering_of, reuse
from penstock.gateway.storage.conversations.records import StoredTurn

DEMO_FOLDER = DEMO_MODEL_PATH
QWEN_STYLE = (
    "{% set last = namespace(query=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 < last.query %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Dialogue:
    """A conversation as a gateway holds it: messages, and the turns stored of them."""

    tokenizer: Tokenizer
    template: ChatTemplate
    end: str  # what a complete answer ends with
    instructions: str = "Be brief."
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[StoredTurn] = field(default_factory=list)

    def prompt(self, question: str) -> str:
        system = {"role": "system", "content": self.instructions}
        return self.template.render([system, *self.messages, {"role": "user", "content": question}])

    def token_ids(self, question: str) -> list[int]:
        """Of the prompt, with what is stored."""
        reused = self.reused(question)
        rest = self.tokenizer.encode(reused.rest, add_special_tokens=False)
        return [*reused.token_ids, *rest]

    def reused(self, question: str, origin: bytes = b"mine") -> Reused:
        return reuse(self.prompt(question), self.turns, self.tokenizer, origin=origin)

    def num_reused(self, question: str, origin: bytes = b"mine") -> int:
        return len(self.reused(question, origin).token_ids)

    def say(self, question: str, output_ids: list[int]) -> list[int]:
        """A turn; returns the ids that an engine now has the KV of."""
        prompt, prompt_ids = self.prompt(question), self.token_ids(question)
        raw = self.tokenizer.decode(output_ids, skip_special_tokens=False)
        conversation_id = new_conversation_id()
        self.turns.append(
            StoredTurn(
                turn_id=new_response_id(conversation_id),
                conversation_id=conversation_id,
                tenant="",
                parent_id=None,
                status="completed",
                created_at=0,
                prompt_token_ids=array("I", prompt_ids),
                output_token_ids=array("I", output_ids),
                prompt=rendering_of(prompt, b"mine"),
                whole=rendering_of(prompt + raw, b"mine"),
            )
        )
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": raw.removesuffix(self.end)},
        ]
        return [*prompt_ids, *output_ids]

    def answer(self, text: str) -> list[int]:
        return self.tokenizer.encode(text + self.end, add_special_tokens=False)

    def spelt(self, text: str) -> list[int]:
        """An answer letter by letter: no tokeniser would write it so, but a model may."""
        letters = [
            token_id
            for letter in text
            for token_id in self.tokenizer.encode(letter, add_special_tokens=False)
        ]
        return [*letters, *self.tokenizer.encode(self.end, add_special_tokens=False)]


def demo() -> Dialogue:
    tokenizer = Tokenizer.from_directory(DEMO_FOLDER)
    return Dialogue(tokenizer, ChatTemplate.from_directory(DEMO_FOLDER), end="<|end|>")


def _backend(corpus: list[str], special: list[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def qwen_style() -> Dialogue:
    special = [
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in ("<|im_start|>", "<|im_end|>")
    ]
    # Line ends that merge with what follows them are what a careless cut would break.
    corpus = ["assistant\n\nHello\n\n there\n\n\n and then\n", "user\nwhat is it?\n"] * 9
    backend = _backend(corpus, special)
    backend.add_tokens([tokenizers.AddedToken("</think>", normalized=False)])
    return Dialogue(Tokenizer(backend), ChatTemplate(QWEN_STYLE, {}), end="<|im_end|>")


DEMO, QWEN = demo(), qwen_style()


def fresh(dialogue: Dialogue) -> Dialogue:
    return Dialogue(dialogue.tokenizer, dialogue.template, dialogue.end)


@pytest.mark.parametrize("dialogue", [DEMO, QWEN])
def test_what_the_model_wrote_comes_back_as_it_wrote_it(dialogue: Dialogue) -> None:
    dialogue = fresh(dialogue)
    cached = dialogue.say("What is it?", dialogue.spelt("It is a gate."))
    for question in ("And then?", "Why?"):
        token_ids = dialogue.token_ids(question)
        assert token_ids[: len(cached)] == cached
        text = dialogue.prompt(question)
        assert dialogue.tokenizer.decode(token_ids, skip_special_tokens=False) == text
        assert dialogue.tokenizer.encode(text, add_special_tokens=False) != token_ids
        cached = dialogue.say(question, dialogue.spelt("Because."))


def test_an_answer_cut_by_length_is_reused_before_the_end_that_the_template_adds() -> None:
    dialogue = fresh(DEMO)
    cached = dialogue.say("What is it?", dialogue.spelt("It is a ga")[:-1])
    token_ids = dialogue.token_ids("Go on.")
    assert token_ids[: len(cached)] == cached
    assert dialogue.tokenizer.token_text(token_ids[len(cached)]) == "<|end|>"


def test_dropped_reasoning_goes_back_to_the_question() -> None:
    dialogue = fresh(QWEN)
    thoughts = "Hm, <|a gate|>.\n</think>\n\n"
    first = dialogue.say("What is it?", dialogue.spelt(thoughts + "\n\nIt is a gate."))
    text = dialogue.prompt("And then?")
    assert "Hm" not in text
    token_ids = dialogue.token_ids("And then?")
    # The answer now stands where the thoughts stood: what came before is what can be shared.
    start = dialogue.tokenizer.encode("<|im_start|>")[0]
    num_shared = len(first) - first[::-1].index(start) - 1
    assert dialogue.num_reused("And then?") == num_shared
    assert token_ids == dialogue.tokenizer.encode(text, add_special_tokens=False)


def test_changed_instructions_reuse_nothing() -> None:
    dialogue = fresh(DEMO)
    dialogue.say("What is it?", dialogue.spelt("It is a gate."))
    dialogue.instructions = "Be brave."  # as long as before
    text = dialogue.prompt("And then?")
    assert dialogue.num_reused("And then?") == 0
    assert dialogue.token_ids("And then?") == dialogue.tokenizer.encode(
        text, add_special_tokens=False
    )


def test_instructions_that_grow_reuse_nothing_of_their_beginning() -> None:
    dialogue = fresh(DEMO)
    dialogue.say("What is it?", dialogue.spelt("It is a gate."))
    dialogue.instructions += " And kind."
    assert dialogue.num_reused("And then?") == 0


def test_an_edited_answer_goes_back_to_the_question() -> None:
    dialogue = fresh(DEMO)
    first = dialogue.say("What is it?", dialogue.spelt("It is a gate."))
    second = dialogue.say("And then?", dialogue.spelt("A pipe."))
    dialogue.messages[-1] = {"role": "assistant", "content": "A turbine."}
    assert dialogue.num_reused("Why?") >= len(first)
    assert dialogue.num_reused("Why?") < len(second)


def test_half_a_character_at_the_end_is_harmless() -> None:
    dialogue = fresh(QWEN)
    smile = dialogue.tokenizer.encode("😀", add_special_tokens=False)
    assert len(smile) == 4
    cached = dialogue.say("What is it?", [*dialogue.spelt("A ")[:-1], *smile[:2]])
    assert dialogue.token_ids("Go on.")[: len(cached)] == cached


def test_without_tokens_that_split_the_text_nothing_is_reused() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {}
    )
    dialogue = Dialogue(Tokenizer(_backend(["user: a\n\nb"] * 3, [])), template, end="")
    dialogue.say("What?", dialogue.spelt("A gate."))
    assert dialogue.num_reused("And then?") == 0


def test_a_token_that_swallows_space_before_it_is_no_boundary() -> None:
    end = tokenizers.AddedToken("<|end|>", special=True, lstrip=True, normalized=False)
    tokenizer = Tokenizer(_backend(["user a b\n"] * 3, [end]))
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", {})
    dialogue = Dialogue(tokenizer, template, end="<|end|>")
    dialogue.say("What?", dialogue.answer("A gate "))
    assert dialogue.num_reused("And then?") == 0


@pytest.mark.parametrize("stored", [b"another", b""])
def test_ids_of_another_model_or_template_are_not_reused(stored: bytes) -> None:
    """Also those of which it is not known whose they are, as earlier gateways stored them."""
    dialogue = fresh(DEMO)
    dialogue.say("What is it?", dialogue.spelt("A gate."))
    assert dialogue.num_reused("And then?") > 0
    dialogue.turns = [
        replace(
            turn,
            prompt=replace(turn.prompt, origin=stored),
            whole=replace(turn.whole, origin=stored),
        )
        for turn in dialogue.turns
        if turn.prompt is not None and turn.whole is not None
    ]
    assert dialogue.num_reused("And then?") == 0


def test_the_stored_prompt_itself_is_reused_whole() -> None:
    dialogue = fresh(DEMO)
    cached = dialogue.say("What is it?", dialogue.spelt("A gate."))
    dialogue.messages.clear()
    reused = dialogue.reused("What is it?")
    assert reused.rest == ""
    assert list(reused.token_ids) == cached[: len(reused.token_ids)]
    assert dialogue.turns[0].prompt_token_ids == array("I", reused.token_ids)


_TEXT = st.text(st.sampled_from("ab \n\t'😀é1.") | st.characters(codec="utf-8"), max_size=20)


@pytest.mark.parametrize("dialogue", [DEMO, QWEN])
@given(turns=st.lists(st.tuples(_TEXT, _TEXT, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_reuse_is_tokenising_the_whole_where_the_model_writes_as_the_tokeniser(
    dialogue: Dialogue, turns: list[tuple[str, str, bool]]
) -> None:
    dialogue = fresh(dialogue)
    encode = dialogue.tokenizer.encode
    for question, answer, is_cut in turns:
        assert dialogue.token_ids(question) == encode(
            dialogue.prompt(question), add_special_tokens=False
        )
        output_ids = encode(answer, add_special_tokens=False)
        dialogue.say(question, output_ids if is_cut else dialogue.answer(answer))
