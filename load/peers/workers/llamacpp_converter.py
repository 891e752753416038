"""Converts model directories by llama.cpp's own converter, several in one process:

    python -m penstock.load.peers.workers.llamacpp_converter LLAMA_CPP TYPE SOURCE TARGET …

The type is one of `gguf.LlamaFileType`. If the name of a source ends in `fused`, queries, keys and
values become one tensor. Vocabularies are written as byte-level ones, whatever the family: these
models have random weights, and the converter knows real vocabularies only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT, TYPE, *FILES = sys.argv[1:]
sys.path[:0] = [f"{ROOT}/gguf-py", ROOT]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import get_model_class  # type: ignore[import-not-found]  # noqa: E402
from conversion.base import ModelBase, TextModel  # type: ignore[import-not-found]  # noqa: E402

_NAMES = {"MptForCausalLM": "MPTForCausalLM"}


def convert(source: Path, target: Path) -> None:
    own = json.loads((source / "config.json").read_text())
    # Of a configuration that transformers has rewritten, the converter misses some fields.
    fields = {**own, **ModelBase.load_hparams(source, False)}
    if "n_positions" in fields:
        fields.setdefault("n_ctx", fields["n_positions"])
    kind = get_model_class(_NAMES.get(own["architectures"][0], own["architectures"][0]))
    kind.set_vocab = TextModel._set_vocab_gpt2
    if kind.__name__ == "StableLMModel":
        kind.modify_tensors = _with_what_is_returned(kind.modify_tensors)
    options = {"hparams": fields, "fuse_qkv": source.name.endswith("fused")}
    with torch.inference_mode():
        kind(source, gguf.LlamaFileType[TYPE], target, **options).write()


def _with_what_is_returned(modify: Any) -> Any:
    """StableLM's converter returns its normed keys from a generator, where they are lost."""

    def modified(self: Any, *arguments: Any) -> Iterator[Any]:
        rest = yield from modify(self, *arguments)
        yield from rest or ()

    return modified


if __name__ == "__main__":
    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    for source, target in zip(FILES[::2], FILES[1::2], strict=True):
        convert(Path(source), Path(target))
