"""The protocol of csrc/cuda/all_reduce.cu, run by threads of a CPU: its source, but for three lines of PTX.

With two blocks, so that each meets numbers of the other; threads are delayed at random.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc" / "cuda"
PTX = {
    "st.release.sys": "__atomic_store_n(address, value, __ATOMIC_RELEASE);",
    "ld.acquire.sys": "std::this_thread::yield(); value = __atomic_load_n(address, __ATOMIC_ACQUIRE);",
    "globaltimer": "now = 0;",
}


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    kernel = (SOURCE / "all_reduce.cu").read_text()
    for instruction, plain in PTX.items():
        kernel, replaced = re.subn(rf'asm volatile\("[^"]*{re.escape(instruction)}.*?\);\n', plain + "\n", kernel)
        assert replaced == 1, instruction
    assert "BLOCKS = 32" in kernel
    kernel = kernel.replace("BLOCKS = 32", "BLOCKS = 2")
    (tmp_path / "kernel.cpp").write_text(kernel)
    (tmp_path / "cuda_runtime.h").touch()
    program = tmp_path / "ranks"
    folders = [f"-I{tmp_path}", f"-I{SOURCE}"]
    command = ["c++", "-std=c++20", "-O1", "-pthread", *folders, str(HERE / "all_reduce_ranks.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    for ranks in (2, 4):
        done = subprocess.run([program, str(ranks)], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["0"] * ranks
