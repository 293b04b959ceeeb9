"""Taking turns: order, warm-up, medians of ratios, and peers that fail."""

import pytest
from palimpsest.bench.clock import Sample
from palimpsest.bench.costs import Cost
from palimpsest.bench.limits import Limits
from palimpsest.bench.peers import PeerError
from palimpsest.bench.rounds import Entry, Measured, alternate, best, ratio


class ScriptedProbe:
    """Limits of 100 FLOP/s and 10 bytes/s in every round."""

    def measure(self):
        return Limits(100.0, 10.0)


def entry(name, run, *, tokens=10, cost=None):
    return Entry(name, "decode", "float32", 100, 1, tokens, cost or Cost(0.0, 10.0), run)


def measured(name, seconds, *, tokens=10, limits=None):
    one = Measured(entry(name, None, tokens=tokens))
    one.samples = [Sample(s, 0.0) for s in seconds]
    one.limits = limits or [Limits(100.0, 10.0)] * len(seconds)
    return one


def test_engines_take_turns_and_the_first_round_does_not_count():
    calls = []

    def run(name):
        def one(number):
            calls.append((number, name))
            return Sample(1.0 + number, 0.0)

        return one

    found = alternate([entry("a", run("a")), entry("b", run("b"))], 3, ScriptedProbe())
    assert calls == [(number, name) for number in range(4) for name in "ab"]
    assert [[sample.seconds for sample in one.samples] for one in found] == [[2.0, 3.0, 4.0]] * 2
    assert [len(one.limits) for one in found] == [3, 3]


def test_a_peer_that_fails_in_a_later_round_is_left_out(capsys):
    def fails(number):
        if number == 2:
            raise PeerError("fake has died")
        return Sample(1.0, 0.0)

    found = alternate([entry("ours", lambda _: Sample(1.0, 0.0)), entry("fake", fails)], 3, ScriptedProbe())
    assert [one.entry.engine for one in found] == ["ours"]
    assert len(found[0].samples) == 3
    assert "fake has died; left out" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    ours, theirs = measured("ours", [1.0, 10.0, 2.0]), measured("theirs", [3.0, 20.0, 2.0])
    assert ratio(ours, theirs) == 2.0  # of 3, 2 and 1; the medians alone would give 3 / 2
    slow = measured("theirs", [3.0, 20.0, 2.0], tokens=5)
    assert ratio(ours, slow) == 4.0  # seconds of half as many tokens


def test_the_share_compares_each_round_with_its_own_limit():
    # 10 bytes at 10, 5 and 40 bytes/s: at best 1, 2 and 0.25 s.
    limits = [Limits(100.0, rate) for rate in (10.0, 5.0, 40.0)]
    one = measured("ours", [2.0, 2.5, 1.0], limits=limits)
    assert one.share == 0.5  # of 0.5, 0.8 and 0.25
    assert (one.limit, one.tokens_per_s) == (10.0, 5.0)


def test_the_limit_is_the_slower_of_arithmetic_and_memory():
    limits = Limits(flops_per_s=100.0, bytes_per_s=10.0)
    assert limits.seconds(Cost(flops=500.0, bytes=10.0)) == 5.0
    assert limits.seconds(Cost(flops=500.0, bytes=90.0)) == 9.0


def test_the_best_is_the_fastest_by_tokens():
    assert best([]) is None
    assert best([measured("a", [1.0], tokens=4), measured("b", [2.0], tokens=10)]).entry.engine == "b"


@pytest.mark.parametrize("rounds", [1, 4])
def test_medians(rounds):
    one = measured("ours", [1.0, 9.0, 2.0, 4.0][:rounds])
    assert one.seconds == (1.0 if rounds == 1 else 3.0)
