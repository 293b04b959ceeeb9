"""Drafts: where they come from, that they find their place again, and what they cost at a controlled acceptance."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from palimpsest.engine.acceptance import Acceptance, StepCost
from palimpsest.engine.draft import Drafter
from palimpsest.engine.sequence import Segment

VOCABULARY = 49000
LIMIT = 2047


def text(count, seed):
    rng = random.Random(seed)
    return array("i", [rng.randrange(VOCABULARY) for _ in range(count)])


def segments(memory, chunk):
    parts = {"head": text(50, "head"), "memory": memory, "before_chunk": text(5, "before"), "chunk": chunk}
    return [Segment(name, ids) for name, ids in parts.items()]


def replaced(memory, every):
    """The memory with every so manieth token replaced by another."""
    return array("i", [(token + 1) % VOCABULARY if (i + 1) % every == 0 else token for i, token in enumerate(memory)])


class Played:
    """A response written with a drafter as the engine would: what its steps cost, in steps of one row."""

    def __init__(self, drafter, response, cost=None):
        cost = cost or StepCost.of_weights(32)
        done, self.drafts, self.steps, self.cost = 0, [], -1, 0.0
        while done <= len(response):  # the last token drawn is the one that ends it
            draft = drafter.propose(response[:done], min(LIMIT, len(response) - done))
            ids = draft.ids if draft else array("i")
            accepted = next((i for i, token in enumerate(ids) if token != response[done + i]), len(ids))
            # The first draft is verified beside the prompt, where a row costs its arithmetic only.
            self.cost += cost(1 + len(ids)) if done else len(ids) * cost.row
            self.steps += 1
            if draft:
                self.drafts.append((draft.source, len(ids), accepted))
                drafter.record(draft, accepted)
            done += accepted + 1


MEMORY, CHUNK = text(256, "memory"), text(1000, "chunk")


def test_an_unchanged_memory_takes_no_step_after_the_prompt():
    drafter = Drafter.for_prompt(segments(MEMORY, CHUNK))
    played = Played(drafter, MEMORY)
    assert (played.drafts, played.steps) == ([("memory", 256, 256)], 0)


def test_what_goes_on_behind_the_memory_comes_from_the_chunk():
    copied = CHUNK[400:440]
    played = Played(Drafter.for_prompt(segments(MEMORY, CHUNK)), MEMORY + copied)
    assert played.drafts[0] == ("memory", 256, 256)
    assert {source for source, _, _ in played.drafts[1:]} == {"chunk"}
    assert played.steps <= 8


@pytest.mark.parametrize("change", ["left out", "put in"])
def test_finds_its_place_again(change):
    other = MEMORY[:100] + MEMORY[130:] if change == "left out" else MEMORY[:100] + text(30, "new") + MEMORY[100:]
    played = Played(Drafter.for_prompt(segments(MEMORY, CHUNK)), other)
    assert sum(accepted for _, _, accepted in played.drafts) >= 215
    assert played.steps <= len(other) - 215 + 12


def test_of_equal_places_takes_the_one_behind_the_last_accepted_token():
    line = text(4, "line")
    memory = line + text(30, 1) + line + text(30, 2) + line + text(30, 3)
    drafter = Drafter.for_prompt(segments(memory, CHUNK))
    # The response follows the memory into its second part, then goes astray and comes back with the repeated line.
    response = memory[:50] + text(8, "new") + line
    for end in range(len(response) + 1):
        draft = drafter.propose(response[:end], LIMIT)
    assert draft.ids[:30] == text(30, 3)


def test_siblings_help_as_soon_as_they_are_ahead():
    theirs = text(60, "sibling")
    drafter = Drafter.for_prompt(segments(MEMORY, CHUNK))
    drafter.extend(0, text(20, "early"))
    response = text(5, "own") + theirs[:6]
    assert Played(drafter, response).drafts[-1][0] == "memory"
    drafter.extend(7, theirs[:6])
    assert drafter.propose(response, LIMIT) is None  # it has come no further than we
    drafter.extend(7, theirs[6:])
    draft = drafter.propose(response, LIMIT)
    assert draft.source == "sibling"
    assert draft.ids == theirs[6 : 6 + len(draft.ids)]


def test_siblings_that_write_the_same_are_told_apart():
    shared, theirs, astray = text(20, "shared"), text(40, "theirs"), text(5, "own")
    drafter = Drafter.for_prompt(segments(MEMORY, CHUNK))
    drafter.extend(0, shared)
    drafter.propose(astray, LIMIT)
    drafter.extend(1, shared)
    drafter.extend(1, theirs)
    draft = drafter.propose(astray + shared, LIMIT)
    assert (draft.source, draft.ids) == ("sibling", theirs[: len(draft.ids)])


def test_goes_where_something_follows():
    line = text(6, "line")
    memory = line + text(30, 1) + line
    drafter = Drafter.for_prompt(segments(memory, CHUNK))
    for end in range(len(memory) + 1):
        drafter.propose(memory[:end], LIMIT)
    assert drafter.propose(memory + text(3, "new") + line, LIMIT).ids[:10] == text(30, 1)[:10]


@pytest.mark.parametrize("period", [1, 7, 40])
@pytest.mark.parametrize("prompt", [segments(MEMORY, CHUNK), list(CHUNK)])
def test_a_response_that_goes_round_in_circles_repeats_itself(period, prompt):
    response = text(10, "start") + text(period, "circle") * (200 // period)
    played = Played(Drafter.for_prompt(prompt), response)
    assert sum(accepted for source, _, accepted in played.drafts if source == "response") >= 190 - 2 * period
    assert played.steps <= 10 + period + 12


@pytest.mark.parametrize("as_segments", [False, True])
def test_a_prompt_of_another_kind_is_quoted(as_segments):
    prompt = [Segment("memory", MEMORY), Segment("tail", CHUNK)] if as_segments else list(MEMORY + CHUNK)
    drafter = Drafter.for_prompt(prompt)
    assert drafter.propose(array("i"), LIMIT) is None
    played = Played(drafter, MEMORY[50:150])
    assert {source for source, _, _ in played.drafts} == {"prompt"}
    assert played.steps <= 15


@given(st.data())
def test_is_right_again_after_any_response(data):
    """Proposals depend on what was recorded, never on what it was asked before: longer, shorter or other responses."""
    ids = st.lists(st.integers(0, 3), max_size=30).map(lambda ids: array("i", ids))
    memory, chunk = data.draw(ids), data.draw(ids)
    drafter = Drafter.for_prompt(segments(memory, chunk))
    for response in data.draw(st.lists(ids, max_size=5)):
        limit = data.draw(st.integers(0, 9))
        draft = drafter.propose(response, limit)
        assert draft == drafter.propose(response, limit)
        if draft is not None:
            assert 0 < len(draft.ids) <= limit
            goes_on = response + draft.ids
            if draft.source == "response":  # in circles
                periods = range(1, len(response) + 1)
                assert any(goes_on[len(response) - n : len(goes_on) - n] == draft.ids for n in periods)
            else:
                assert draft.ids.tobytes() in {"memory": memory, "chunk": chunk}[draft.source].tobytes()
    assert drafter.propose(array("i"), 9) == Drafter.for_prompt(segments(memory, chunk)).propose(array("i"), 9)


def turns(every, count, acceptance, bits=32):
    """The cost of turns one after the other, in steps of one row, drafting off = len(MEMORY)."""
    cost = StepCost.of_weights(bits)
    costs = []
    for turn in range(count):
        memory = text(256, f"memory {turn}")
        drafter = Drafter.for_prompt(segments(memory, CHUNK), acceptance=acceptance)
        costs.append(Played(drafter, replaced(memory, every) if every else text(256, f"other {turn}"), cost).cost)
    return costs


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_memory_that_is_all_new_costs_little_at_first_and_soon_nothing(bits):
    acceptance = Acceptance(StepCost.of_weights(bits))
    assert turns(1000, 3, acceptance, bits)[-1] < 60  # unchanged: confidence at its highest
    first, _, *later = turns(None, 6, acceptance, bits)
    assert first <= 1.25 * 257  # beside these steps there is the prompt, which weighs as much
    assert max(later) <= 1.02 * 257
    assert turns(1000, 3, acceptance, bits)[-1] < 60  # and it comes back


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_long_memory_is_trusted_whole_once_it_was_right(bits):
    acceptance, long = Acceptance(StepCost.of_weights(bits)), text(1024, "long")
    played = [Played(Drafter.for_prompt(segments(long, CHUNK), acceptance=acceptance), long) for _ in range(3)]
    assert played[0].drafts[0][1] <= 300
    assert [(one.drafts, one.steps) for one in played[2:]] == [([("memory", 1024, 1024)], 0)]


def test_lookups_that_fail_become_rare():
    """Each token stands somewhere in the memory, and what follows there is never right."""
    shuffled = array("i", random.Random(0).sample(list(MEMORY), len(MEMORY)))
    acceptance = Acceptance()
    costs = [
        Played(Drafter.for_prompt(segments(MEMORY, CHUNK), acceptance=acceptance), shuffled).cost for _ in range(3)
    ]
    assert costs[-1] <= 1.01 * 257


def test_every_fifth_token_replaced():
    costs = turns(5, 4, Acceptance())
    # 52 steps that each take the four tokens right are the least possible.
    assert costs[0] <= 85
    assert max(costs[1:]) <= 52 / 0.85


def test_half_of_the_tokens_replaced_is_still_a_gain():
    assert max(turns(2, 4, Acceptance())[1:]) <= 0.65 * 257


def test_a_step_shared_by_many_takes_shorter_drafts():
    acceptance = Acceptance()
    acceptance.record("memory", 20, 8)
    lengths = [acceptance.length("memory", LIMIT, opening=False, silence=0, width=width) for width in (1, 2, 4, 32)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4 > lengths[-1]
