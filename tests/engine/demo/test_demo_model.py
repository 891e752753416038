"""The shipped demo model: its files, and that a first run answers in words."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.demo import corpus, network
from penstock.engine.demo.checkpoint import hugging_face_config
from penstock.engine.demo.corpus_answers import topics
from penstock.engine.demo.vocabulary import train_tokenizer
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

FOLDER = DEMO_MODEL_PATH
MAX_FILE_BYTES = 16 * 2**20


class Chat:
    """A conversation with the shipped model, decoded greedily."""

    def __init__(self, model: Any, tokenizer: Any, system: str | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._messages = [{"role": "system", "content": system}] if system else []
        self.num_tokens = 0
        self.has_ended = False

    def say(self, text: str, *, max_tokens: int = 160) -> str:
        """Return the answer, and remember whether it ended by itself."""
        self._messages.append({"role": "user", "content": text})
        prompt = self._tokenizer.apply_chat_template(
            self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(**prompt, do_sample=False, max_new_tokens=max_tokens)
        new = output[0, prompt["input_ids"].shape[1] :]
        self.num_tokens = len(new)
        self.has_ended = int(new[-1]) == self._tokenizer.eos_token_id
        answer = str(self._tokenizer.decode(new, skip_special_tokens=True))
        self._messages.append({"role": "assistant", "content": answer})
        return answer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    # The shipped defaults are for sampling; greedy decoding would warn about them.
    model.generation_config.temperature = None
    model.generation_config.top_p = None
    return model


@pytest.fixture
def chat(model: Any, tokenizer: Any) -> Chat:
    return Chat(model, tokenizer)


def test_files_are_small_and_context_is_long() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= MAX_FILE_BYTES
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (FOLDER / "README.md").is_file()


def test_generation_defaults_stop_at_the_end_token(tokenizer: Any) -> None:
    defaults = json.loads((FOLDER / "generation_config.json").read_text())
    assert defaults["eos_token_id"] == [tokenizer.eos_token_id]
    assert 0 < defaults["temperature"] <= 0.5


def test_config_is_that_of_the_training_code() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert hugging_face_config(network.NetworkConfig()).items() <= config.items()


@pytest.mark.parametrize(
    "text",
    [
        "plain words, 12345 and  two spaces",
        "Zürich, 東京, Владивосток, 👩‍👩‍👧, \u0000\u200b\r\n\ttabs",
        "".join(map(chr, range(0x20, 0x250))),
        " leading and trailing ",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer.encode("9876543210", add_special_tokens=False)) == 10


def test_chat_template_renders_as_in_training(tokenizer: Any) -> None:
    turns = [corpus.Turn("hello", "Hello!"), corpus.Turn("count to 2", "1, 2.")]
    conversation = corpus.Conversation(system="Be kind.", turns=turns)
    messages = [{"role": "system", "content": "Be kind."}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    encoder = corpus.Encoder(tokenizer.backend_tokenizer)
    rendered = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert rendered == encoder.encode(conversation)[0]


def test_chat_template_joins_parts_of_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "hello"}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|begin|><|user|>hello<|end|><|assistant|>"


def _texts(seed: int) -> Sequence[str]:
    return list(corpus.texts(seed, 20))


def test_corpus_depends_on_the_seed_alone() -> None:
    assert _texts(3) == _texts(3)
    assert _texts(3) != _texts(4)
    first, second = train_tokenizer(_texts(3)), train_tokenizer(_texts(3))
    assert first.to_str() == second.to_str()


def test_corpus_learns_answers_only() -> None:
    tokenizer = train_tokenizer(_texts(3))
    encoder = corpus.Encoder(tokenizer)
    conversation = corpus.converse(random.Random(5), 500)
    conversation.turns = [t for t in conversation.turns if not t.is_cut]
    token_ids, is_learned = encoder.encode(conversation)
    learned = [t for t, learns in zip(token_ids, is_learned, strict=True) if learns]
    text = tokenizer.decode(learned, skip_special_tokens=False)
    assert text == "".join(f"{t.assistant}<|end|>" for t in conversation.turns)


def test_corpus_has_more_than_a_hundred_answers_and_holds_questions_out() -> None:
    assert len(topics()) > 100
    for topic in topics():
        assert topic.questions
        assert not set(topic.questions) & set(topic.held_out_questions)


def test_greets(chat: Chat) -> None:
    assert "Hello" in chat.say("Hello!")
    assert chat.has_ended


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is penstock?", "serving system"),
        ("what is paged attention", "block"),
        ("Can you explain continuous batching?", "every step"),
        ("why use copy on write?", "memory"),
        ("Who are you?", "demo model"),
        ("What is the capital of Zorvania?", "do not know"),
    ],
)
def test_answers_questions(chat: Chat, question: str, expected: str) -> None:
    assert expected in chat.say(question)
    assert chat.has_ended


def test_remembers_an_unseen_name_and_city_turns_later(chat: Chat) -> None:
    chat.say("Hi, my name is Brelquist.")
    chat.say("I live in Tavormund.")
    chat.say("What is a KV cache?")
    chat.say("Thanks!")
    assert "Brelquist" in chat.say("What is my name?")
    assert "Tavormund" in chat.say("Where do I live?")


def test_admits_what_it_was_not_told(chat: Chat) -> None:
    assert "not told me" in chat.say("What is my name?")


def test_counts(chat: Chat) -> None:
    assert chat.say("Count to 12") == ", ".join(map(str, range(1, 13))) + "."
    assert chat.say("count from 5 to 20") == ", ".join(map(str, range(5, 21))) + "."


@pytest.mark.parametrize("word", ["window", "throughput", "mabrilo"])
def test_spells(chat: Chat, word: str) -> None:
    assert "-".join(word) in chat.say(f"Spell {word}")


@pytest.mark.exhaustive
def test_tells_a_long_story_that_ends(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer, system="You are a helpful assistant.")
    story = chat.say("Tell me a long story about a lost treasure.", max_tokens=900)
    assert chat.num_tokens >= 300
    assert chat.has_ended
    assert "treasure" in story
    assert story.endswith("The end.")
