"""The model's names, tokenizer, chat template and sampling defaults, read once at start-up.

Only the engine loads weights.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.chat_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ModelFacts,
    ModelFormats,
    keep_facts,
    kept_facts,
    sentence_of,
)
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import (
    GenerationDefaults,
    read_generation_defaults,
    resolve_model,
)
from penstock.engine.model_files.users_files import named_as_users_do
from penstock.engine.pooling.settings import ModelPooling, Task, read_pooling
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.engine.text.chat_template import TemplateFiles
from penstock.engine.text.fill_in_middle import FillInMiddle
from penstock.engine.vision.image_tokens import ImageTokens, read_image_tokens
from penstock.engine.vision.message_parts import MessageParts, parts_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.template_process import TemplateCheck

# How our own clients sample where a model says nothing of it: as llama.cpp, but for its top_k. By
# OpenAI's defaults 8 of 32 answers of SmolLM2 had no end within 512 tokens, and 3 so.
_CHAT_SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
_FINGERPRINT_BYTES = 8
_DRAWS = {"temperature", "top_p", "top_k", "min_p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    directory: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: GenerationDefaults
    formats: ModelFormats
    pooling: ModelPooling
    images: ImageTokens | None  # how it takes them; None: it takes none
    message_parts: MessageParts
    fill_in_middle: FillInMiddle | None  # how it does; None: it does not
    takes_any_name: bool = False
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    seeds: random.Random | None = None  # draws those of requests that have none
    fingerprint: bytes = b""  # of its kind, tokenizer and chat template

    def origin(self, adapter_digest: bytes | str | None) -> bytes:
        """Names that by which token ids are made: the model, its template, and an adapter."""
        if adapter_digest is None:
            return self.fingerprint
        return hashlib.blake2b(
            repr((self.fingerprint, adapter_digest)).encode(), digest_size=_FINGERPRINT_BYTES
        ).digest()

    @property
    def name(self) -> str:
        return self.names[0]

    def require(
        self, name: str | None, task: Task | None = None, *, others: Sequence[str] = ()
    ) -> str:
        """The name for the answer; a request without a model name gets this model.

        Args:
            task: what it must be able to do.
            others: models that there are besides, for the message.

        Raises:
            RequestRefusedError: 404: this server does not have the model.
            InvalidRequestError: the model does something else.
        """
        is_this = name is None or self.has(name)
        if is_this and task is not None and task not in self.pooling.tasks:
            raise self.pooling.refusal()
        if name is None:
            return self.name
        if not self.has(name):
            raise self.not_found(name, others)
        return name

    def has(self, name: str) -> bool:
        """Whether requests may call the model so."""
        return self.takes_any_name or name in self.names

    def not_found(self, name: str, others: Sequence[str] = ()) -> RequestRefusedError:
        """404. others: as for `require`."""
        return RequestRefusedError(
            f"the model {name!r} does not exist; this server has "
            f"{', '.join((*self.names, *others))}",
            code="model_not_found",
            param="model",
            status=404,
        )

    def sampling_defaults(self) -> Mapping[str, Any]:
        """Parameters of a new request that it does not have itself."""
        found = dict(self.defaults.sampling)
        if self.seeds is not None:
            found["seed"] = self.seeds.getrandbits(63)
        if self.defaults.max_new_tokens is not None:
            found["max_tokens"] = self.defaults.max_new_tokens
        return found

    @property
    def chat_sampling(self) -> Mapping[str, Any]:
        """Sampling parameters of the page and of `penstock chat`: the model's own, or where it says
        nothing of how tokens are drawn, some that suit most models."""
        own = self.defaults.sampling
        return own if own.keys() & _DRAWS else {**_CHAT_SAMPLING, **own}


def _format(flag: str, asked: str | None, known: Collection[str]) -> str | None:
    """The format that a flag names, empty for none; None: that of the chat template.

    Raises:
        ConfigError: there is no such format.
    """
    if asked in (None, "auto"):
        return None
    if asked in ("", "none"):
        return ""
    if asked not in known:
        names = ", ".join(("auto", "none", *sorted(known)))
        raise ConfigError(f"{flag} must be one of {names}, not {asked!r}")
    return asked


def _seeds(config: GatewayConfig) -> random.Random | None:
    if config.model.seed is None:
        return None
    return random.Random(f"{config.model.seed} {config.worker_index}")  # noqa: S311


def _fingerprint(path: Path, template: ChatTemplate) -> bytes:
    """The same on all machines that have the model, wherever it is."""
    found = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES)
    for name in ("config.json", "tokenizer.json"):
        file = path / name
        content = file.read_bytes() if file.exists() else b""
        found.update(len(content).to_bytes(8) + content)
    found.update(repr((template.source, sorted(template.named.items()))).encode())
    return found.digest()


def load_model(config: GatewayConfig, *, checks_template: bool = False) -> ServedModel:
    """Find and read the model's small files.

    Args:
        checks_template: first render the chat template in a separate process, so that a template
            that never ends becomes an error instead of blocking the gateway.

    Raises:
        ModelLoadError: a file is missing or invalid.
    """
    path = resolve_model(config.model, weights=False)
    with named_as_users_do(config.model.model, path):
        return _read_model(config, path, checks_template=checks_template)


def _read_model(config: GatewayConfig, path: Path, *, checks_template: bool) -> ServedModel:
    files = TemplateFiles.read(path)
    has_template = files.source is not None or files.named
    known = kept_facts(files)
    check = TemplateCheck(files) if checks_template and has_template and known is None else None
    tokenizer = Tokenizer.from_directory(path)  # while the check runs
    if check is not None:
        known = check.result()
        keep_facts(files, known)
    template, images = ChatTemplate(*files), read_image_tokens(path)
    facts = ModelFacts.found_in(template) if known is None else known
    tools = _format("--tool-call-parser", config.tool_call_parser, TOOL_FORMATS)
    reasoning = _format("--reasoning-parser", config.reasoning_parser, REASONING_FORMATS)
    return ServedModel(
        images=images,
        message_parts=parts_of(template, images),
        fill_in_middle=FillInMiddle.read(path, tokenizer),
        names=config.model_names,
        takes_any_name=config.takes_any_name,
        template_defaults=config.template_defaults,
        seeds=_seeds(config),
        directory=path,
        fingerprint=_fingerprint(path, template),
        tokenizer=tokenizer,
        chat_template=template,
        defaults=read_generation_defaults(
            path,
            config.model.generation_config,
            config.model.generation_overrides,
            model=config.model.model,
        ),
        pooling=read_pooling(path, config.model.model),
        formats=ModelFormats.of(
            facts,
            tokenizer.added_tokens,
            tools=tools,
            reasoning=reasoning,
            sentence=sentence_of(path)
            if config.reasoning_budget_message is None
            else (config.reasoning_budget_message, ""),
        ),
    )
