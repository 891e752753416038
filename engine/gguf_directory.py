"""A model directory for a GGUF file, made once: `python -m penstock.engine.gguf_directory FILE`
prints it.

A process of its own, since transformers, which knows GGUF's metadata and tokenizers, imports torch,
and the gateway does not. The directory has what transformers makes of them, a link to the file, and
an index of its tensors. It is named by a digest of the file, so another file gets another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.json_file import (
    FIM_FIELD,
    GGUF_FILE,
    GGUF_INDEX,
    GGUF_MAGIC,
    check_file,
    is_present,
    weight_samples,
)
from penstock.kernels.cpu.build import BuildError, cache_dir

_VERSION = 5  # of what is written; a change makes other directories
ROPE_FACTORS = "rope_freqs.weight"
# Fields of experts that transformers leaves at their defaults, and the file's names for them.
_EXPERT_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_EOS_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Of `FillInMiddle`, and the file's names for them, the older one last.
_FIM_IDS = {
    "pre": ("fim_pre", "prefix"),
    "suf": ("fim_suf", "suffix"),
    "mid": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "rep": ("fim_rep",),
    "sep": ("fim_sep",),
    "eot": ("eot",),
}


def gguf_directory(file: Path) -> Path:
    """The model directory of a GGUF file, made unless it is there.

    Raises:
        ModelLoadError: with what is wrong with the file.
    """
    check_file(file)
    try:
        folder = cache_dir() / "gguf" / f"{file.stem}-{_digest(file)}-{_VERSION}"
        if not is_present(folder / GGUF_FILE):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(file, folder)
        elif (folder / GGUF_FILE).resolve() != file.resolve():  # the same file, moved or copied
            _link(file, folder)
    except BuildError as error:
        raise ModelLoadError(f"{file}: no place for its configuration: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return folder


def _digest(file: Path) -> str:
    """Of its size, its beginning, and samples to its end."""
    with file.open("rb") as data:
        if data.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelLoadError(f"{file} is not a GGUF file")
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    for sample in weight_samples(file):
        digest.update(sample)
    return digest.hexdigest()[:16]


def _make(file: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        _write(file, made)
        _link(file, made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster, or left an incomplete one
            if not is_present(folder / GGUF_FILE):
                raise


def _link(file: Path, folder: Path) -> None:
    fresh = folder / f".{os.getpid()}"
    fresh.symlink_to(file.resolve())
    fresh.replace(folder / GGUF_FILE)


def _write(file: Path, folder: Path) -> None:
    import gguf
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        reader = gguf.GGUFReader(file)
        fields = {name: each.contents() for name, each in reader.fields.items()
                  if len(each.data) == 1}  # fmt: skip
        if fields.get("split.count", 0) > 1:
            raise ModelLoadError(f"{file} is one of {fields['split.count']} parts; join them first")
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a damaged file leads both libraries to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"{file} cannot be read: {reason}") from error
    kind = config["model_type"]
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)]
    config["dtype"] = "bfloat16"
    for name, own in _EXPERT_SIZES.items():
        if name in config and (size := fields.get(f"{fields['general.architecture']}.{own}")):
            config[name] = size
    tensors = {
        each.name: {
            "type": each.tensor_type.name,
            "shape": [int(size) for size in reversed(each.shape)],
            "offset": int(each.data_offset),
            "size": int(each.n_bytes),
        }
        for each in reader.tensors
    }
    if factors := [each.data for each in reader.tensors if each.name == ROPE_FACTORS]:
        config["rope_scaling"] = _rope_scaling(file, config, factors[0].tolist())
    architecture = fields["general.architecture"]
    index = {"architecture": architecture, "tensors": tensors, "keys": _keys(architecture, kind)}
    eos_token_ids = sorted({fields[name] for name in _EOS_IDS if name in fields})
    tokenizer.save_pretrained(folder)
    _add_fim_ids(folder / "tokenizer_config.json", fields)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_token_ids})
    _write_json(folder / "config.json", config)
    _write_json(folder / GGUF_INDEX, index)


def _add_fim_ids(file: Path, fields: dict[str, Any]) -> None:
    """Adds the tokens that fill in the middle, if the GGUF file names them."""
    found = {
        name: fields[key]
        for name, keys in _FIM_IDS.items()
        for key in [f"tokenizer.ggml.{each}_token_id" for each in reversed(keys)]
        if key in fields
    }
    if found.keys() >= {"pre", "suf"}:
        _write_json(file, {**json.loads(file.read_text()), FIM_FIELD: found})


def _keys(architecture: str, kind: str) -> dict[str, str]:
    """The file's keys by the fields of `config.json` that transformers makes of them.

    Args:
        kind: what transformers calls the architecture.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mappings: dict[str, Any] = GGUF_CONFIG_MAPPING
    names = mappings.get(architecture) or mappings.get(kind, {})
    return {
        **{field: f"{architecture}.{key}" for key, field in names.items() if field},
        "architectures": "general.architecture",
        "model_type": "general.architecture",
        "eos_token_id": _EOS_IDS[0],
    }


def _rope_scaling(file: Path, config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """The parameters of Llama 3.1 that give these factors.

    Raises:
        ModelLoadError: there are none.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": round(max(factors), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    head_dim = len(factors) * 2
    plain, scaled = (
        ROPE_INIT_FUNCTIONS["llama3"](
            LlamaConfig(
                head_dim=head_dim,
                max_position_embeddings=131072,
                rope_parameters={**scaling, "rope_theta": theta, "factor": factor},
            ),
            "cpu",
        )[0]
        for factor in (1.0, scaling["factor"])
    )
    expected = (plain / scaled).tolist()
    pairs = zip(expected, factors, strict=True)
    if any(abs(one - other) > 1e-3 * other for one, other in pairs):
        raise ModelLoadError(f"{file}: tensor {ROPE_FACTORS} is not a scaling that is supported")
    return {**scaling, "rope_theta": theta}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, default=str))


if __name__ == "__main__":
    try:
        print(gguf_directory(Path(sys.argv[1])))
    except ModelLoadError as error:
        sys.exit(str(error))
