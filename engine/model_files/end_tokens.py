"""The ids that end an answer, from all places where a model directory may name them.

Each place is wrong in some published model: a fine-tune to chat may keep the generation config of
its base, whose end is that of a document, or have the new end in its tokenizer only. So all count;
llama.cpp unites them too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.engine.model_files.config_fields import MAX_INTEGER, ConfigFields
from penstock.engine.model_files.json_file import (
    ADDITIONAL_TEMPLATES,
    is_present,
    read_json,
    read_text,
)

_NAME = "eos_token_id"
# Texts of tokens that end an answer, or a message that calls a tool; those of llama.cpp and some
# more. They count where a chat template has them, and in GGUF files wherever they are tokens.
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>",
    "<|end_of_turn|>", "<|end_of_text|>", "<|endoftext|>", "<|END_OF_TURN_TOKEN|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>", "[e~[", "</s>", "<eos>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>",
)  # fmt: skip
MESSAGE_END = "<|end|>"  # in OpenAI's Harmony and its like, not of an answer
_HARMONY_MARK = "<|channel|>"
_ADDED_TOKENS = '"added_tokens"'


def end_token_ids(
    path: Path, generation: ConfigFields, config: ConfigFields, *, num_tokens: int
) -> tuple[int, ...]:
    """The ids of a generation config, of `config.json`, of the tokenizer, and of the ends of turns
    in chat templates; each once.

    Args:
        path: of the model directory.
        num_tokens: ids of the first two must be below it. Of other places, such ids are left out.

    Raises:
        ModelLoadError: a file cannot be read, or what the first of both configs that has it names
            are no ids.
    """
    first = generation if _NAME in generation else config
    ids = [*first.token_ids(_NAME, num_tokens=num_tokens)]
    for fields in (config, config.section("text_config")):
        ids += _plausible(fields.raw(_NAME))
    ids += _ids_of_tokenizer(path)
    return tuple(token_id for token_id in dict.fromkeys(ids) if token_id < num_tokens)


def _plausible(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and 0 <= each < MAX_INTEGER]


def _ids_of_tokenizer(path: Path) -> list[int]:
    file = path / "tokenizer_config.json"
    config = read_json(file) if is_present(file) else {}
    ends = {_text_of(config.get("eos_token")), *_turn_ends("\n".join(_templates(path, config)))}
    ends.discard("")
    if not ends:
        return []
    known = dict(_listed(config.get("added_tokens_decoder")))
    if not ends <= known.keys():
        known = {**_added_tokens(path / "tokenizer.json"), **known}
    return [known[text] for text in sorted(ends & known.keys())]


def _templates(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """The sources of all chat templates."""
    own = config.get("chat_template")
    if own is None and is_present(path / "chat_template.json"):
        own = read_json(path / "chat_template.json").get("chat_template")
    for each in own if isinstance(own, list) else [own]:
        source = each.get("template") if isinstance(each, Mapping) else each
        if isinstance(source, str):
            yield source
    for file in (path / "chat_template.jinja", *path.glob(ADDITIONAL_TEMPLATES)):
        if is_present(file):
            yield read_text(file)


def _turn_ends(source: str) -> set[str]:
    ends = {text for text in END_TEXTS if text in source}
    is_harmony = _HARMONY_MARK in source or are_harmony(ends)
    return ends - {MESSAGE_END} if is_harmony else ends


def are_harmony(ends: Collection[str]) -> bool:
    """Whether there are other tokens for what `<|end|>` ends elsewhere: an answer, and a call."""
    return ("<|call|>" in ends and "<|return|>" in ends) or (
        "<|flush|>" in ends and ("<|call|>" in ends or "<|calls|>" in ends)
    )


def _text_of(token: Any) -> str:
    """A token as files spell it: its text, or an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _listed(tokens: Any) -> Iterable[tuple[str, int]]:
    """The texts and ids of an `added_tokens_decoder`."""
    for token_id, token in tokens.items() if isinstance(tokens, Mapping) else ():
        if str(token_id).isdigit():
            yield _text_of(token), int(token_id)


def _added_tokens(file: Path) -> dict[str, int]:
    """The added tokens of a `tokenizer.json`, by text. The rest of it, which may have megabytes, is
    not parsed: another reader says what is wrong with it."""
    if not is_present(file):
        return {}
    _, _, rest = read_text(file).partition(_ADDED_TOKENS)
    try:
        tokens, _ = json.JSONDecoder().raw_decode(rest.lstrip().removeprefix(":").lstrip())
    except (ValueError, RecursionError):
        return {}
    return {
        _text_of(each): each["id"]
        for each in (tokens if isinstance(tokens, list) else ())
        if isinstance(each, Mapping) and type(each.get("id")) is int
    }
