"""A PEFT adapter's directory: its settings, the identity of its content, and what is not supported.

    adapter_config.json         r, lora_alpha, target_modules, …
    adapter_model.safetensors   lora_A and lora_B of each module

Without torch: the gateway names adapters, the engine's `slots` reads the tensors. Sizes are checked
before anything is read, and patterns are matched under limits (`patterns`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.lora.patterns import Pattern, PatternError, matches
from penstock.engine.model_files.config_fields import ConfigFields, shown
from penstock.engine.model_files.json_file import check_file, is_present, read_json
from penstock.engine.request import Adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_READ_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 4 << 20
MAX_HEADER_BYTES = 16 << 20  # of the tensors' names and shapes
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
class ModuleUpdate:
    """What the settings say of a module.

    Attributes:
        scale: the factor of B (A x).
        is_expected: the adapter must have matrices for it.
    """

    rank: int
    scale: float
    is_expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What `adapter_config.json` says, by PEFT's names.

    Attributes:
        target_modules: names, or their ends; a regular expression if it is a text; None: not said.
        layers_pattern: what comes before a layer's number, for `layers_to_transform`.
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
    layers_pattern: tuple[str, ...]

    def updates(self, modules: Mapping[str, bool]) -> dict[str, ModuleUpdate]:
        """
        Args:
            modules: whether each is neither the embedding nor the output head.

        Raises:
            ModelLoadError: a pattern is invalid, or takes too long to match; names the field.
        """
        names = list(modules)
        ranks = self._by_pattern("rank_pattern", self.rank_pattern, names)
        alphas = self._by_pattern("alpha_pattern", self.alpha_pattern, names)
        expected = self._expected(modules)
        found = {}
        for module in names:
            rank = int(ranks.get(module, self.r))
            alpha = alphas.get(module, self.lora_alpha)
            found[module] = ModuleUpdate(
                rank=rank,
                scale=float(alpha / (rank**0.5 if self.use_rslora else rank)),
                is_expected=module in expected,
            )
        return found

    def _expected(self, modules: Mapping[str, bool]) -> set[str]:
        if self.target_modules is None:
            return set()
        if self.target_modules == "all-linear":
            found = {module for module, is_linear in modules.items() if is_linear}
        else:
            found = self._among("target_modules", self.target_modules, modules)
            if self.layers_to_transform is not None:
                found &= self._in_layers(list(modules), self.layers_to_transform)
        return found - self._among("exclude_modules", self.exclude_modules, modules)

    def _among(
        self, field: str, names: str | tuple[str, ...] | None, modules: Iterable[str]
    ) -> set[str]:
        if isinstance(names, str):
            [found] = self._matches(field, [Pattern(names, is_full=True)], list(modules))
            return set(found)
        several = set(names or ())
        return {module for module in modules if not several.isdisjoint(_ends(module))}

    def _in_layers(self, modules: list[str], layers: Collection[int]) -> set[str]:
        """The modules in the layers that are to be transformed. A layer's number follows the first
        pattern that is found, as in PEFT."""
        patterns = [Pattern(rf".*\.{each}\.(\d+)\.") for each in self.layers_pattern]
        numbers: dict[str, str] = {}
        default = [Pattern(r".*?\.[^.]*\.(\d+)\.")]
        for found in self._matches("layers_pattern", patterns or default, modules):
            numbers = {**found, **numbers}
        return {each for each, number in numbers.items() if number in map(str, layers)}

    def _by_pattern(
        self, field: str, values: Mapping[str, Any], modules: list[str]
    ) -> dict[str, Any]:
        """The value of the first pattern that matches the end of a module's name, as in PEFT."""
        patterns = [Pattern(rf"(.*\.)?({key})$", plain=key) for key in values]
        by_module: dict[str, Any] = {}
        if patterns:
            matches = self._matches(field, patterns, modules)
            for value, found in zip(values.values(), matches, strict=True):
                by_module = {**dict.fromkeys(found, value), **by_module}
        return by_module

    def _matches(
        self, field: str, patterns: list[Pattern], modules: list[str]
    ) -> list[dict[str, str]]:
        try:
            return matches(patterns, modules)
        except PatternError as error:
            raise ModelLoadError(f"{self.path / CONFIG_FILE}: {field}: {error}") from error


def _ends(module: str) -> Iterator[str]:
    """A module's name, and each end of it that follows a point."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def read_config(path: Path, *, max_rank: int | None = None) -> AdapterConfig:
    """The settings of the adapter in directory `path`.

    Args:
        max_rank: the largest rank that there is room for (`--max-lora-rank`).

    Raises:
        ModelLoadError: names the file and the field that is missing, invalid or not supported.
    """
    file = path / CONFIG_FILE
    check_file(file, max_bytes=_MAX_CONFIG_BYTES)
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
        layers_pattern=_texts(fields, values, "layers_pattern"),
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
    return pattern


def _names(
    fields: ConfigFields, values: Mapping[str, Any], name: str
) -> str | tuple[str, ...] | None:
    found = values.get(name)
    if found is None:
        return None
    if isinstance(found, str):
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


def _texts(fields: ConfigFields, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = _names(fields, values, name) or ()
    return (found,) if isinstance(found, str) else found


def find_adapter(
    name: str, path: str, *, max_rank: int | None = None, max_bytes: int | None = None
) -> Adapter:
    """The adapter in a directory, with the digest of its content: it reads all of it, once its
    settings and its size are checked.

    Args:
        max_bytes: that an adapter of the model can have.

    Raises:
        ModelLoadError: the files are missing, too large, or their settings are not supported.
    """
    directory = Path(path)
    config = read_config(directory, max_rank=max_rank)
    check_size(directory, max_bytes=max_bytes)
    config.updates(dict.fromkeys(_module_names(directory / WEIGHTS_FILE), True))
    return Adapter(name=name, path=str(directory.absolute()), digest=content_digest(directory))


def check_size(path: Path, *, max_bytes: int | None) -> None:
    """
    Raises:
        ModelLoadError: an adapter's matrices are missing, or larger than any of the model's can be.
    """
    if not is_present(path / WEIGHTS_FILE) and is_present(path / "adapter_model.bin"):
        raise ModelLoadError(f"{path / 'adapter_model.bin'}: only safetensors are read")
    check_file(path / WEIGHTS_FILE, max_bytes=max_bytes)


def _module_names(file: Path) -> set[str]:
    """The modules in a file of matrices; none if it is damaged, which the engine reports."""
    with contextlib.suppress(OSError, ValueError, RecursionError), file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(size)) if size <= MAX_HEADER_BYTES else {}
        names = [each.removeprefix("base_model.model.") for each in header]
        return {each.partition(".lora_")[0] for each in names if ".lora_" in each}
    return set()


def content_digest(path: Path) -> str:
    """SHA-256 of an adapter's two files, in hexadecimal: what its KV depends on.

    Raises:
        ModelLoadError: one is missing or cannot be read.
    """
    total = hashlib.sha256()
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
