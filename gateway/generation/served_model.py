"""The model's names, tokenizer, chat template and sampling defaults, read once at start-up.

Only the engine loads weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.chat_formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormats
from penstock.engine.errors import ConfigError
from penstock.engine.model_files import (
    GenerationDefaults,
    read_generation_defaults,
    resolve_model,
)
from penstock.engine.pooling import ModelPooling, Task, read_pooling
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.engine.text.chat_template import TemplateFiles
from penstock.engine.vision.image_tokens import ImageTokens, read_image_tokens
from penstock.engine.vision.message_parts import MessageParts, parts_of
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.template_process import TemplateCheck


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
        if task is not None and (name is None or name in self.names):
            self.pooling.require(task)
        if name is None:
            return self.name
        if name not in self.names:
            raise RequestRefusedError(
                f"the model {name!r} does not exist; this server has "
                f"{', '.join((*self.names, *others))}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return name


def _format(flag: str, asked: str | None, known: Collection[str]) -> str | None:
    """The format that a flag names; None if it is not given.

    Raises:
        ConfigError: there is no such format.
    """
    if asked in ("", "none"):
        return ""
    if asked is not None and asked not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(sorted(known))}, not {asked!r}")
    return asked


def load_model(config: GatewayConfig, *, checks_template: bool = False) -> ServedModel:
    """Find and read the model's small files.

    Args:
        checks_template: first render the chat template in a separate process, so that a template
            that never ends becomes an error instead of blocking the gateway.

    Raises:
        ModelLoadError: a file is missing or invalid.
    """
    path = resolve_model(config.model, weights=False)
    files = TemplateFiles.read(path)
    has_template = files.source is not None or files.named
    check = TemplateCheck(files) if checks_template and has_template else None
    tokenizer = Tokenizer.from_directory(path)  # while the check runs
    if check is not None:
        check.result()
    template, images = ChatTemplate(*files), read_image_tokens(path)
    tools = _format("--tool-call-parser", config.tool_call_parser, TOOL_FORMATS)
    reasoning = _format("--reasoning-parser", config.reasoning_parser, REASONING_FORMATS)
    return ServedModel(
        images=images,
        message_parts=parts_of(template, images),
        names=config.model_names,
        directory=path,
        tokenizer=tokenizer,
        chat_template=template,
        defaults=read_generation_defaults(path, config.model.generation_config),
        pooling=read_pooling(path, config.model.model),
        formats=ModelFormats.of(template, tokenizer.added_tokens, tools=tools, reasoning=reasoning),
    )
