"""From logits to tokens: penalties, bias and masks of single rows around ops.draw, and log-probabilities.

draw.py says how a token is drawn, noise.py where its random numbers come from.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import SamplingParams
from .draw import Draw, ranked
from .errors import RequestError
from .sequence import TokenLogprob
from .upload import upload

if TYPE_CHECKING:
    from .ops import Ops

__all__ = ["SampleRow", "Sampled", "check_params", "prompt_logprobs", "sample"]

NOT_FINITE = "logits / temperature have no finite maximum: check the checkpoint, or raise the temperature"
NOTHING_LEFT = "no token is left to draw; loosen logit_bias, penalties, min_tokens or stop_ids"


@dataclass(frozen=True)
class SampleRow:
    """What one row of logits needs to become a token.

    sample, turn, index: with params.seed they key the random stream; index is the number of tokens drawn before it.
    prompt_ids, response_ids: int32; may be empty unless params.penalises. eos_ids: the model's end tokens.
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
    drawn = ops.draw(logits, [_draw(row) for row in rows])
    adjusted = [r for r, row in enumerate(rows) if _adjusts(row) and math.isfinite(drawn[r].total)]
    sampled = [
        Sampled(token, logprob) if math.isfinite(total) else Sampled(token, logprob, error=NOT_FINITE)
        for token, logprob, total in drawn
    ]
    if adjusted:
        changed = torch.stack([_adjust(logits[r].clone(), rows[r]) for r in adjusted])
        for r, chosen in zip(adjusted, ops.draw(changed, [_draw(rows[r]) for r in adjusted]), strict=True):
            error = None if math.isfinite(chosen.total) else NOTHING_LEFT
            logprob = (_scaled(logits[r, chosen.token_id], rows[r]) - drawn[r].total).item()
            sampled[r] = Sampled(chosen.token_id, logprob, error=error)
    for r, row in enumerate(rows):
        if row.params.top_logprobs and sampled[r].error is None:
            values, ids = ranked(_scaled(logits[r], row), row.params.top_logprobs)
            pairs = zip(ids.tolist(), (values - drawn[r].total).tolist(), strict=True)
            sampled[r] = replace(sampled[r], top=[TokenLogprob(*pair) for pair in pairs])
    return sampled


def prompt_logprobs(logits: Tensor, targets: Tensor, ops: Ops) -> list[float]:
    """Log-softmax of raw logits [R, vocabulary] at targets (int64 [R]), in nats; NaN for logits with NaN or +inf."""
    totals = ops.log_sum_exp(logits)
    values: list[float] = (logits.gather(1, targets.unsqueeze(1)).squeeze(1) - totals).tolist()
    return values


def _draw(row: SampleRow) -> Draw:
    p = row.params
    depth = math.log(p.min_p) if p.min_p > 0.0 else -math.inf
    return Draw((p.seed, row.sample, row.turn, row.index), p.temperature, p.top_k, p.top_p, depth)


def _scaled(logits: Tensor, row: SampleRow) -> Tensor:
    return logits / logits.new_full((), row.params.temperature or 1.0)


def _adjusts(row: SampleRow) -> bool:
    """Whether penalties, bias or min_tokens change the row's logits."""
    p = row.params
    return p.penalises or bool(p.logit_bias) or row.index < p.min_tokens


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
        bias = torch.tensor(list(p.logit_bias.values()), dtype=z.dtype)
        z[_ids(array("i", p.logit_bias), z)] += upload(bias, z.device)
    if row.index < p.min_tokens:
        ends = p.stop_ids if p.ignore_eos else p.stop_ids + row.eos_ids
        z[_ids(array("i", ends), z)] = -math.inf
    return z


def _ids(ids: array[int], like: Tensor) -> Tensor:
    """int64 ids for indexing, on the device of `like`."""
    if not ids:
        return torch.empty(0, dtype=torch.int64, device=like.device)
    return upload(torch.frombuffer(ids, dtype=torch.int32), like.device).long()
