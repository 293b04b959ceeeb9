"""Log-probabilities, entropies and their gradient over tiles of the vocabulary, for the fused loss (rl/fused_loss.py).

A tile of a row is one program. The log-sum-exp is that of vocabulary.py, so the bits are those that the sampler has.
Twins: reference.token_scores and token_scores_grad.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .vocabulary import TILE, WARPS, log_sum_exp

__all__ = ["token_scores", "token_scores_grad"]


@triton.jit
def surprise(log_p):
    """-p log p; a token that cannot come has none."""
    possible = log_p > float("-inf")
    return tl.where(possible, -tl.where(possible, log_p, 0.0) * tl.exp(log_p), 0.0)


@triton.jit
def entropy_kernel(logits, log_sums, sums, vocabulary, tiles, TILE: tl.constexpr):
    """The part of a tile in each row's entropy."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    log_p = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    log_p -= tl.load(log_sums + row)
    tl.store(sums + row * tiles + tile, tl.sum(surprise(log_p), axis=0))


@triton.jit
def gradient_kernel(
    logits, targets, entropies, log_sums, logprob_grads, entropy_grads, temperature, vocabulary, TILE: tl.constexpr
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    place = logits + row * vocabulary + at
    log_p = tl.load(place, mask=at < vocabulary, other=float("-inf")) - tl.load(log_sums + row)
    p = tl.exp(log_p)
    of_logprob, of_entropy = tl.load(logprob_grads + row), tl.load(entropy_grads + row)
    grad = (surprise(log_p) - p * tl.load(entropies + row)) * of_entropy - p * of_logprob
    grad += tl.where(at == tl.load(targets + row), of_logprob, 0.0)
    tl.store(place, grad / temperature, mask=at < vocabulary)


def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Divide logits (float32 dense [R, n]) by the temperature in place; -> log-probability, entropy, log-sum-exp, [R].

    targets: int64 [R]. d logprob and dH are those of token_scores_grad. Twin: reference.token_scores.
    """
    if temperature != 1.0:
        logits.div_(logits.new_full((), temperature))
    rows, vocabulary = logits.shape
    log_sums = log_sum_exp(logits)
    tiles = triton.cdiv(vocabulary, TILE)
    sums = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    if rows:
        entropy_kernel[(rows, tiles)](logits, log_sums, sums, vocabulary, tiles, TILE, num_warps=WARPS)
    return logits.gather(1, targets[:, None])[:, 0] - log_sums, sums.sum(dim=1), log_sums


def token_scores_grad(
    logits: Tensor, targets: Tensor, temperature: float, entropies: Tensor, log_sums: Tensor, logprob_grads: Tensor,
    entropy_grads: Tensor,
) -> None:  # fmt: skip
    """Put the gradient of the undivided logits in the place of what token_scores left. Twin: its namesake there.

    With p the softmax and H the entropy: d logprob = onehot - p, dH = -p (log p + H), both / temperature.
    """
    rows, vocabulary = logits.shape
    if rows:
        gradient_kernel[(rows, triton.cdiv(vocabulary, TILE))](
            logits, targets, entropies, log_sums, logprob_grads, entropy_grads, temperature, vocabulary, TILE,
            num_warps=WARPS,
        )  # fmt: skip
