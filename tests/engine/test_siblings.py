"""Siblings: whoever works on the same turn hears what the others write, and what they had written before."""

from array import array
from unittest.mock import Mock, call

from palimpsest.engine.siblings import Siblings


def test_each_hears_the_others_of_its_turn():
    siblings, drafters = Siblings(), [Mock() for _ in range(3)]
    siblings.begin(0, 0, drafters[0])
    siblings.write(0, array("i", [1, 2]))
    siblings.begin(1, 0, drafters[1])
    siblings.write(1, array("i", [3]))
    siblings.write(0, array("i", [4]))
    assert drafters[0].extend.mock_calls == [call(1, array("i", [3]))]
    assert drafters[1].extend.mock_calls == [call(0, array("i", [1, 2])), call(0, array("i", [4]))]
    siblings.begin(0, 1, drafters[2])
    siblings.write(0, array("i", [5]))
    siblings.write(1, array("i", [6]))
    assert drafters[2].extend.mock_calls == [], "the other is a turn behind"
    late = Mock()
    siblings.begin(1, 1, late)
    assert late.extend.mock_calls == [call(0, array("i", [5]))]
