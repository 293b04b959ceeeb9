"""The stream of text against decoding everything at once."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from palimpsest.engine.detokenizer import WINDOW, TextStream
from palimpsest.engine.errors import RequestError


class Pieces:
    """A byte-level tokenizer whose token i is the byte string pieces[i]; counts the tokens it decodes."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoded = 0

    def __call__(self, ids):
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def run(self, stop=(), min_tokens=0):
        """Push all tokens, or those up to a stop string; returns the stream and the texts it showed."""
        stream = TextStream(self, stop, min_tokens)
        shown = []
        for token in range(len(self.pieces)):
            shown.append(stream.push(token))
            if stream.stopped is not None:
                break
        shown.append(stream.finish())
        return stream, shown


def whole(pieces):
    return b"".join(pieces).decode("utf-8", errors="replace")


def first_stop(pieces, stop, min_tokens):
    """By definition, from the whole text: (text, tokens pushed, tokens before the stop string, the string)."""
    for count in range(max(1, min_tokens), len(pieces) + 1):
        text = whole(pieces[:count])
        floor = len(whole(pieces[: max(0, min_tokens - 1)]))
        found = [(text.find(s, max(0, floor - len(s) + 1)), i) for i, s in enumerate(stop)]
        found = [(start, i) for start, i in found if start >= 0]
        if found:
            start, i = min(found)
            before = max((n for n in range(count + 1) if len(whole(pieces[:n])) <= start), default=0)
            return text[:start], count, before, stop[i]
    return whole(pieces), len(pieces), len(pieces), None


@st.composite
def tokenised(draw, alphabet):
    """A text over `alphabet` as bytes, cut at random places: inside characters too; some pieces are empty."""
    data = "".join(draw(st.lists(st.sampled_from(alphabet), max_size=60))).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=60)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


texts = tokenised(["a", "b", "ab", "é", "你", "好", "🙂", " ", "\n"])
broken = st.lists(
    st.sampled_from([b"\x80", b"\xf0\x9f", b"\x98\x80", b"\xe4", b"\xbd\xa0", b"a", b"", "\ufffd".encode()]),
    max_size=80,
)
stops = st.lists(st.sampled_from(["ab", "aab", "ba", "你好", "é", "🙂 ", "b\n", "abab"]), max_size=3, unique=True)


@settings(max_examples=300, deadline=None)
@given(st.one_of(texts, broken, st.lists(st.binary(max_size=3), max_size=80)))
@example([b"\x80"] * 40 + [b"\xf0", b"\x9f", b"\x99", b"\x82"])
def test_pieces_join_to_the_whole(pieces):
    stream, shown = Pieces(pieces).run()
    assert "".join(shown) == stream.text == whole(pieces)
    assert stream.stopped is None and stream.tokens_before_stop == len(pieces)


@settings(max_examples=500, deadline=None)
@given(texts, stops, st.integers(0, 6))
@example([b"ab", b"a", b"b"], ["ab"], 2)
@example([b"aa", b"a"], ["aa"], 2)
@example([b"abab"], ["ba", "abab"], 0)
@example([b"x\xc3", b"\xa9"], ["\u00e9"], 0)
def test_text_is_cut_before_the_first_stop_string(pieces, stop, min_tokens):
    text, count, before, string = first_stop(pieces, stop, min_tokens)
    stream, shown = Pieces(pieces).run(tuple(stop), min_tokens)
    assert "".join(shown) == stream.text == text
    assert stream.stopped == string
    assert stream.tokens_before_stop == before
    assert len(shown) == count + 1  # it stops at the very token that completes the string


@settings(max_examples=200, deadline=None)
@given(texts, stops)
def test_nothing_shown_is_ever_taken_back_or_held_without_need(pieces, stop):
    stream = TextStream(Pieces(pieces), tuple(stop))
    shown = ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        if stream.stopped is not None:
            break
        now = whole(pieces[: token + 1])
        held = now.removeprefix(shown)
        assert now.startswith(shown) and stream.text == now.rstrip("\ufffd")
        tail = held.rstrip("\ufffd")
        assert tail == "" or any(s.startswith(tail) for s in stop)


@settings(max_examples=300, deadline=None)
@given(texts, stops)
@example([b"x", b"a", b"b"], ["ab"])
def test_tokens_before_a_stop_string_stay_before_it(pieces, stop):
    stream = TextStream(Pieces(pieces), tuple(stop))
    before = [0]
    for token in range(len(pieces)):
        stream.push(token)
        before.append(stream.tokens_before_stop)
        if stream.stopped is not None:
            break
    stream.finish()
    assert max(before) <= stream.tokens_before_stop
    assert stop or before == list(range(len(pieces) + 1))


def test_a_stop_string_across_tokens_appearing_twice():
    stream = TextStream(Pieces([b"one <", b"/en", b"d> two </end>"]), ("</end>",))
    assert [stream.push(0), stream.push(1), stream.push(2)] == ["one ", "", ""]
    assert (stream.text, stream.stopped, stream.tokens_before_stop) == ("one ", "</end>", 0)


def test_a_stop_string_inside_a_token():
    stream = TextStream(Pieces([b"one", b" two </end> three"]), ("</end>",))
    assert [stream.push(0), stream.push(1), stream.finish()] == ["one", " two ", ""]
    assert (stream.text, stream.stopped, stream.tokens_before_stop) == ("one two ", "</end>", 1)


def test_a_stop_string_that_does_not_come_is_shown_at_the_end():
    stream = TextStream(Pieces([b"a", b"\xe4\xbd", b"<|"]), ("<|end|>",))
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["a", "", "\ufffd", "<|"]


def test_an_incomplete_end_is_shown_as_the_decoder_writes_it():
    stream = TextStream(Pieces([b"a\xf0\x9f", b"\x99"]))
    assert [stream.push(0), stream.push(1), stream.finish()] == ["a", "", "\ufffd"]


def test_a_stop_string_found_only_at_the_end():
    stream = TextStream(Pieces([b"a\xf0"]), ("\ufffd",))
    assert [stream.push(0), stream.finish(), stream.stopped, stream.tokens_before_stop] == ["a", "", "\ufffd", 0]


def test_a_push_after_the_stop_string_is_refused():
    stream = TextStream(Pieces([b"ab"]), ("b",))
    assert stream.push(0) == "a"
    with pytest.raises(RequestError, match="'b'"):
        stream.push(0)
    assert (stream.finish(), stream.text) == ("", "a")


@pytest.mark.parametrize("pieces", [[b"word "], [b"\xe4", b"\xbd", b"\xa0"], [b"\x80"], [b"\xe4"]], ids=repr)
def test_only_a_short_window_is_decoded(pieces):
    pieces = pieces * (1200 // len(pieces))
    decode = Pieces(pieces)
    stream, shown = decode.run()
    assert stream.text == whole(pieces)
    assert decode.decoded < 3 * WINDOW * len(pieces)
    assert all("".join(shown[i : i + WINDOW]) for i in range(len(shown) - WINDOW))


def test_a_decoder_that_drops_leading_spaces():
    """As SentencePiece decoders do: a window cut before a space would lose it."""

    def decode(ids):
        return "".join(words[i % len(words)] for i in ids).removeprefix(" ")

    words = [" un", "fold", "ed", " a", " map"]
    stream = TextStream(decode)
    shown = [stream.push(token) for token in range(400)]
    assert "".join(shown) + stream.finish() == decode(range(400))
