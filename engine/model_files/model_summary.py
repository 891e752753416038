"""What a model would need, before anything of it is loaded: `penstock models MODEL`; which models
are on this machine: `penstock models`.

It runs in a process of its own, since the command line imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import CacheNotFound, scan_cache_dir

from penstock.engine.chat_formats import ModelFacts, ModelFormats
from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.layers.experts import ExpertMatrices
from penstock.engine.model_files.config_fields import read_model_fields
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.model_files.gguf.choice import labels
from penstock.engine.model_files.packaged_models import PACKAGED_MODELS
from penstock.engine.model_files.resolve import (
    GenerationDefaults,
    is_local,
    read_generation_defaults,
    resolve_model,
)
from penstock.engine.model_files.users_files import in_users_words, named_as_users_do
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loader import build_without_weights, parts_by_kind
from penstock.engine.models.registry import is_native, missing_option
from penstock.engine.pooling.settings import read_pooling
from penstock.engine.runner.device import resolve_kv_dtype, resolve_max_model_len, use_kv_dtype
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.memory import cpu_pool_bytes
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.engine.weights.formats import check_format
from penstock.engine.weights.quantization import num_bytes

if TYPE_CHECKING:
    from penstock.engine.models.through_transformers.backend import TransformersModel

_WEIGHTS = ("*.safetensors", "*.gguf")


def summarise(config: ModelConfig, cache: CacheConfig) -> str:
    """A line for each fact about the model, and about what of it fits into this machine's memory.

    Raises:
        ConfigError: why the model is refused.
    """
    path = resolve_model(config, weights=False)
    with named_as_users_do(config.model, path):
        facts = _facts(config, cache, path)
        lines = "\n".join(f"{name:<13} {text}" for name, text in facts.items())
        return in_users_words(lines, config.model, path)


def _facts(config: ModelConfig, cache: CacheConfig, path: Path) -> dict[str, str]:
    has_weights = config.load_format != "dummy" and is_local(config)
    names = read_model_fields(path).texts("architectures")
    if read_pooling(path, config.model).is_encoder:
        check_format(path, has_weights=has_weights)
        _check_small_files(config, path)
        return {"architecture": ", ".join(names), "runs": "as an encoder of texts"}
    model = build_without_weights(config, path, has_weights=has_weights)
    sampling = _check_small_files(config, path).sampling
    kv_dtype = resolve_kv_dtype(cache, model.dtype)
    use_kv_dtype(model, kv_dtype)
    shape = KVShape.of(model.state_spec, 1)
    context, free = resolve_max_model_len(config, model.context_len), free_cpu_bytes()
    weights = _weight_bytes(config, path, model)
    left = max(0, free - weights)
    num_tokens = cpu_pool_bytes(left) // shape.bytes_per_block
    kv_name = str(kv_dtype).removeprefix("torch.")
    return {
        "architecture": ", ".join(names),
        "runs": _how(config, path),
        "formats": _formats(path),
        "context": f"{context:,} tokens",
        "weights": f"{weights:,} bytes",
        "KV cache": f"{shape.bytes_per_block:,} bytes per token ({kv_name})",
        "free memory": f"{free:,} bytes",
        "fits": _fitting(
            num_tokens,
            context,
            has_room=weights <= free,
            has_experts=any(isinstance(each, ExpertMatrices) for each in model.modules()),
        ),
        "sampling": ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        or "no defaults of its own",
    }


class _Place(NamedTuple):
    """A model on this machine. One without a path is not served, for what `about` says."""

    name: str
    path: Path | None
    num_bytes: int
    about: str = ""


def listed(config: ModelConfig, cache: CacheConfig) -> Iterator[str]:
    """A line for each model that is here: packaged ones, and those of the Hub's cache.

    Args:
        config: for all of them; `model` is not used.
    """
    places = [*_packaged(), *_on_the_hub(config)]
    width = max(len(each.name) for each in places)
    for place in places:
        size = f"{place.num_bytes / 1e6:,.0f} MB" if place.num_bytes else "–"
        yield f"{place.name:<{width}}  {size:>10}  {_status(place, config, cache)}"


def _packaged() -> Iterator[_Place]:
    for name, model in PACKAGED_MODELS.items():
        path = model.find()
        if path is None:
            yield _Place(name, None, 0, f"not installed: {model.how_to_install}")
        else:
            yield _Place(name, path, _size(path), model.about)


def _on_the_hub(config: ModelConfig) -> Iterator[_Place]:
    """Repositories in the cache: of the revision that would be served, or else the latest. GGUF
    files have their labels, as in `repo:Q4_K_M`."""
    try:
        found = scan_cache_dir(config.download_dir)
    except (CacheNotFound, ValueError):  # or a file where the folder would be
        return
    models = (each for each in found.repos if each.repo_type == "model" and each.revisions)
    for repository in sorted(models, key=lambda each: each.repo_id):
        revision = repository.refs.get(config.revision or "main")
        if revision is None:
            revision = max(repository.revisions, key=lambda each: each.last_modified)
        path, name = revision.snapshot_path, repository.repo_id
        files = [*labels(str(each.relative_to(path)) for each in path.rglob("*.gguf"))]
        if any(path.glob("*.safetensors")):
            yield _Place(name, path, repository.size_on_disk)
        for label, names in files:
            parts = [path / each for each in names]
            shown = f"{name}:{label}" if label else str(parts[0])
            yield _Place(shown, parts[0], sum(map(_size, parts)))
        if not (files or any(path.glob("*.safetensors"))):
            yield _Place(name, None, repository.size_on_disk, "not complete: it has no weights")


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files)


def _status(place: _Place, config: ModelConfig, cache: CacheConfig) -> str:
    """How a model runs, or why it does not, and what it is for."""
    if place.path is None:
        return place.about
    model = str(place.path)
    try:
        path = resolve_model(replace(config, model=model, revision=None), weights=False)
        with named_as_users_do(model, path):
            facts = _facts(replace(config, model=model), cache, path)
    except ConfigError as error:
        return f"refused: {error}"
    return f"runs {facts['runs']}" + (f"; {place.about}" if place.about else "")


def _check_small_files(config: ModelConfig, path: Path) -> GenerationDefaults:
    """Read what the gateway reads at its start, to refuse what it would."""
    defaults = read_generation_defaults(
        path, config.generation_config, config.generation_overrides, model=config.model
    )
    Tokenizer.from_directory(path)
    ChatTemplate.from_directory(path).check()
    return defaults


def _formats(path: Path) -> str:
    """How it writes calls and thoughts, as far as its chat template tells."""
    return ModelFormats.of(ModelFacts.found_in(ChatTemplate.from_directory(path)), {}).described


def _how(config: ModelConfig, path: Path) -> str:
    if is_native(config, path):
        return "natively"
    missing = missing_option(config, path)
    return "through transformers" + ("" if missing is None else f", since natively {missing}")


def _weight_bytes(config: ModelConfig, path: Path, model: Decoder | TransformersModel) -> int:
    """The size of the weights in memory: as the files have them, or quantized at load."""
    fields = read_model_fields(path)
    files = [each.stat().st_size for pattern in _WEIGHTS for each in path.glob(pattern)]
    if files and ("quantization_config" in fields or next(path.glob("*.gguf"), None)):
        return sum(files)
    total = model.weight_bytes
    for rows, columns, kind, is_counted in parts_by_kind(config, path, model):
        dense, held = (num_bytes(each, rows, columns, model.dtype) for each in ("none", kind))
        total += held - (dense if is_counted else 0)
    return total


def _fitting(num_tokens: int, context: int, *, has_room: bool, has_experts: bool) -> str:
    if not has_room and has_experts:
        return "in part: experts are read from a file in the cache"
    if not has_room:
        return "no: the weights alone take more"
    if num_tokens < context:
        return f"with --max-model-len {num_tokens}; --kv-cache-memory-bytes makes room for more"
    return f"yes: {num_tokens:,} tokens in the cache, {num_tokens // context:,} whole contexts"


def main(settings: str) -> int:
    """settings: JSON of the fields of `ModelConfig` and `CacheConfig`, those of the first without
    `model` to list what is here; the exit code."""
    sections = json.loads(settings)
    try:
        config, cache = ModelConfig(**sections["model"]), CacheConfig(**sections["cache"])
        if "model" in sections["model"]:
            print(summarise(config, cache))
        else:
            for line in listed(config, cache):
                print(line, flush=True)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
