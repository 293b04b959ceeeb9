"""Log-sum-exp and the draw of a token against the sampler's own functions."""

from __future__ import annotations

import pytest
import torch
from palimpsest.engine.config import SamplingParams
from palimpsest.engine.noise import gumbel, stream_key
from palimpsest.tests.csrc.exactness import assert_as_exact_as_torch


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 5), (1, 1), (3, 4097), (2, 9000)])
def test_log_sum_exp(device: torch.device, rows: int, vocabulary: int) -> None:
    from palimpsest.triton_kernels.vocabulary import log_sum_exp

    logits = torch.randn(rows, vocabulary + 1, device=device)[:, :vocabulary] * 5
    if rows > 1:
        logits[0, : vocabulary - 1] = -torch.inf  # a whole tile without mass
    plain, exact = torch.logsumexp(logits, 1), torch.logsumexp(logits.double(), 1)
    assert_as_exact_as_torch(log_sum_exp(logits).cpu(), plain.cpu(), exact.cpu())


def test_draw(device: torch.device) -> None:
    from palimpsest.triton_kernels.vocabulary import draw

    logits = torch.randn(6, 9000, device=device) * 3
    logits[1, 8000] = logits[1, 5] = 50.0  # of equals the lower
    temperatures = torch.tensor([0.0, 0.0, 0.7, 1.0, 1.0, 3.0], device=device)
    seed = SamplingParams().seed
    numbers = [stream_key(seed, sample, 2, 3) for sample in range(6)]
    keys = torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers], device=device)
    ids, logprobs = draw(logits, temperatures, keys)
    scaled = logits / torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(1)
    noise = torch.stack([gumbel(n, torch.arange(9000, device=device)) for n in numbers])
    scores = scaled.double() + torch.where(temperatures.unsqueeze(1) == 0, 0.0, noise)
    assert ids.tolist() == scores.argmax(dim=1).tolist()
    assert ids[1] == 5
    expected = scaled.double().log_softmax(dim=1).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs.double(), expected, atol=2e-6)
