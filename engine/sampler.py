"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, log-probabilities, and the random numbers.

Random numbers. Nothing here has a state: the noise of vocabulary id v in one row is a function of five whole numbers.

    mix(x)   = the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Vigna's splitmix64.c),
               arithmetic modulo 2**64, shifts logical:
               x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    GAMMA    = 0x9E3779B97F4A7C15
    key      = 0;  for n in (seed, sample, turn, index):  key = mix(key + GAMMA + n)
    bits(v)  = mix(key + GAMMA * (v + 1))             the output number v of a SplitMix64 generator seeded with key
    u(v)     = ((bits(v) >> 12) + 0.5) * 2**-52       float64, exact, within [2**-53, 1 - 2**-53]
    noise(v) = -log(-log(u(v)))                       float64, standard Gumbel

The token is the id with the largest z[v] + noise(v) in float64 (ties to the lowest id), where z is what the filters
leave of the logits: one exact draw from softmax(z) (Gumbel-max; Maddison et al., arXiv 1411.0030). The noise belongs to
the id, so it is computed for the surviving ids only, and no row's token depends on the rows beside it.

Order. Wherever ids are ranked, the larger logit comes first and of equal ones the lower id; top_k keeps exactly k ids.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import SamplingParams
from .errors import RequestError
from .sequence import TokenLogprob

if TYPE_CHECKING:
    from .ops import Ops

__all__ = ["SampleRow", "Sampled", "check_params", "gumbel", "prompt_logprobs", "sample", "stream_key"]

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FIRST_RANKED = 256  # ids ranked before top_p and min_p look for more
NOT_FINITE = "logits / temperature have no finite maximum: check the checkpoint, or raise the temperature"
NOTHING_LEFT = "no token is left to draw; loosen logit_bias, penalties, min_tokens or stop_ids"
BLOCK = 2**18  # elements of noise made at once: the temporaries stay in the cache


@dataclass(frozen=True)
class SampleRow:
    """What one row of logits needs to become a token.

    sample, turn, index: with params.seed they key the random stream; index is the number of tokens drawn before it.
    prompt_ids, response_ids: int32, read by the penalties only. eos_ids: the model's end tokens.
    """

    params: SamplingParams
    sample: int
    turn: int
    index: int
    prompt_ids: array[int]
    response_ids: array[int]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """A drawn token.

    logprob: log-softmax of logits / temperature (of the logits at temperature 0) before all filters, in nats.
    top: the likeliest tokens by the same measure, falling.
    error: why no token could be drawn; then the rest means nothing.
    """

    token_id: int
    logprob: float
    top: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """Raise RequestError where `params` names ids or counts that a model of `vocabulary` logits does not have."""
    for name, value in (("top_k", params.top_k), ("top_logprobs", params.top_logprobs)):
        if value > vocabulary:
            raise RequestError(
                f"{name} is {value}, but the model has {vocabulary} tokens; use at most that, or 0 for off"
            )
    for name, ids in (("stop_ids", params.stop_ids), ("logit_bias", tuple(params.logit_bias))):
        for token in ids:
            if token >= vocabulary:
                raise RequestError(
                    f"{name} names token {token}, but the model's ids are 0 to {vocabulary - 1}; leave it out"
                )


def sample(logits: Tensor, rows: Sequence[SampleRow], ops: Ops) -> list[Sampled]:
    """Draw one token per row of `logits` (float32 or float64 [R, vocabulary], left as they are).

    A row whose logits hold NaN or +inf, or leave no token to draw, gets an error and does not disturb the others.
    """
    temperatures = logits.new_tensor([row.params.temperature or 1.0 for row in rows]).unsqueeze(1)
    scaled = logits if bool((temperatures == 1.0).all()) else logits / temperatures
    peaks, tokens = scaled.max(dim=1)  # greedy until proven otherwise: max gives the lowest of equal ids
    errors = {r: NOT_FINITE for r, finite in enumerate(peaks.isfinite().tolist()) if not finite}
    plain: list[int] = []
    for r, row in enumerate(rows):
        if r in errors:
            continue
        if _adjusts(row):
            z = _adjust(logits[r].clone(), row) / temperatures[r]
            if bool(z.max().isfinite()):
                tokens[r] = _draw(z, row, ops)
            else:
                errors[r] = NOTHING_LEFT
        elif row.params.temperature > 0 and _filters(row.params):
            tokens[r] = _draw(scaled[r], row, ops)
        elif row.params.temperature > 0:
            plain.append(r)
    _draw_plain(scaled, rows, plain, tokens)
    totals = ops.log_sum_exp(scaled)
    logprobs = (scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - totals).tolist()
    return [
        Sampled(token, logprob, error=errors[r])
        if r in errors
        else Sampled(token, logprob, _top(scaled[r], totals[r], rows[r].params.top_logprobs))
        for r, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs, strict=True))
    ]


def prompt_logprobs(logits: Tensor, targets: Tensor, ops: Ops) -> list[float]:
    """Log-softmax of raw logits [R, vocabulary] at targets (int64 [R]), in nats; NaN for logits with NaN or +inf."""
    totals = ops.log_sum_exp(logits)
    values: list[float] = (logits.gather(1, targets.unsqueeze(1)).squeeze(1) - totals).tolist()
    return values


def stream_key(seed: int, sample: int, turn: int, index: int) -> int:
    """The 64-bit key of one token's noise (see the module's head)."""
    key = 0
    for number in (seed, sample, turn, index):
        key = _mix(key + GAMMA + number)
    return key


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """The noise (float64) of vocabulary `ids` under `keys`: int64 of shapes that broadcast, a key's 64 bits kept."""
    x = keys + (ids + 1) * _signed(GAMMA)
    x = (x ^ _shift_right(x, 30)) * _signed(MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(MULTIPLIERS[1])
    x = x ^ _shift_right(x, 31)
    uniform = _shift_right(x, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit x: torch has no arithmetic on uint64."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return torch.bitwise_and(x >> by, 2 ** (64 - by) - 1)


def _key(row: SampleRow) -> int:
    return _signed(stream_key(row.params.seed, row.sample, row.turn, row.index))


def _adjusts(row: SampleRow) -> bool:
    """Whether penalties, bias or min_tokens change the row's logits."""
    p = row.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalties or bool(p.logit_bias) or row.index < p.min_tokens


def _adjust(z: Tensor, row: SampleRow) -> Tensor:
    """Penalties, then bias, then the mask of min_tokens, written into the logits z [vocabulary] of one row."""
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = torch.unique(_ids(row.prompt_ids + row.response_ids, z))
        values = z[seen]
        z[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
        drawn, counts = torch.unique(_ids(row.response_ids, z), return_counts=True)
        z[drawn] -= counts.to(z.dtype) * p.frequency_penalty + p.presence_penalty
    if p.logit_bias:
        z[_ids(array("i", p.logit_bias), z)] += z.new_tensor(list(p.logit_bias.values()))
    if row.index < p.min_tokens:
        ends = p.stop_ids if p.ignore_eos else p.stop_ids + row.eos_ids
        z[_ids(array("i", ends), z)] = -math.inf
    return z


def _ids(ids: array[int], like: Tensor) -> Tensor:
    """int64 ids for indexing, on the device of `like`."""
    if not ids:
        return torch.empty(0, dtype=torch.int64, device=like.device)
    return torch.frombuffer(ids, dtype=torch.int32).to(like.device, torch.int64)


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw(z: Tensor, row: SampleRow, ops: Ops) -> Tensor:
    """The token (int64 []) that one row's adjusted and scaled logits z [vocabulary] give."""
    if row.params.temperature == 0:
        return z.argmax()
    ids = _kept(z, row.params, ops) if _filters(row.params) else torch.arange(len(z), device=z.device)
    return ids[(gumbel(torch.tensor(_key(row), device=z.device), ids) + z[ids]).argmax()]


def _draw_plain(scaled: Tensor, rows: Sequence[SampleRow], plain: list[int], tokens: Tensor) -> None:
    """Write the tokens of the rows `plain`, which neither adjust nor filter, a block of rows at a time."""
    vocabulary = scaled.shape[1]
    ids = torch.arange(vocabulary, device=scaled.device)
    size = max(1, BLOCK // vocabulary)
    for start in range(0, len(plain), size):
        block = plain[start : start + size]
        keys = torch.tensor([[_key(rows[r])] for r in block], device=scaled.device)
        at = torch.tensor(block, device=scaled.device)
        tokens[at] = (gumbel(keys, ids) + scaled[at]).argmax(dim=1)


def _kept(z: Tensor, params: SamplingParams, ops: Ops) -> Tensor:
    """The ids (int64, rising) that top_k, then top_p, then min_p leave of logits z [vocabulary].

    Each filter keeps a head of the ranking, the next one looks at the distribution that is left. top_p: the fewest ids
    whose mass reaches it (arXiv 1904.09751). min_p: ids at least min_p times as likely as the likeliest (2407.01082).
    Only as much of the ranking is made as is needed to see where it is cut.
    """
    width = params.top_k or min(FIRST_RANKED, len(z))
    total = None if params.top_k else ops.log_sum_exp(z.unsqueeze(0)).double()
    while True:
        values, ids = _ranked(z, width)
        values = values.double()
        cut = width + 1
        if params.top_p < 1.0:
            mass = (values - (values.logsumexp(0) if total is None else total)).exp().cumsum(0)
            cut = min(cut, int((mass < params.top_p).sum()) + 1)
        if params.min_p > 0.0:
            likely = int((values - values[0] >= math.log(params.min_p)).sum())
            cut = min(cut, likely if likely < width else cut)
        if cut <= width or params.top_k or width == len(z):
            return ids[:cut].sort().values
        width = min(16 * width, len(z))


def _ranked(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of z [vocabulary], falling, and their ids; of equals the lower first, unlike topk."""
    floor = z.topk(width, sorted=False).values.min()
    ids = (z >= floor).nonzero().squeeze(1)
    values, order = z[ids].sort(descending=True, stable=True)
    return values[:width], ids[order[:width]]


def _top(scaled: Tensor, total: Tensor, count: int) -> list[TokenLogprob]:
    if count == 0:
        return []
    values, ids = _ranked(scaled, count)
    return [TokenLogprob(*pair) for pair in zip(ids.tolist(), (values - total).tolist(), strict=True)]
