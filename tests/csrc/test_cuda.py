"""The CUDA kernels: as they were compiled, wherever nvcc was; and on a GPU, against their twins."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from palimpsest.engine import cuda, reference
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch

_C = pytest.importorskip("palimpsest._C", reason="the extension is not built")
if not hasattr(_C, "cuda_gemv"):
    pytest.skip("the extension was built without nvcc", allow_module_level=True)

TARGETS = ("sm_80", "sm_90a")
on_a_gpu = pytest.mark.skipif(cuda.unavailable() is not None, reason=str(cuda.unavailable()))


@pytest.fixture(scope="module")
def machine_code() -> dict[tuple[str, str], str]:
    """By target and function, what the extension holds."""
    tool = _tool("cuobjdump")
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    target = function = ""
    dump = subprocess.run([tool, "-sass", _C.__file__], capture_output=True, text=True, check=True).stdout
    for line in dump.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            target = match[1]
        elif match := re.search(r"Function : (\w+)", line):
            function = match[1]
        else:
            found[target, function].append(line)
    return {key: "\n".join(lines) for key, lines in found.items() if key[1]}


def _tool(name: str) -> str:
    triton = pytest.importorskip("triton", reason="its package brings the tool that reads machine code")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"triton brings no {name}")
    return str(path)


def test_nothing_is_spilled() -> None:
    command = [_tool("cuobjdump"), "--dump-resource-usage", _C.__file__]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert sum("gemv" in name for name, *_ in kernels) == 2 * 3 * cuda.GEMV_ROWS
    assert sum("decode" in name for name, *_ in kernels) >= 2 * len(cuda.HEAD_DIMS)
    assert [name for name, _, stack, local in kernels if (stack, local) != ("0", "0")] == []


def test_weights_come_in_16_bytes(machine_code: dict[tuple[str, str], str]) -> None:
    for target in TARGETS:
        kernels = [code for (at, name), code in machine_code.items() if at == target and "gemv_kernel" in name]
        assert kernels and all(re.search(r"LDG\.E\.\S*128\S*CONSTANT", code) for code in kernels)


def test_what_ranks_give_is_read_in_16_bytes_and_never_from_a_cache_that_may_be_old(
    machine_code: dict[tuple[str, str], str],
) -> None:
    for target in TARGETS:
        kernels = [code for (at, name), code in machine_code.items() if at == target and "all_reduce_kernel" in name]
        assert len(kernels) == 2 * (8 - 1)  # one-shot and two-shot for 2 to 8 ranks
        for code in kernels:
            assert re.search(r"LDG\.E\.128", code) and re.search(r"STG\.E\.128", code) and "CONSTANT" not in code
            assert re.search(r"LD(G)?\.E\S*STRONG\.SYS", code) and re.search(r"ST(G)?\.E\S*STRONG\.SYS", code)


def test_pages_come_in_bulk_and_meet_the_tensor_cores(machine_code: dict[tuple[str, str], str]) -> None:
    for target, copy in zip(TARGETS, ("LDGSTS", "UBLKCP"), strict=True):
        kernels = [code for (at, name), code in machine_code.items() if at == target and "decode_kernel" in name]
        assert kernels and all(copy in code and "HMMA.16816.F32.BF16" in code for code in kernels)


def test_a_machine_without_a_gpu_has_no_devices() -> None:
    assert _C.cuda_device_count() == torch.cuda.device_count()
    if not torch.cuda.is_available():
        assert "no GPU" in str(cuda.unavailable())


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", cuda.WEIGHT_TYPES)
@pytest.mark.parametrize(("rows", "size", "outputs"), [(1, 16, 1), (3, 4112, 33), (8, 9008, 70)])
def test_gemv(dtype: torch.dtype, rows: int, size: int, outputs: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, size + 4, device="cuda")[:, :size]
    weight = (torch.randn(outputs, size, device="cuda") * (30 if dtype == torch.int8 else 1)).to(dtype)
    scales = None if dtype == torch.bfloat16 else torch.rand(outputs, device="cuda")
    bias = torch.randn(outputs, device="cuda")
    factors = torch.ones(outputs, device="cuda") if scales is None else scales
    plain = reference.scaled_linear(x, weight.float(), factors, bias)
    exact = reference.scaled_linear(x.double(), weight.double(), factors, bias)
    ours = cuda.gemv(x, weight, scales, bias)
    assert_as_exact_as_torch(ours.cpu(), plain.cpu(), exact.cpu())
    alone = cuda.gemv(x[-1:], weight, scales, bias)
    assert torch.equal(ours[-1:], alone)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("two_shot", [False, True])
def test_two_ranks_on_one_gpu_have_one_sum(two_shot: bool) -> None:
    parts = torch.randn(2, 4100, device="cuda")
    out, side = torch.empty(2, 4100, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    regions = [cuda.peer_region(5000)[0] for _ in range(2)]
    for _ in range(3):  # what a rank gives goes to two areas in turn
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            cuda.all_reduce(parts[1], out[1], 5000, regions, 1, two_shot=two_shot)
        cuda.all_reduce(parts[0], out[0], 5000, regions, 0, two_shot=two_shot)
        torch.cuda.synchronize()
        assert torch.equal(out, (parts[0] + parts[1]).expand(2, -1))
        parts = parts.flip(1) * 2


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 128), (8, 4, 64), (32, 2, 128)])
def test_paged_decode(heads: int, kv_heads: int, dim: int) -> None:
    from palimpsest.tests.triton_kernels.test_products import Case
    from palimpsest.triton_kernels.attention import LOG2E, merge_tiles

    torch.manual_seed(1)
    lengths = [1, 127, 128, 129, 1024, 3000]
    case = Case(torch.device("cuda"), [1] * len(lengths), lengths, heads, kv_heads, dim, torch.bfloat16)
    spans, scale = case.spans, case.scale
    peaks, totals, partials, tile = cuda.paged_decode_partials(
        case.query, case.key, case.value, spans.kv_length, spans.pages, scale * LOG2E
    )
    ours = merge_tiles(peaks, totals, partials, spans.query_start, spans.kv_length, tile)
    skipped = torch.tensor([0, 0, 0, 1, 1, 2], dtype=torch.int32, device="cuda")
    again = cuda.paged_decode_partials(
        case.query, case.key, case.value, spans.kv_length, spans.pages, scale * LOG2E, skipped
    )
    for span, length in enumerate(lengths):
        kept = slice(int(skipped[span]), -(-length // tile))
        assert torch.equal(again[2][span, :, kept], partials[span, :, kept])
    narrow = case.query.bfloat16()
    exact = reference.paged_attention(narrow.double(), case.key.double(), case.value.double(), spans, scale)
    plain = reference.paged_attention(narrow, case.key, case.value, spans, scale)
    assert_as_exact_as_torch(ours.cpu(), plain.float().cpu(), exact.cpu())
