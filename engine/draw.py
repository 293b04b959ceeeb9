"""Drawing a token from a row of logits: temperature, top-k, top-p, min-p, and its log-probability, in plain torch.

The token is the id with the largest z[v] + noise(v) in float64 (ties to the lowest id), where z is what the filters
leave of logits / temperature: one exact draw from softmax(z) (Gumbel-max; Maddison et al., arXiv 1411.0030). The noise
(noise.py) belongs to the id, so it is computed for the surviving ids only, and no row's token depends on the rows
beside it.

Order. Wherever ids are ranked, the larger logit comes first and of equal ones the lower id; top_k keeps exactly k ids.
Probabilities are compared as whole numbers, whose sums have no order: mass(v) = e^(z[v] - the largest z) * 2**38,
rounded to the nearest, ties to even. csrc/cpu/sampler.h computes the same ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .noise import LN2_HIGH, LN2_LOW, gumbel, stream_key

__all__ = ["Draw", "Drawn", "choose", "draw_rows", "drawn", "ranked"]

MASS_BITS = 38  # a vocabulary of 2**24 ids sums up to 2**62
FAINTEST = -40.0  # e^-40 * 2**38 rounds to 0


class Draw(NamedTuple):
    """How one row is drawn.

    stream: (seed, sample, turn, index), the key of the noise. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is
    off. depth: log(min_p), -inf for off: ids whose z lies farther below the largest are left out.
    """

    stream: tuple[int, int, int, int]
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    depth: float = -math.inf

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.depth > -math.inf


class Drawn(NamedTuple):
    """logprob: log-softmax of logits / temperature (of the logits when greedy) at the token, before the filters.

    total: the log-sum-exp of the same. It is not finite, and the rest means nothing, where logits / temperature hold
    NaN or +inf, or -inf only.
    """

    token_id: int
    logprob: float
    total: float

    @classmethod
    def of_columns(cls, columns: Tensor) -> list[Drawn]:
        """float64 [3, R], which holds ids and float32 exactly -> one per row. Waits once for a GPU."""
        return [cls(int(token), logprob, total) for token, logprob, total in zip(*columns.tolist(), strict=True)]


def choose(scaled: Tensor, rows: Sequence[Draw], totals: Tensor) -> Tensor:
    """A token of each row of logits / temperature, whose log-sum-exp are `totals`: int64 [R]."""
    tokens = scaled.argmax(dim=1)
    for r, (row, valid) in enumerate(zip(rows, totals.isfinite().tolist(), strict=True)):
        if valid and row.temperature > 0:
            ids = _kept(scaled[r], row) if row.filters else torch.arange(scaled.shape[1], device=scaled.device)
            noise = gumbel(stream_key(*row.stream), ids)
            tokens[r] = ids[(noise + scaled[r, ids]).argmax()]
    return tokens


def draw_rows(logits: Tensor, rows: Sequence[Draw], log_sum_exp: Callable[[Tensor], Tensor]) -> list[Drawn]:
    """ops.Ops.draw with a log-sum-exp as given."""
    scaled = logits / logits.new_tensor([row.temperature or 1.0 for row in rows]).unsqueeze(1)
    totals = log_sum_exp(scaled)
    return drawn(scaled, choose(scaled, rows, totals), totals)


def drawn(scaled: Tensor, tokens: Tensor, totals: Tensor) -> list[Drawn]:
    """The tokens chosen from rows of logits / temperature, whose log-sum-exp are `totals`."""
    logprobs = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - totals
    return Drawn.of_columns(torch.stack((tokens.double(), logprobs.double(), totals.double())))


def ranked(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of z [vocabulary], falling, and their ids; of equals the lower first, unlike topk."""
    floor = z.topk(width, sorted=False).values.min()
    ids = (z >= floor).nonzero().squeeze(1)
    values, order = z[ids].sort(descending=True, stable=True)
    return values[:width], ids[order[:width]]


def _kept(z: Tensor, row: Draw) -> Tensor:
    """The ids (int64, rising) that top_k, then top_p, then min_p leave of logits z [vocabulary].

    Each filter keeps a head of the ranking, the next one looks at the distribution that is left. top_p: the fewest ids
    whose mass reaches it (arXiv 1904.09751). min_p: ids at least min_p times as likely as the likeliest (2407.01082).
    """
    values, ids = ranked(z, row.top_k or len(z))
    below = values.double() - values[0].double()
    count = int((below >= row.depth).sum())
    if row.top_p < 1.0:
        mass = _mass(below).cumsum(0).double()
        count = min(count, int((mass < row.top_p * mass[-1]).sum()) + 1)
    return ids[:count].sort().values


def _mass(x: Tensor) -> Tensor:
    """e^x * 2**MASS_BITS as int64, for x <= 0: e^x = 2^n e^r with n = round(x / ln 2), e^r its Taylor polynomial."""
    x = x.clamp(min=FAINTEST)
    n = (x * (1.0 / math.log(2.0))).round()
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = torch.ones_like(r)
    for k in range(11, 0, -1):
        power = power * r * (1.0 / k) + 1.0
    scale = ((n.long() + (1023 + MASS_BITS)) << 52).view(torch.float64)
    return (power * scale).round().long()
