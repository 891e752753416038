"""Converts model directories by llama.cpp's own converter, many in one process:

    python converter_worker.py LLAMA_CPP JOBS.json

The file has a list of [source, target]. Vocabularies are written as byte-level ones, whatever the
family: these models have random weights, and the converter knows real vocabularies only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT, JOBS = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
sys.path[:0] = [str(ROOT / "gguf-py"), str(ROOT)]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import get_model_class  # type: ignore[import-not-found]  # noqa: E402
from conversion.base import ModelBase, TextModel  # type: ignore[import-not-found]  # noqa: E402

_NAMES = {"MptForCausalLM": "MPTForCausalLM"}


def convert(source: Path, target: Path) -> None:
    own = json.loads((source / "config.json").read_text())
    # Of a configuration that transformers has rewritten, the converter misses some fields.
    fields = {**own, **ModelBase.load_hparams(source, False)}
    kind = get_model_class(_NAMES.get(own["architectures"][0], own["architectures"][0]))
    kind.set_vocab = TextModel._set_vocab_gpt2
    if kind.__name__ == "StableLMModel":
        kind.modify_tensors = _with_what_is_returned(kind.modify_tensors)
    with torch.inference_mode():
        kind(source, gguf.LlamaFileType.ALL_F32, target, hparams=fields).write()


def _with_what_is_returned(modify: Any) -> Any:
    """StableLM's converter returns its normed keys from a generator, where they are lost."""

    def modified(self: Any, *arguments: Any) -> Iterator[Any]:
        rest = yield from modify(self, *arguments)
        yield from rest or ()

    return modified


if __name__ == "__main__":
    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    for source, target in JOBS:
        convert(Path(source), Path(target))
