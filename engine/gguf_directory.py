"""A model directory for a GGUF file, made once: `python -m penstock.engine.gguf_directory FILE`
prints it.

A process of its own, since transformers, which knows GGUF's metadata and tokenizers, imports torch,
and the gateway does not. The directory has what transformers makes of them, a link to the file, and
an index of its tensors. It is named by a digest of the file, so another file gets another one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
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
from penstock.kernels.cpu.build import BuildError, cache_dir, remove_orphans, unfinished

_VERSION = 5  # of what is written; a change makes other directories
# What a file may declare before its tensors. The largest vocabularies, of 262,144 tokens with
# 515,000 merges, have 1.3 million elements in 20 MB; the readers take about 400 bytes for each.
MAX_KEYS = 4096
MAX_ELEMENTS = 3 << 20
MAX_METADATA_BYTES = 256 << 20
MAX_TENSORS = 1 << 16
_MAX_DIMS = 4
_SCALAR_BYTES = (1, 1, 2, 2, 4, 4, 4, 1, None, None, 8, 8, 8)  # by the number of a value's type
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
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
            remove_orphans(folder.parent, link=GGUF_FILE)
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
    with unfinished(folder.parent) as temporary:
        made = temporary / "made"
        made.mkdir()
        check_metadata(file)
        _write(file, made)
        _link(file, made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster, or left an incomplete one
            if not is_present(folder / GGUF_FILE):
                raise


def check_metadata(file: Path) -> None:
    """Check what a file declares, before it is read into memory.

    Source: docs/gguf.md of ggml.

    Raises:
        ModelLoadError: it is damaged, or declares more than any model has.
    """
    with file.open("rb") as data:
        content = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        with content:
            _Metadata(content).check()
    except _DamagedError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


class _DamagedError(Exception):
    """What is wrong with a file."""


class _Metadata:
    """What stands before the tensors: keys and values, then names, shapes and places of tensors.

    Args:
        content: of the file.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._end = content, min(len(content), MAX_METADATA_BYTES)
        self._at = len(GGUF_MAGIC)
        self._num_elements = 0
        self._alignment = _DEFAULT_ALIGNMENT

    def check(self) -> None:
        (version,) = self._take("<I")
        if version not in (2, 3):
            raise _DamagedError(f"its version is {version}, not 2 or 3 (little-endian)")
        num_tensors, num_keys = self._take("<QQ")
        self._bound(num_keys, MAX_KEYS, "keys")
        self._bound(num_tensors, MAX_TENSORS, "tensors")
        for _ in range(num_keys):
            self._skip_value()
        for _ in range(num_tensors):
            self._check_tensor()

    def _skip_value(self) -> None:
        key = self._text()
        (kind,) = self._take("<I")
        if kind == _ARRAY:
            kind, num = self._take("<IQ")
            self._num_elements += num
            self._bound(self._num_elements, MAX_ELEMENTS, "elements of arrays")
        else:
            num = 1
        if kind == _STRING:
            for _ in range(num):
                (size,) = self._take("<Q")
                self._skip(size)
        elif kind == _ARRAY or kind >= len(_SCALAR_BYTES):
            raise _DamagedError(f"key {_shown(key)} has values of type {kind}")
        elif key == b"general.alignment" and num == 1 and _SCALAR_BYTES[kind] == 4:
            (self._alignment,) = self._take("<I")
        else:
            self._skip(num * (_SCALAR_BYTES[kind] or 0))

    def _check_tensor(self) -> None:
        name = self._text()
        (num_dims,) = self._take("<I")
        self._bound(num_dims, _MAX_DIMS, f"dimensions of tensor {_shown(name)}")
        self._skip(8 * num_dims + 4)
        (offset,) = self._take("<Q")
        if not self._alignment or offset % self._alignment:
            raise _DamagedError(
                f"tensor {_shown(name)} begins at byte {offset}, which is no multiple of "
                f"{self._alignment}, the file's alignment"
            )
        if offset >= len(self._content):
            raise _DamagedError(f"tensor {_shown(name)} ends after the file")

    def _text(self) -> bytes:
        (size,) = self._take("<Q")
        start = self._at
        self._skip(size)
        return self._content[start : self._at]

    def _take(self, form: str) -> tuple[int, ...]:
        start = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._content, start)

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > self._end:
            is_cut = self._end == len(self._content)
            most = f"its metadata has more than {MAX_METADATA_BYTES:,} bytes"
            raise _DamagedError("it ends within its metadata" if is_cut else most)

    def _bound(self, number: int, most: int, what: str) -> None:
        if number > most:
            raise _DamagedError(f"it declares {number:,} {what}, more than {most:,}")


def _shown(name: bytes) -> str:
    return repr(name[:100].decode(errors="replace"))


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
