"""Triton kernels compiled without a GPU: registers, shared memory and spills as the assembler reports them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["Compiled", "compile_ahead"]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """registers: per thread. shared_bytes: per program. spill_bytes: stores and loads. ptx: the assembly."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    ptx: str


def compile_ahead(
    kernel: triton.JITFunction, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, *,
    warps: int = 4, stages: int = 3, fused: bool = True,
) -> Compiled:  # fmt: skip
    """Compile a kernel for compute capability 80 or 90.

    types: of each argument that is no constant ("*bf16", "i32", "fp32"); pointers are 16-byte aligned, where the kernel
    asks for that, and so are integers marked by ":16". constants: the values of all others. fused: whether a
    multiplication and an addition may become one.
    """
    signature = {name: types[name].removesuffix(":16") if name in types else "constexpr" for name in kernel.arg_names}
    anywhere = kernel.do_not_specialize_on_alignment
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in types and (types[name].endswith(":16") or (types[name].startswith("*") and name not in anywhere))
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    report = _assemble(ptx)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas said nothing about {kernel.__name__}: {report}")
    return Compiled(int(registers[1]), compiled.metadata.shared, int(spills[1]) + int(spills[2]), ptx)


def _assemble(ptx: str) -> str:
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise RuntimeError("the assembly names no target")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [TOOLS / "ptxas", "-v", "--gpu-name", target[1], source, "-o", Path(folder) / "kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
