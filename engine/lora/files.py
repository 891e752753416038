"""A PEFT adapter's directory: its settings, the identity of its content, and what is not supported.

    adapter_config.json         r, lora_alpha, target_modules, …
    adapter_model.safetensors   lora_A and lora_B of each module

Without torch: the gateway names adapters, the engine's `slots` reads the tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.config_fields import ConfigFields, shown
from penstock.engine.errors import ModelLoadError
from penstock.engine.json_file import check_file, is_present, read_json
from penstock.engine.request import Adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_READ_BYTES = 1 << 20
# Fields that change nothing about what is computed; `corda_config` and its like say how the
# matrices began, and `init_lora_weights` which of these ways changed the base model too.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "layers_pattern", "layers_to_transform",
    "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora",
}  # fmt: skip
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What `adapter_config.json` says, by PEFT's names.

    Attributes:
        target_modules: names, or their ends; a regular expression if it is a text; None: not said.
    """

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...] | None

    def rank(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """The factor of B (A x)."""
        rank = self.rank(module)
        alpha = _matched(self.alpha_pattern, module, self.lora_alpha)
        return float(alpha / (rank**0.5 if self.use_rslora else rank))

    def expected(self, modules: Mapping[str, bool]) -> list[str]:
        """Those of a model's modules that the adapter must have matrices for.

        Args:
            modules: whether each is neither the embedding nor the output head.
        """
        return [module for module, linear in modules.items() if self._is_target(module, linear)]

    def _is_target(self, module: str, is_linear: bool) -> bool:
        if self.target_modules is None or _is_among(self.exclude_modules, module):
            return False
        if self.layers_to_transform is not None and self.target_modules != "all-linear":
            number = re.match(r".*?\.[^.]*\.(\d+)\.", module)
            if number is None or int(number[1]) not in self.layers_to_transform:
                return False
        if self.target_modules == "all-linear":
            return is_linear
        return _is_among(self.target_modules, module)


def _is_among(names: str | tuple[str, ...] | None, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _matched(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first entry that matches the end of a module's name, as in PEFT."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_config(path: Path, *, max_rank: int | None = None) -> AdapterConfig:
    """The settings of the adapter in directory `path`.

    Args:
        max_rank: the largest rank that there is room for (`--max-lora-rank`).

    Raises:
        ModelLoadError: names the file and the field that is missing, invalid or not supported.
    """
    file = path / CONFIG_FILE
    values = read_json(file)
    fields = ConfigFields(values, path=file)
    _refuse_others(fields, values)
    config = AdapterConfig(
        path=path,
        r=fields.integer("r"),
        lora_alpha=fields.number("lora_alpha"),
        use_rslora=fields.boolean("use_rslora", False),
        rank_pattern=_pattern(fields, values, "rank_pattern", int),
        alpha_pattern=_pattern(fields, values, "alpha_pattern", int | float),
        target_modules=_names(fields, values, "target_modules"),
        exclude_modules=_names(fields, values, "exclude_modules"),
        layers_to_transform=_layers(fields, values),
    )
    for rank in (config.r, *config.rank_pattern.values()):
        if max_rank is not None and rank > max_rank:
            raise fields.error("r", f"the rank {rank} is more than --max-lora-rank {max_rank}")
    return config


def _refuse_others(fields: ConfigFields, values: Mapping[str, Any]) -> None:
    """Refuse what changes the computation in a way that there is not."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise fields.error("peft_type", f"expected 'LORA', not {shown(kind)}")
    if values.get("bias") not in (None, "none"):
        raise fields.error("bias", f"{shown(values['bias'])} is not supported, only 'none'")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise fields.error(
            "init_lora_weights",
            f"{shown(start)} changes the base model; save the adapter as a plain one first",
        )
    for name, value in values.items():
        if value and name not in _READ | _IGNORED:
            raise fields.error(name, f"{shown(value)} is not supported")


def _pattern(
    fields: ConfigFields, values: Mapping[str, Any], name: str, kind: Any
) -> dict[str, Any]:
    pattern = values.get(name) or {}
    if not isinstance(pattern, dict) or not all(
        isinstance(value, kind) and not isinstance(value, bool) and value > 0
        for value in pattern.values()
    ):
        raise fields.error(name, f"expected positive numbers by name, not {shown(pattern)}")
    for key in pattern:
        _check_expression(fields, name, key)
    return pattern


def _names(
    fields: ConfigFields, values: Mapping[str, Any], name: str
) -> str | tuple[str, ...] | None:
    found = values.get(name)
    if found is None:
        return None
    if isinstance(found, str):
        if found != "all-linear":
            _check_expression(fields, name, found)
        return found
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise fields.error(name, f"expected a text or a list of names, not {shown(found)}")
    return tuple(found)


def _layers(fields: ConfigFields, values: Mapping[str, Any]) -> tuple[int, ...] | None:
    found = values.get("layers_to_transform")
    if found is None or found == []:
        return None
    layers = found if isinstance(found, list) else [found]
    if not all(isinstance(each, int) for each in layers):
        raise fields.error("layers_to_transform", f"expected numbers, not {shown(found)}")
    return tuple(layers)


def _check_expression(fields: ConfigFields, name: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise fields.error(
            name, f"{shown(expression)} is no regular expression: {error}"
        ) from error


def find_adapter(name: str, path: str, *, max_rank: int | None = None) -> Adapter:
    """The adapter in a directory, with the digest of its content: it reads all of it.

    Raises:
        ModelLoadError: the files are missing, or their settings are not supported.
    """
    directory = Path(path)
    read_config(directory, max_rank=max_rank)
    return Adapter(name=name, path=str(directory.absolute()), digest=content_digest(directory))


def content_digest(path: Path) -> str:
    """SHA-256 of an adapter's two files, in hexadecimal: what its KV depends on.

    Raises:
        ModelLoadError: one is missing or cannot be read.
    """
    total = hashlib.sha256()
    if not is_present(path / WEIGHTS_FILE) and is_present(path / "adapter_model.bin"):
        raise ModelLoadError(f"{path / 'adapter_model.bin'}: only safetensors are read")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        check_file(path / name)
        part = hashlib.sha256()
        try:
            with (path / name).open("rb") as data:
                while chunk := data.read(_READ_BYTES):
                    part.update(chunk)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path / name}: {error.strerror}") from error
        total.update(part.digest())
    return total.hexdigest()
