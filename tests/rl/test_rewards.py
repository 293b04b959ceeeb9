"""Rewards: MemAgent's verifier to the letter, the measures of SQuAD, and functions that fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from palimpsest.engine.errors import ConfigError
from palimpsest.rl.rewards import Scorer, boxed_exact, em, f1, sub_em


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        (r"It is \boxed{Port Ostrel}.", ["port ostrel"], 1),
        (r"\boxed{Port} or \boxed{Ostrel}", ["Ostrel"], 1),
        (r"\boxed{Port} or \boxed{Ostrel}", ["Port"], 0),
        (r"\boxed{the Port}", ["Port"], 0),
        (r"\boxed{Port.}", ["Port"], 0),
        (r"\boxed{Port", ["Port"], 0),
        ("Port", ["Port"], 0),
        (r"\boxed Port", ["Port"], 1),
        (r"\boxed Port$ \boxed{Ostrel}", ["Port"], 1),
        (r"\fbox{Port}", ["Port"], 0),
        (r"\boxed{f(\{1\}, {2})}", [r"f(\{1\},{2})"], 1),
        (r"\boxed{1874} " + "x" * 290, ["1874"], 0),
        (r"\boxed{1874} " + "x" * 280, ["1874"], 1),
        (r"\boxed{\dfrac{1}{2}}", [r"\tfrac{1} {2}"], 1),
        (r"\boxed{\frac12}", [r"\frac{1}{2}"], 0),
        (r"\boxed{1/2}", [r"\frac{1}{2}"], 0),
        (r"\boxed{0.5}", [r"\frac{1}{2}"], 0),
        (r"\boxed{x = 7}", ["7"], 0),
        (r"\boxed{5\text{ km}}", ["5"], 0),
        (r"\boxed{.5}", ["0.5"], 0),
        (r"\boxed{a .5}", ["a0.5"], 1),
        (r"\boxed{90^\circ}", ["90"], 1),
        (r"\boxed{90^{\circ}}", ["90"], 1),
        (r"\boxed{\left( 3\!0\% \right)}", ["(30)"], 1),
        (r"\boxed{\$5}", ["5"], 1),
        (r"\boxed{}", ["a"], 0),
        ("", ["a"], 0),
        (r"\boxed{a}", [], 0),
        ("{" * 10_000_000, ["a"], 0),
    ],
)
def test_boxed_exact(answer: str, references: list[str], expected: int) -> None:
    assert boxed_exact(answer, references) == expected


def test_the_measures_of_squad() -> None:
    assert em("The Port, of Ostrel!", ["port of ostrel"]) == 1 and em("port", ["port of ostrel"]) == 0
    assert f1("port town", ["x", "the port of ostrel"]) == pytest.approx(2 * 1 / (2 + 3))
    assert f1("", ["a b"]) == 0 and f1("a b", []) == 0
    assert sub_em("It is the port of Ostrel.", ["Port of Ostrel"]) == 1
    assert sub_em("Ostrel", ["Port of Ostrel"]) == 0
    assert sub_em("anything", ["The"]) == 0  # nothing is left of this reference


def test_a_reward_that_fails_counts_0_and_is_counted() -> None:
    given = iter([np.bool_(True), np.float32(0.25), True, None, float("nan"), -1e300, "x", RuntimeError("boom")])

    def reward(answer: str, references: Sequence[str]) -> float:
        value = next(given)
        if isinstance(value, Exception):
            raise value
        return value  # type: ignore[return-value]

    scorer = Scorer(reward)
    with pytest.warns(UserWarning, match=r"reward function failed \((result|raised)\)") as seen:
        assert [scorer("", []) for _ in range(8)] == [1.0, 0.25, 1.0, *[0.0] * 5]
    assert len(seen) == 2
    assert scorer.failures.counts == {"result": 4, "raised": 1} and "None" in scorer.failures.first["result"]
    for wrong in ("boxed", 3):
        with pytest.raises(ConfigError, match="boxed_exact, em, f1, sub_em"):
            Scorer(wrong)  # type: ignore[arg-type]
