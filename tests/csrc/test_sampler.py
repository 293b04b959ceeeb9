"""Drawing: the kernel gives the twin's ids and bits, whatever the filters, ties, infinities, neighbours and threads."""

from __future__ import annotations

import math
import random

import pytest
import torch
from palimpsest.engine import cpu
from palimpsest.engine.draw import Draw, Drawn, draw_rows
from palimpsest.engine.noise import gumbel, stream_key
from torch import Tensor


def some_rows(count: int, seed: int) -> list[Draw]:
    """Half of them filtered, in every combination."""
    choose = random.Random(seed)
    return [
        Draw(
            (choose.getrandbits(64), choose.getrandbits(63), i, choose.randrange(1000)),
            temperature=choose.choice([0.0, 1.0, 0.6, 1.7, 30.0]),
            top_k=choose.choice([0, 0, 0, 1, 5, 300]),
            top_p=choose.choice([1.0, 1.0, 0.01, 0.5, 0.93]),
            depth=choose.choice([-math.inf, -math.inf, math.log(1e-9), math.log(0.1), 0.0]),
        )
        for i in range(count)
    ]


def twin(logits: Tensor, rows: list[Draw]) -> list[Drawn]:
    return draw_rows(logits, rows, cpu.log_sum_exp)


@pytest.mark.parametrize("vocabulary", [1, 63, 4097, 20001])
@pytest.mark.parametrize("scale", [0.1, 3.0, 200.0])
def test_ids_and_bits_are_those_of_the_twin(isa: str, vocabulary: int, scale: float) -> None:
    rows = [row._replace(top_k=min(row.top_k, vocabulary)) for row in some_rows(24, vocabulary)]
    logits = torch.randn(24, vocabulary + 3)[:, :vocabulary] * scale
    logits[8:16] = (logits[8:16] * 2 / scale).round() / 2  # many ties
    logits[12:, ::3] = -math.inf
    logits[:, 0] = torch.randn(24).abs()  # something is left to draw
    assert cpu.draw(logits, rows) == twin(logits, rows)


def test_flat_rows_tie_everywhere(isa: str) -> None:
    logits = torch.zeros(6, 9000)
    logits[:, ::2] = -0.0  # equal to 0
    rows = [
        Draw((5, 0, 0, i), 0.5, top_k, top_p, depth)
        for i, (top_k, top_p, depth) in enumerate(
            [(0, 0.5, -math.inf), (2, 1.0, 0.0), (8, 0.5, 0.0), (0, 0.25, 0.0), (0, 1.0, 0.0), (0, 1.0, -math.inf)]
        )
    ]
    drawn = cpu.draw(logits, rows)
    assert drawn == twin(logits, rows)
    # The lower ids come first; half of eight equals is four.
    assert drawn[0].token_id < 4500 and drawn[1].token_id < 2 and drawn[2].token_id < 4 and drawn[3].token_id < 2250


def test_a_row_in_error_is_told_by_its_total_and_disturbs_no_other(isa: str) -> None:
    rows = [Draw((1, 0, 0, 0), temperature, 0, top_p) for temperature in (0.0, 1.0, 0.7) for top_p in (1.0, 0.9)]
    good = torch.randn(6, 5000)
    expected = cpu.draw(good, rows)
    for bad, at in ((math.nan, [4999]), (math.nan, [5]), (math.inf, [4100]), (-math.inf, list(range(5000)))):
        for r in range(6):
            logits = good.clone()
            logits[r, at] = bad
            drawn = cpu.draw(logits, rows)
            assert not math.isfinite(drawn[r].total) and not math.isfinite(twin(logits, rows)[r].total)
            assert drawn[:r] + drawn[r + 1 :] == expected[:r] + expected[r + 1 :]


def test_rows_and_threads_leave_no_trace(isa: str) -> None:
    logits, rows = torch.randn(12, 20001) * 3, some_rows(12, 1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(cpu.draw(logits, rows))
        results.append([cpu.draw(logits[r : r + 1], rows[r : r + 1])[0] for r in range(12)])
    assert all(result == results[0] for result in results)


def test_near_ties_are_decided_in_float64(isa: str) -> None:
    """Of a flat row the largest noise wins; lowered to just above the second it still does, and just below no more."""
    vocabulary = 30000
    values, ids = gumbel(stream_key(3, 0, 0, 0), torch.arange(vocabulary)).topk(2)
    gap = (values[1] - values[0]).float()
    for lowered, winner in ((0.0, 0), (gap * 0.999999, 0), (gap * 1.000001, 1)):
        logits = torch.zeros(1, vocabulary)
        logits[0, ids[0]] = lowered
        assert cpu.draw(logits, [Draw((3, 0, 0, 0), 1.0)])[0].token_id == ids[winner]


def test_wrong_tensors_are_refused() -> None:
    row = Draw((0, 0, 0, 0), 1.0)
    for logits, rows in (
        (torch.zeros(1, 8, dtype=torch.float64), [row]),
        (torch.zeros(8, 1).t().expand(2, 8), [row]),
        (torch.zeros(1, 16)[:, ::2], [row]),
        (torch.zeros(1, 0), [row]),
    ):
        with pytest.raises(ValueError, match=r"cpu\.draw"):
            cpu.draw(logits, rows)
