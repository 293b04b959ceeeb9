"""Heads normed, turned and written to pages by one kernel, and moved to other positions, against the twins."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine import kv_rows, reference
from palimpsest.engine.ops import Turn
from palimpsest.engine.rotary import rotary_tables
from palimpsest.engine.triton_ops import TritonKernels
from palimpsest.tests.triton_kernels.test_elementwise import ROWS, assert_like_twin
from palimpsest.tests.triton_kernels.test_products import _require_float8
from torch import Tensor

WINDOW = 50
KERNELS = reference.rms_norm, reference.rotate
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def turn_of(device: torch.device, tokens: int, head_dim: int, *, normed: bool) -> Turn:
    cos, sin = (table.to(device) for table in rotary_tables(head_dim, 1e4, None, WINDOW))
    positions = torch.randint(0, WINDOW, (tokens,), device=device)
    norms = (torch.randn(head_dim, device=device).bfloat16() for _ in range(2)) if normed else (None, None)
    return Turn(positions, cos, sin, *norms, 1e-5)


def pages_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((3, 2, 4, head_dim), 7.0, device=device).to(dtype) for _ in range(2)]


SLOTS = [9, 3, 0, 11, 6]


@ROWS
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_turn_and_write(device: torch.device, rows: int, normed: bool, head_dim: int) -> None:
    kernels, turn = TritonKernels(), turn_of(device, rows, head_dim, normed=normed)
    query, key, value = torch.randn(rows, 8, head_dim, device=device).split([3, 2, 3], dim=1)
    value, slots = value[:, 1:], torch.tensor(SLOTS[:rows], dtype=torch.int64, device=device)
    pages = pages_for(device, head_dim, torch.float32)
    out = kernels.turn_and_write(query, key, value, turn, *pages, slots)
    at = slots // 4, slice(None), slots % 4
    for ours, heads, weight in ((out, query, turn.query_norm), (pages[0][at], key, turn.key_norm)):
        assert_like_twin(ours, turn(heads, weight, KERNELS), turn(heads.double(), weight, KERNELS))
    assert torch.equal(pages[1][at], value)
    untouched = torch.ones(12, dtype=torch.bool, device=device).index_fill(0, slots, False).view(3, 4)
    assert all((part.transpose(1, 2)[untouched] == 7).all() for part in pages)
    if rows > 1:  # a row's bits depend on nothing else
        alone = Turn(turn.positions[1:2], turn.cos, turn.sin, turn.query_norm, turn.key_norm, turn.eps)
        again = pages_for(device, head_dim, torch.float32)
        assert torch.equal(
            out[1:2], kernels.turn_and_write(query[1:2], key[1:2], value[1:2], alone, *again, slots[1:2])
        )
        assert torch.equal(pages[0][at][1], again[0][at][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_are_rounded_as_torch_rounds(device: torch.device, dtype: torch.dtype) -> None:
    _require_float8(device, dtype)
    turn, slots = turn_of(device, 5, 16, normed=True), torch.tensor(SLOTS, device=device)
    query, key, value = (torch.randn(5, heads, 16, device=device) for heads in (4, 2, 2))
    value *= 10.0 ** torch.randint(-4, 4, value.shape, device=device)  # subnormal ones, and beyond the ends of e4m3
    value[0, 0, :2] = torch.tensor([torch.inf, -torch.inf], device=device)
    full, narrow = (pages_for(device, 16, kind) for kind in (torch.float32, dtype))
    for pages in (full, narrow):
        TritonKernels().turn_and_write(query, key, value, turn, *pages, slots)
    for ours, exact in zip(narrow, full, strict=True):
        assert torch.equal(ours.float(), kv_rows.pack(exact, dtype).float())


@pytest.mark.parametrize("head_dim", [16, 80])
def test_rotate_and_back(device: torch.device, head_dim: int) -> None:
    from palimpsest.triton_kernels.rotary import rotate

    turn, x = turn_of(device, 5, head_dim, normed=False), torch.randn(5, 5, head_dim, device=device)[:, :3]
    arrays = turn.positions, turn.cos, turn.sin
    assert_like_twin(rotate(x, *arrays), reference.rotate(x, *arrays), reference.rotate(x.double(), *arrays))
    assert torch.allclose(rotate(rotate(x, *arrays), turn.positions, turn.cos, -turn.sin), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_moved_kv_has_the_bits_of_plain_torch(
    device: torch.device, dtype: torch.dtype, scaling: dict[str, object] | None, head_dim: int
) -> None:
    tables = [table.to(device) for table in rotary_tables(head_dim, 1e4, scaling, WINDOW)]
    pages = [torch.randn(4, 2, 4, head_dim, device=device).to(dtype) for _ in range(2)]
    twins = [part.clone() for part in pages]
    numbers = [[1, 2, 7, 4, 5], [8, 15, 12, 9, 10], [3, 4, 5, 49, 9], [40, 41, 42, 0, 9]]
    sources, targets, old, new = torch.tensor(numbers, device=device)
    before = pages[0].clone()
    TritonKernels().move_kv(*pages, sources[:0], targets[:0], old[:0], new[:0], *tables)
    assert torch.equal(pages[0], before)
    TritonKernels().move_kv(*pages, sources, targets, old, new, *tables)
    reference.move_kv(*twins, sources, targets, old, new, *tables)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(pages, twins, strict=True))
    assert not torch.equal(pages[0], before)
