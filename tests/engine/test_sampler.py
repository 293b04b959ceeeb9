"""The sampler against brute force, hand-made numbers and exact distributions."""

import itertools
import math
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from palimpsest.engine.config import SamplingParams
from palimpsest.engine.draw import Draw, _kept
from palimpsest.engine.errors import RequestError
from palimpsest.engine.noise import gumbel, stream_key
from palimpsest.engine.ops import select
from palimpsest.engine.sampler import (
    SampleRow,
    _adjust,
    check_params,
    prompt_logprobs,
    sample,
)

OPS = select("reference", torch.float64, torch.float64, head_dim=64, group=1)
EOS = (6, 7)


def row(params, *, sample=0, turn=0, index=0, prompt=(), response=()):
    return SampleRow(params, sample, turn, index, array("i", prompt), array("i", response), EOS)


def logits_of(*values):
    return torch.tensor([values], dtype=torch.float64)


def draw(logits, *rows):
    return sample(logits, rows, OPS)


def kept_by_hand(z, top_k=0, top_p=1.0, min_p=0.0):
    """The ids left, by the definition: rank all, cut, renormalise, cut again; None where rounding decides."""
    ranked = sorted(range(len(z)), key=lambda v: (-z[v], v))
    ranked = ranked[: top_k or len(z)]
    weights = [math.exp(z[v] - z[ranked[0]]) for v in ranked]
    total, mass, count = math.fsum(weights), 0.0, 0
    for weight in weights:
        if abs(mass / total - top_p) < 1e-9 and top_p < 1:
            return None
        if mass / total >= top_p:
            break
        mass, count = mass + weight, count + 1
    likely = [v for v, weight in zip(ranked[:count], weights, strict=False) if weight >= min_p * (1 - 1e-12)]
    return sorted(likely)


def kept(z, top_k=0, top_p=1.0, min_p=0.0):
    return _kept(z, Draw((0, 0, 0, 0), 1.0, top_k, top_p, math.log(min_p) if min_p else -math.inf)).tolist()


# --- random numbers


def test_noise_is_the_published_splitmix64_stream():
    published = (  # the first outputs of splitmix64.c for the state 1234567
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    noise = gumbel(1234567, torch.arange(5))
    expected = [-math.log(-math.log(((bits >> 12) + 0.5) / 2**52)) for bits in published]
    assert noise.tolist() == pytest.approx(expected, rel=1e-14)


def test_stream_key_is_pinned():
    """Computed apart, in C with uint64. A change of these numbers changes every sampled text and breaks the twins."""
    assert stream_key(0, 0, 0, 0) == 0x2130748AAAC80268
    assert stream_key(2**64 - 1, 3, 2, 1) == 0x9FF2E4D1D1E8A3AB


def test_streams_never_collide():
    small = list(itertools.product(range(5), repeat=4))
    far = [(2**64 - 1, 0, 0, 0), (2**63, 0, 0, 0), (0, 10**6, 0, 0), (0, 0, 10**6, 0), (0, 0, 0, 10**6)]
    keys = [stream_key(*numbers) for numbers in small + far]
    assert len(set(keys)) == len(keys)
    noise = torch.stack([gumbel(key, torch.arange(64)) for key in keys])
    assert len(noise.unique()) == noise.numel()


def test_noise_is_standard_gumbel_and_uncorrelated():
    keys = [stream_key(5, s, t, i) for s, t, i in itertools.product(range(4), range(4), range(64))]
    noise = torch.stack([gumbel(key, torch.arange(256)) for key in keys])
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.01)  # Euler's constant; standard error 0.0025
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    centred = (noise - noise.mean()) / noise.std()
    between_ids = (centred[:, 1:] * centred[:, :-1]).mean().item()
    between_rows = (centred[1:] * centred[:-1]).mean().item()
    assert abs(between_ids) < 0.01 and abs(between_rows) < 0.01


def test_uniform_ends_give_finite_noise():
    """All bits clear and all bits set are the extremes; undoing mix finds keys that give them."""
    for bits in (0, 2**64 - 1):
        x = bits
        for factor, shift in ((1, 31), (0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
            y = x * pow(factor, -1, 2**64) % 2**64
            x = y ^ (y >> shift) ^ (y >> 2 * shift)
        key = (x - 0x9E3779B97F4A7C15) % 2**64
        noise = gumbel(key, torch.tensor(0)).item()
        uniform = ((bits >> 12) + 0.5) / 2**52
        assert noise == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


# --- distributions


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.5, seed=2**64 - 1),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.75),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.9, min_p=0.1),
        SamplingParams(logit_bias={2: 1.0, 0: -1.0}),
        SamplingParams(logit_bias={2: 1.0}, temperature=0.8, top_p=0.8),
    ],
    ids=["plain", "cool", "hot", "top_k", "top_p", "min_p", "all filters", "bias", "bias and top_p"],
)
def test_draws_follow_the_exact_distribution(params):
    count = 2000
    raw = [1.0, 0.4, -0.3, 1.0, 0.1, -1.5, 0.7, -0.8]
    drawn = draw(logits_of(*raw).expand(count, -1), *(row(params, index=i) for i in range(count)))
    z = [(value + params.logit_bias.get(v, 0.0)) / params.temperature for v, value in enumerate(raw)]
    kept = kept_by_hand(z, params.top_k, params.top_p, params.min_p)
    total = math.fsum(math.exp(z[v]) for v in kept)
    seen = Counter(result.token_id for result in drawn)
    assert set(seen) == set(kept)
    statistic = sum((seen[v] - count * math.exp(z[v]) / total) ** 2 / (count * math.exp(z[v]) / total) for v in kept)
    freedom = len(kept) - 1
    # Wilson-Hilferty: the 99.9 % quantile of chi-square
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("name", ["sample", "turn", "index"])
def test_streams_are_independent(name):
    """Two streams agree as often as independent draws do: for uniform logits over 8 ids, one time in eight."""
    logits = torch.zeros(4000, 8, dtype=torch.float64)
    numbers = {"sample": 0, "turn": 0, "index": 0}
    rows = [row(SamplingParams(), **numbers | {name: i}) for i in range(4000)]
    ids = [result.token_id for result in draw(logits, *rows)]
    agreements = sum(a == b for a, b in itertools.pairwise(ids))
    assert abs(agreements - 4000 / 8) < 4 * math.sqrt(4000 * 1 / 8 * 7 / 8)


@settings(max_examples=200, deadline=None)
@given(
    z=st.lists(st.integers(-6, 6), min_size=1, max_size=30),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
)
def test_kept_ids_are_those_of_the_definition(z, top_k, top_p, min_p):
    z = [value / 2 for value in z]
    expected = kept_by_hand(z, min(top_k, len(z)), top_p, min_p)
    assume(expected is not None)
    assert kept(torch.tensor(z, dtype=torch.float64), min(top_k, len(z)), top_p, min_p) == expected


@pytest.mark.parametrize("vocabulary", [256, 257, 5000])
@pytest.mark.parametrize("filters", [{"top_p": 0.93}, {"top_p": 0.02}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.6}])
def test_kept_ids_of_large_vocabularies(vocabulary, filters):
    generator = torch.Generator().manual_seed(3)
    z = (torch.randn(vocabulary, generator=generator, dtype=torch.float64) * 4).round() / 8  # flat, with many ties
    expected = kept_by_hand(z.tolist(), **filters)
    assert kept(z, **filters) == expected


def test_ties_go_to_the_lowest_id():
    logits = logits_of(0.0, 3.0, 3.0, 3.0, 1.0).expand(50, -1)
    assert {r.token_id for r in draw(logits, *(row(SamplingParams(temperature=0), index=i) for i in range(50)))} == {1}
    assert {r.token_id for r in draw(logits, *(row(SamplingParams(top_k=1), index=i) for i in range(50)))} == {1}
    assert {r.token_id for r in draw(logits, *(row(SamplingParams(top_k=2), index=i) for i in range(50)))} == {1, 2}


# --- rows do not see each other


def mixed_rows(count):
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_p": 0.95},
        {"top_k": 3, "repetition_penalty": 1.2},
        {"min_p": 0.1, "top_logprobs": 3},
        {"min_tokens": 4, "temperature": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": {5: 3.0}},
    ]
    return [
        row(
            SamplingParams(**kinds[i % len(kinds)], seed=i % 3),
            sample=i,
            turn=i % 5,
            index=i % 7,
            prompt=(1, 2),
            response=(3, 3),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_draws_the_same_token(dtype):
    rows = mixed_rows(48)
    logits = torch.randn(48, 5001, generator=torch.Generator().manual_seed(1), dtype=dtype) * 3
    before = logits.clone()
    together = draw(logits, *rows)
    backwards = draw(logits.flip(0), *reversed(rows))[::-1]
    assert torch.equal(logits, before)
    alone = [draw(logits[i : i + 1], rows[i])[0] for i in range(48)]
    for other in (backwards, alone):
        assert [r.token_id for r in other] == [r.token_id for r in together]
        assert [[t.token_id for t in r.top] for r in other] == [[t.token_id for t in r.top] for r in together]
        assert [r.logprob for r in other] == pytest.approx([r.logprob for r in together], abs=1e-5)


# --- what changes the logits


def test_penalties_by_hand():
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 1.5, 0: -1.0}
    )
    z = torch.tensor([2.0, -1.0, 0.5, 4.0, 0.0, 3.0], dtype=torch.float64)
    adjusted = _adjust(z.clone(), row(params, prompt=(0, 0, 1), response=(1, 3, 3)))
    # 0: 2/2 - 1; 1: -1*2 - 0.5 - 0.25; 2: untouched; 3: 4/2 - 0.5 - 0.5; 4: 0 + 1.5; 5: untouched
    assert adjusted.tolist() == [0.0, -2.75, 0.5, 1.0, 1.5, 3.0]


def test_penalties_change_the_token_but_not_its_logprob():
    params = SamplingParams(temperature=0, frequency_penalty=0.6)
    logits = logits_of(1.0, 2.0, 0.0)
    for repeats, expected in ((1, 1), (2, 0)):
        result = draw(logits, row(params, response=[1] * repeats))[0]
        assert result.token_id == expected
        raw = (1.0, 2.0, 0.0)
        assert result.logprob == pytest.approx(raw[expected] - math.log(sum(map(math.exp, raw))), abs=1e-14)


def test_penalties_without_a_response():
    params = SamplingParams(temperature=0, presence_penalty=1.0, repetition_penalty=1.5)
    assert draw(logits_of(1.0, 2.0), row(params))[0].token_id == 1


def test_bias_is_added_before_temperature():
    params = SamplingParams(temperature=0.25, logit_bias={0: 1.0}, min_p=0.1)  # the other id is exp(-4) as likely
    drawn = draw(logits_of(0.0, 0.0).expand(50, -1), *(row(params, index=i) for i in range(50)))
    assert {r.token_id for r in drawn} == {0}
    assert drawn[0].logprob == pytest.approx(-math.log(2))


def test_large_biases_ban_and_force():
    logits = logits_of(*[0.1 * v for v in range(8)]).expand(300, -1)
    banned = draw(logits, *(row(SamplingParams(logit_bias={7: -1e4, 3: -1e4}), index=i) for i in range(300)))
    assert {r.token_id for r in banned} == {0, 1, 2, 4, 5, 6}
    forced = draw(logits, *(row(SamplingParams(logit_bias={2: 1e4}), index=i) for i in range(300)))
    assert {r.token_id for r in forced} == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_every_eos_and_stop_id(temperature):
    logits = logits_of(-9.0, -9.0, -9.0, -9.0, -9.0, 5.0, 5.0, 5.0).expand(200, -1)
    ends = {5, *EOS}

    def tokens(index, **options):
        params = [
            SamplingParams(temperature=temperature, seed=s, stop_ids=(5,), min_tokens=3, **options) for s in range(200)
        ]
        return {r.token_id for r in draw(logits, *(row(p, index=index) for p in params))}

    assert not tokens(2) & ends
    assert tokens(3) <= ends
    assert tokens(2, ignore_eos=True) <= set(EOS)


# --- log-probabilities


def test_logprobs_by_hand():
    raw = (0.5, -1.0, 2.0, 2.0)
    scaled = [value / 0.5 for value in raw]
    total = math.log(sum(map(math.exp, scaled)))
    params = SamplingParams(temperature=0.5, top_k=1, top_logprobs=3, logit_bias={1: 50.0})
    result = draw(logits_of(*raw), row(params))[0]
    assert result.token_id == 1  # forced by the bias, which its log-probability ignores
    assert result.logprob == pytest.approx(scaled[1] - total, abs=1e-14)
    assert [(t.token_id, pytest.approx(t.logprob, abs=1e-14)) for t in result.top] == [
        (2, scaled[2] - total),
        (3, scaled[3] - total),
        (0, scaled[0] - total),
    ]


def test_prompt_logprobs_by_hand():
    raw = [[1.0, 0.0, -1.0], [3.0, 3.0, 0.0]]
    targets = [2, 1]
    expected = [z[t] - math.log(sum(map(math.exp, z))) for z, t in zip(raw, targets, strict=True)]
    found = prompt_logprobs(torch.tensor(raw, dtype=torch.float64), torch.tensor(targets), OPS)
    assert found == pytest.approx(expected, abs=1e-14)


# --- mistakes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_logits_are_an_error_of_their_row_alone(bad):
    logits = torch.zeros(3, 8)
    good = logits.clone()
    logits[1, 4] = bad
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0, top_logprobs=3),
        SamplingParams(top_p=0.5, min_tokens=2),
    ):
        drawn, undisturbed = draw(logits, *[row(params)] * 3), draw(good, *[row(params)] * 3)
        assert "no finite maximum" in drawn[1].error
        assert [drawn[0], drawn[2]] == [undisturbed[0], undisturbed[2]]
        assert drawn[0].error is None
    scores = prompt_logprobs(logits, torch.zeros(3, dtype=torch.int64), OPS)
    assert [math.isfinite(score) for score in scores] == [True, False, True]


def test_impossible_ids_are_never_drawn():
    logits = logits_of(-math.inf, 0.0, -math.inf, 0.0).expand(100, -1)
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.999), SamplingParams(min_p=0.01)):
        assert {r.token_id for r in draw(logits, *(row(params, index=i) for i in range(100)))} == {1, 3}


def test_nothing_left_to_draw_is_an_error_of_the_row():
    params = SamplingParams(min_tokens=1, stop_ids=tuple(range(8)))
    good, bad = draw(torch.zeros(2, 8), row(SamplingParams()), row(params))
    assert good.error is None
    assert "no token is left to draw" in bad.error


@pytest.mark.parametrize(
    "options", [{"top_k": 9}, {"top_logprobs": 9}, {"stop_ids": (1, 8)}, {"logit_bias": {8: 1.0}}], ids=str
)
def test_params_beyond_the_vocabulary_are_refused(options):
    params = SamplingParams(**options)
    with pytest.raises(RequestError, match=f"{next(iter(options))}.*[89]"):
        check_params(params, 8)
    check_params(params, 9)
