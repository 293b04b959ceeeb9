"""Log-sum-exp, and the draw of a token: the ids are those of plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from palimpsest.engine import draw_table, triton_ops
from palimpsest.engine.draw import Draw, _kept, draw_rows
from palimpsest.engine.draw_table import DrawTable
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch
from torch import Tensor


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 5), (1, 1), (3, 4097), (2, 9000)])
def test_log_sum_exp(device: torch.device, rows: int, vocabulary: int) -> None:
    from palimpsest.triton_kernels.vocabulary import log_sum_exp

    logits = torch.randn(rows, vocabulary + 1, device=device)[:, :vocabulary] * 5
    if rows > 1:
        logits[0, : vocabulary - 1] = -torch.inf  # a whole tile without mass
    plain, exact = torch.logsumexp(logits, 1), torch.logsumexp(logits.double(), 1)
    assert_as_exact_as_torch(log_sum_exp(logits).cpu(), plain.cpu(), exact.cpu())


STREAM = (0, 1, 2, 3)
ROWS = (
    Draw(STREAM, 0.0),
    Draw(STREAM, 0.0),
    Draw(STREAM, 1.0),
    Draw(STREAM, 0.7, top_p=0.95),
    Draw(STREAM, 3.0, top_k=1),
    Draw(STREAM, 1.0, top_k=40, top_p=0.5),
    Draw(STREAM, 2.0, top_k=300, top_p=0.99, depth=math.log(0.02)),
    Draw(STREAM, 1.0, depth=math.log(0.3)),
)


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("levels", [None, 12])
def test_the_draws_are_those_of_plain_torch(device: torch.device, levels: int | None, filters: bool) -> None:
    """levels: of the logits, so that many are equal and cuts fall among equals. filters: else all is one pass."""
    from palimpsest.triton_kernels.vocabulary import log_sum_exp

    kernels = triton_ops.TritonKernels()
    logits = torch.randn(len(ROWS), 4500, device=device) * 3
    if levels is not None:
        logits = (logits * levels / 12).round() * 12 / levels
    logits[1, 4200] = logits[1, 5] = 50.0  # of equals the lower
    logits[2, ::3] = -torch.inf
    off = {} if filters else {"top_k": 0, "top_p": 1.0, "depth": -math.inf}
    rows = [row._replace(stream=(7, r, 2, 3), **off) for r, row in enumerate(ROWS)]
    ours, plain = kernels.draw(logits, rows), draw_rows(logits, rows, log_sum_exp)
    assert ours == plain
    assert ours[1].token_id == 5


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_what_the_filters_keep(device: torch.device, step: float) -> None:
    """step: between logits, so that cuts fall among equals."""
    from palimpsest.triton_kernels.sampling import heads

    rows = [Draw(STREAM, 1.0, k, p) for k, p in ((0, 0.3), (0, 0.95), (0, 0.9999), (1, 1.0), (70, 0.8), (350, 1.0))]
    logits = torch.randn(len(rows), 700, device=device) * 2
    if step:
        logits = (logits / step).round() * step  # and zeros of both signs
    table = DrawTable.of(rows, device)
    cuts, lasts = heads(logits, logits.amax(dim=1), table.top_k, table.top_p)
    bits = logits.view(torch.int32)
    ranks = (bits ^ ((bits >> 31) | -(2**31))).long() & 0xFFFFFFFF
    ranks[logits == 0] = 2**31
    ids = torch.arange(700, device=device)
    for r, row in enumerate(rows):
        kept = (ranks[r] > cuts[r]) | ((ranks[r] == cuts[r]) & (ids <= lasts[r]))
        assert torch.equal(ids[kept], _kept(logits[r], row))


def test_a_draw_is_brought_to_the_device_by_one_copy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []

    def upload(host: Tensor, device: torch.device) -> Tensor:
        copies.append(host.clone().to(device))
        host.fill_(-1)  # as pinned memory may be, once the copy is done
        return copies[-1]

    for rows in (ROWS, ROWS[:3], ROWS[-1:]):
        logits = torch.randn(len(rows), 90, device=device)
        expected = triton_ops.TritonKernels().draw(logits, rows)
        with monkeypatch.context() as patch:
            patch.setattr(draw_table, "upload", upload)
            assert triton_ops.TritonKernels().draw(logits, rows) == expected
    assert len(copies) == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, under the interpreter
def test_rows_with_nothing_to_draw_do_not_disturb_the_others(device: torch.device) -> None:
    kernels = triton_ops.TritonKernels()
    logits = torch.randn(3, 60, device=device)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    drawn = kernels.draw(logits, [ROWS[3]] * 3)
    assert not math.isfinite(drawn[0].total) and not math.isfinite(drawn[1].total)
    assert drawn[2] == kernels.draw(logits[2:], [ROWS[3]])[0]
