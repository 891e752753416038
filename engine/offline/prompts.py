"""Checks and normalises the prompts, adapters, sampling parameters and settings given to `LLM`.

A caller's mistakes are found here, before anything runs.
"""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard, cast

import msgspec

from penstock.engine.chat_formats import OfferedTools, Tool, ToolMode
from penstock.engine.config import SECTIONS, EngineConfig, LoraConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from penstock.engine.lora.files import CONFIG_FILE, WEIGHTS_FILE, find_adapter
from penstock.engine.request import SEED_MASK, Adapter, ImageInput, SamplingParams
from penstock.engine.settings.declaration import settings_of, take_twins
from penstock.engine.text import Tokenizer
from penstock.engine.type_checks import misfits
from penstock.engine.vision.image_file import LoadedImage, data_of_url, load_image

Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Any]
Conversation = Sequence[Message]

_MAX_IMAGE_BYTES = 1 << 28
_IMAGE_KINDS = ("image_url", "image_pil")  # of parts, as in vLLM


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt's token ids, with its text if it had one, and its images."""

    token_ids: tuple[int, ...]
    text: str | None = None
    images: tuple[ImageInput, ...] = ()


def offered_tools(tools: Sequence[Mapping[str, Any]], choice: str) -> OfferedTools:
    """Functions in OpenAI's form.

    Raises:
        InvalidRequestError: one is not in that form, or the choice names none of them.
    """
    offered = []
    for index, each in enumerate(tools):
        function = each.get("function", each)
        name = function.get("name")
        if not isinstance(name, str) or each.get("type", "function") != "function":
            raise InvalidRequestError(
                f"tools[{index}] must be a function with a name", param=f"tools[{index}]"
            )
        offered.append(
            Tool(
                name=name,
                description=function.get("description") or "",
                parameters=function.get("parameters"),
                strict=bool(function.get("strict")),
            )
        )
    names = [tool.name for tool in offered]
    if choice in ("auto", "none", "required") and (names or choice != "required"):
        return OfferedTools(tools=tuple(offered), choice=cast("ToolMode", choice))
    if choice not in names:
        raise InvalidRequestError(
            f"tool_choice must be auto, none, required or one of the tools, not {choice!r}",
            param="tool_choice",
        )
    return OfferedTools(tools=tuple(offered), choice="required", named=choice)


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from settings named like the fields of the config sections.

    Raises:
        ConfigError: an unknown name, or a value that cannot work.
    """
    settings = {"model": model, **take_twins(settings_of(*SECTIONS.values()), settings)}
    names = {name: [item.name for item in fields(kind)] for name, kind in SECTIONS.items()}
    known = [name for section in names.values() for name in section]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"LLM has no setting {name!r}{hint}")
    sections: dict[str, Any] = {
        section: _section(
            kind, {name: settings[name] for name in names[section] if name in settings}
        )
        for section, kind in SECTIONS.items()
    }
    return EngineConfig(**sections)


def _section(kind: type[Any], values: Mapping[str, Any]) -> Any:
    for _, message in misfits(kind, values):
        raise ConfigError(message)
    return kind(**values)


def tokenise(prompts: Prompts, tokenizer: Tokenizer, *, vocab_size: int) -> list[TokenPrompt]:
    """One prompt or several, as token ids.

    Args:
        prompts: a text or a list of token ids; or a list of either, or of vLLM's dictionaries
            (`prompt` or `prompt_token_ids`).

    Raises:
        InvalidRequestError: not a prompt, or an id outside the vocabulary.
    """
    if not isinstance(prompts, Sequence | Mapping) or isinstance(prompts, bytes | bytearray):
        raise _not_a_prompt(prompts)
    several: Sequence[Any] = [prompts] if _is_one(prompts) else prompts  # type: ignore[assignment]
    return [_tokenise(prompt, tokenizer, vocab_size) for prompt in several]


def _is_one(prompts: Prompts) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and _are_ids(prompts))


def _are_ids(value: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes | bytearray | memoryview)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _tokenise(prompt: object, tokenizer: Tokenizer, vocab_size: int) -> TokenPrompt:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return TokenPrompt(tuple(tokenizer.encode(prompt, param="prompts")), prompt)
    if not _are_ids(prompt):
        raise _not_a_prompt(prompt)
    check_vocabulary(prompt, vocab_size, param="prompts")
    return TokenPrompt(tuple(prompt))


def _not_a_prompt(value: object) -> InvalidRequestError:
    kind = type(value).__name__
    return InvalidRequestError(
        f"a prompt must be a text or a list of token ids, not {kind}", param="prompts"
    )


def check_vocabulary(
    token_ids: Sequence[int] | Mapping[int, float], vocab_size: int, *, param: str
) -> None:
    """Raise `InvalidRequestError` if an id is outside the vocabulary."""
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise InvalidRequestError(
            f"token id {unknown[0]} is not in the vocabulary of {vocab_size} tokens", param=param
        )


def conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """`messages` as a list of conversations, whether it is one conversation or several.

    Raises:
        InvalidRequestError: it is neither.
    """
    several: Sequence[Any] = messages
    if several and isinstance(several[0], Mapping):
        several = [several]
    for conversation in several:
        if isinstance(conversation, str) or not all(
            isinstance(each, Mapping) for each in conversation
        ):
            raise InvalidRequestError(
                "a conversation must be a list of messages with `role` and `content`",
                param="messages",
            )
    return several


def take_images(
    conversation: Conversation, *, takes_images: bool
) -> tuple[Conversation, list[LoadedImage]]:
    """A conversation with parts `{"type": "image"}` in the places of its images, and these.

    Args:
        takes_images: the model does.

    Raises:
        InvalidRequestError: names the part that cannot be used.
    """
    shown: list[Message] = []
    images: list[LoadedImage] = []
    for number, message in enumerate(conversation):
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
        if not takes_images and not any(kind in _IMAGE_KINDS for kind in kinds):
            shown.append(message)
            continue
        changed = []
        for at, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
            param = f"messages[{number}].content[{at}]"
            try:
                if kind in _IMAGE_KINDS:
                    if not takes_images:
                        raise InvalidRequestError("the model takes no images")
                    if message.get("role") != "user":
                        raise InvalidRequestError("only a user's message may have images")
                    images.append(load_image(_image_file(part.get(kind))))
                    part = {"type": "image"}
                elif kind != "text" or not isinstance(part.get("text"), str):
                    raise InvalidRequestError("a part must be a text, image_url or image_pil")
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{param}: {error}", param=param) from error
            changed.append(part)
        shown.append({**message, "content": changed} if parts else message)
    return shown, images


def _image_file(given: object) -> bytes:
    """The file of an image that is a data URL, alone or as `url`, or Pillow's."""
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, str):
        if given[:5].lower() != "data:":
            raise InvalidRequestError("an image's url must be a data URL; nothing is fetched")
        return data_of_url(given, max_bytes=_MAX_IMAGE_BYTES)
    from PIL.Image import Image  # slow to import, and most never see an image

    if not isinstance(given, Image):
        raise InvalidRequestError("an image must be a data URL or a Pillow image")
    file = io.BytesIO()
    keeps_mode = given.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
    try:
        (given if keeps_mode else given.convert("RGB")).save(file, "PNG", compress_level=1)
    except Exception as error:  # it may read its file only now
        raise InvalidRequestError("the image is damaged") from error
    return file.getvalue()


def check_number(each: Sequence[object], num_prompts: int, name: str, *, param: str) -> None:
    """Raise `InvalidRequestError` unless there is one for each prompt."""
    if len(each) != num_prompts:
        raise InvalidRequestError(f"{len(each)} {name} for {num_prompts} prompts", param=param)


def params_for(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One `SamplingParams` per prompt.

    If one is given for all, prompt i gets its seed + i, so that equal prompts differ. A list is
    used unchanged.

    Raises:
        InvalidRequestError: a list whose length is not that of the prompts, or a value of the
            wrong type.
    """
    if isinstance(params, SamplingParams):
        _check_types(params)
        return [
            msgspec.structs.replace(params, seed=(params.seed + i) & SEED_MASK)
            for i in range(num_prompts)
        ]
    check_number(params, num_prompts, "sampling parameters", param="sampling_params")
    for each in params:
        _check_types(each)
    return list(params)


def _check_types(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams, not {type(params).__name__}",
            param="sampling_params",
        )
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    for name, message in misfits(SamplingParams, values):
        raise InvalidRequestError(message, param=name)


class LoRARequest:
    """An adapter of offline calls by its directory, in our form or in vLLM's.

    LoRARequest(name="sql", path="/adapters/sql")
    LoRARequest("sql", 1, "/adapters/sql")

    Args:
        lora_int_id: vLLM's; adapters are told apart by their content here.
    """

    __slots__ = ("name", "path")

    def __init__(
        self,
        lora_name: str | None = None,
        lora_int_id: int | None = None,  # noqa: ARG002 (vLLM's)
        lora_path: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        found_name, found_path = name or lora_name, path or lora_path
        if not found_name or not isinstance(found_name, str) or not found_path:
            raise InvalidRequestError("LoRARequest needs a name and a path", param="lora_request")
        self.name, self.path = found_name, os.fspath(found_path)

    def __repr__(self) -> str:
        return f"LoRARequest(name={self.name!r}, path={self.path!r})"


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class AdapterFinder:
    """Finds and reads the adapters of calls."""

    def __init__(self, config: LoraConfig, core: EngineCore) -> None:
        self._config, self._core = config, core
        self._known: dict[tuple[object, ...], Adapter] = {}  # by path and times of its files

    def find(self, requests: LoRARequests, num_prompts: int) -> list[Adapter | None]:
        """The adapter of each prompt.

        Raises:
            InvalidRequestError: one cannot be used.
        """
        several = [requests] * num_prompts if isinstance(requests, LoRARequest) else requests
        if several is None:
            return [None] * num_prompts
        if not isinstance(several, list | tuple) or not all(
            each is None or isinstance(each, LoRARequest) for each in several
        ):
            raise InvalidRequestError(
                "lora_request must be a LoRARequest or a list of them", param="lora_request"
            )
        check_number(several, num_prompts, "adapters", param="lora_request")
        if not self._config.enable_lora and any(several):
            raise InvalidRequestError(
                "lora_request needs LLM(enable_lora=True)", param="lora_request"
            )
        found = {each: self._find(each) for each in several if each is not None}
        return [None if each is None else found[each] for each in several]

    def _find(self, request: LoRARequest) -> Adapter:
        try:
            key = (request.name, request.path, *_times(Path(request.path)))
            if key not in self._known:
                self._known[key] = find_adapter(
                    request.name,
                    request.path,
                    max_rank=self._config.max_lora_rank,
                    max_bytes=self._core.adapters.max_bytes,
                )
            self._core.preparation.load(self._core.adapters.need(self._known[key]))
        except (InvalidRequestError, ModelLoadError) as error:
            raise InvalidRequestError(str(error), param="lora_request") from error
        return self._known[key]


def _times(path: Path) -> list[tuple[int, int]]:
    files = [path / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    return [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
