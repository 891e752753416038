"""Compiles every case ahead of time, without a GPU: a program that `test_compile` runs.

    python compile_all.py [FILE ...]

Prints one JSON object a line: file, label, target, and `error` or what the kernel takes of the
device: `shared_bytes`, `registers` (a thread's), `spill_bytes` (of stack, for registers that did
not suffice; null where the toolchain does not say). Files are those of `compile_cases/`, all by
default; `--asm DIR` keeps the assembly there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import runpy
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import Any

import triton
from compile_case import CompileCase
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

CASES_DIR = Path(__file__).parent / "compile_cases"
TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_case(case: CompileCase, target: str) -> CompiledKernel:
    kernel = getattr(importlib.import_module(f"penstock.kernels.gpu.{case.module}"), case.kernel)
    given = set(case.signature) | set(case.constexprs)
    assert given == set(kernel.arg_names), f"{sorted(given ^ set(kernel.arg_names))} differ"
    is_aligned = {
        name: kind.startswith("*") or name in case.divisible_by_16
        for name, kind in case.signature.items()
    }
    source = ASTSource(
        fn=kernel,
        signature={name: case.signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(n),): value for n, value in case.constexprs.items()},
        attrs={
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, aligned in is_aligned.items()
            if aligned
        },
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(compiled: CompiledKernel) -> dict[str, int | None]:
    """Shared memory in bytes, registers of a thread, and bytes of stack for spilled ones."""
    found: dict[str, int | None] = {"shared_bytes": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        return found | _sm_resources(compiled.asm["cubin"])
    numbers = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", _gcn(compiled)))
    return found | {
        "registers": int(numbers["vgpr_count"]),
        "spill_bytes": int(numbers["private_segment_fixed_size"]),
    }


def _gcn(compiled: CompiledKernel) -> str:
    assembly: str = compiled.asm["amdgcn"]
    return assembly


def _sm_resources(cubin: bytes) -> dict[str, int | None]:
    if not CUOBJDUMP.exists():
        return {"registers": None, "spill_bytes": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return {"registers": int(numbers["REG"]), "spill_bytes": int(numbers["STACK"])}


def report(file: str, case: CompileCase, target: str, asm_dir: Path | None) -> dict[str, Any]:
    names = {"file": file, "label": case.label, "target": target}
    try:
        compiled = compile_case(case, target)
    except Exception:  # whatever the compiler raises is this case's result
        return names | {"error": traceback.format_exc(limit=0)}
    if asm_dir is not None:
        name = f"{file}-{case.label.replace(' ', '_')}.{target}"
        for kind in ("ttgir", "ptx", "cubin", "amdgcn"):
            if kind in compiled.asm:
                text = compiled.asm[kind]
                content = text if isinstance(text, bytes) else text.encode()
                (asm_dir / f"{name}.{kind}").write_bytes(content)
    return names | resources(compiled)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--asm", type=Path, default=None)
    arguments = parser.parse_args()
    files = arguments.files or sorted(path.stem for path in CASES_DIR.glob("[!_]*.py"))
    for file in files:
        cases: list[CompileCase] = runpy.run_path(str(CASES_DIR / f"{file}.py"))["CASES"]
        assert len({case.label for case in cases}) == len(cases), f"{file}: labels repeat"
        for case in cases:
            for target in case.targets:
                print(json.dumps(report(file, case, target, arguments.asm)), flush=True)


if __name__ == "__main__":
    main()
