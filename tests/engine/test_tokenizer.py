"""Tokenizer: the ids of transformers, plain text without control tokens, and streams that equal the whole."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsest.engine import defaults
from palimpsest.engine import tokenizer as tokenizer_module
from palimpsest.engine.errors import CheckpointError, RequestError
from palimpsest.engine.gguf import converted_folder
from palimpsest.engine.templates import Slot, Template, TokenTemplate
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.tests.tiny_models import SYSTEM_TEXT, TOKENIZER_KINDS, make_tokenizer_folder
from transformers import AutoTokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CUTTABLE = tuple(kind for kind in TOKENIZER_KINDS if kind != "wordlevel")

# Scraps that meet in the alternatives of the split patterns, and characters on which Unicode tables or NFC differ.
SCRAPS = [
    *(
        "the lighthouse",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'",
        "'s",
        "'ll",
        "'LL",
        "l",
        "ve",
        "12",
        "1874",
        "!",
        "?!",
        "...",
        "-",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u0958",
        "\ufb1d",
        ".",
        "\u212b",
        "\u1100",
        "\u1161",
        "\u11a8",
        "\u00a0",
        "\u3000",
        "\u2028",
    ),
    *(
        "中文",
        "。",
        "🙂",
        "\u0967",
        "\u00b2",
        "\u2160",
        "\u0345",
        "\U00010d4a",
        "\u1c89",
        "\u2160.",
        "\ufdd0",
        "\u037e",
        "\x00",
    ),
    *("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<unk>", "<|begin_of_text|>"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(SCRAPS), st.text(max_size=3)), max_size=30).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: make_tokenizer_folder(root / kind, kind) for kind in TOKENIZER_KINDS}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "BLOCK", 4)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def splits(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the pre-tokenizer makes of a text: a sharper witness than the ids, for tiny vocabularies merge little."""
    plain = tokenizer._plain
    normal = plain.normalizer.normalize_str(text) if plain.normalizer else text
    return [piece for piece, _ in plain.pre_tokenizer.pre_tokenize_str(normal)]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the text in one piece, past everything that could cut it."""
    return list(tokenizer._plain.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_any_cutting_gives_the_ids_of_the_whole(ours: dict[str, Tokenizer], kind: str) -> None:
    check_cuttings(ours[kind])


@pytest.mark.slow  # the first time the model is converted
@pytest.mark.skipif(find_spec(defaults.PACKAGE) is None, reason=f"needs `{defaults.INSTALL}`")
def test_any_cutting_with_the_embedded_model() -> None:
    tokenizer = Tokenizer.load(converted_folder(defaults.embedded_model_path()))
    assert tokenizer._words_end_pieces
    check_cuttings(tokenizer)


def check_cuttings(tokenizer: Tokenizer) -> None:
    @settings(deadline=None, max_examples=400)
    @given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from([1, 2, 5, 17]))
    def check(text: str, places: list[int], block: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer_module, "BLOCK", block)
            streamed = array("i")
            for ids in tokenizer.encode_pieces(cut(text, places)):
                streamed.extend(ids)
            if tokenizer._words_end_pieces:
                parts = list(tokenizer_module._certain_parts(cut(text, places)))
                assert splits(tokenizer, text) == [piece for part in parts for piece in splits(tokenizer, part)]
        assert streamed.tolist() == whole(tokenizer, text)

    check()


@pytest.mark.parametrize("kind", CUTTABLE)
@pytest.mark.usefixtures("small_blocks")
def test_streams_are_cut_and_memory_is_bounded(ours: dict[str, Tokenizer], kind: str) -> None:
    """Each part is given out long before the text ends: this is what bounds the memory."""
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "the keeper "

    stream = ours[kind].encode_pieces(endless())
    for _ in range(50):
        next(stream)
    assert taken < 150


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_plain_text_never_holds_control_tokens(ours: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = ours[kind]
    control = {tokenizer.id_of(token) for token in (*CONTROL, "<|begin_of_text|>")} - {None}
    assert len(control) >= 3

    @settings(deadline=None, max_examples=200)
    @given(TEXTS)
    def check(text: str) -> None:
        assert control.isdisjoint(tokenizer.encode(text))

    check()
    for token in CONTROL:
        assert control.isdisjoint(tokenizer.encode(f"a {token} b{token}"))
        if kind != "wordlevel":
            assert tokenizer.decode(tokenizer.encode(f"a {token}  b."), skip_special=False) == f"a {token}  b."


def test_control_tokens_that_the_model_itself_would_match(tmp_path: Path) -> None:
    """A BPE that takes whole words first, and merges that lead to a control token, must not find it either."""
    folder = make_tokenizer_folder(tmp_path / "t", "llama3")
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    model = values["model"]
    number = model["vocab"].pop("lighthouse", None) or model["vocab"].pop("Ġlighthouse", 700)
    model["vocab"] |= {"PAD": number, "EN": 701, "END": 702}
    model["merges"] = [m for m in model["merges"] if "lighthouse" not in "".join(m)] + [["E", "N"], ["EN", "D"]]
    for content, ident in (("PAD", number), ("END", 702)):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        values["added_tokens"].append({"id": ident, "content": content, **flags})
    file.write_text(json.dumps(values))
    tokenizer = Tokenizer.load(folder)
    for token in ("PAD", "END"):
        assert tokenizer.encode_template(token).tolist() == [tokenizer.id_of(token)]
        assert tokenizer.id_of(token) not in tokenizer.encode(token)
        assert tokenizer.decode(tokenizer.encode(token)) == token


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_prompts_are_those_of_transformers(ours: dict[str, Tokenizer], folders: dict[str, Path], kind: str) -> None:
    theirs = AutoTokenizer.from_pretrained(folders[kind])

    @settings(deadline=None, max_examples=200)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = theirs(text).input_ids
        assert ours[kind].encode_prompt(text).tolist() == ids
        assert ours[kind].encode_template(text).tolist() == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours[kind].decode(array("i", ids), skip_special=skip) == expected

    check()


def test_bos_is_added_to_prompts_only(ours: dict[str, Tokenizer]) -> None:
    bos = ours["llama3"].id_of("<|begin_of_text|>")
    assert ours["llama3"].encode_prompt("the")[0] == bos
    assert bos not in ours["llama3"].encode("the")
    assert bos not in ours["llama3"].encode_template("the")


def test_chat_is_rendered_as_transformers_does(
    tmp_path: Path, folders: dict[str, Path], ours: dict[str, Tokenizer]
) -> None:
    theirs = AutoTokenizer.from_pretrained(folders["qwen2"])
    user = [{"role": "user", "content": "Who?\n"}]
    for messages in (user, [{"role": "system", "content": "Be brief."}, *user]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours["qwen2"].chat(messages) == expected
    assert SYSTEM_TEXT in ours["qwen2"].chat(user)

    folder = make_tokenizer_folder(tmp_path / "t", "llama3")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.load(folder).chat(user)
    file = folder / "tokenizer_config.json"
    template = (
        "{%- if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}\n"
        "  {{ bos_token + messages[0].content }}"
    )
    bos = {"__type": "AddedToken", "content": "<|begin_of_text|>", "special": True}
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named, "bos_token": bos}))
    old_style = Tokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert old_style.chat(user) == theirs.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    with pytest.raises(RequestError, match="one at a time"):
        old_style.chat([*user, *user])


def test_eos_ids_come_from_the_file_that_knows_best(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "t", "qwen2")
    end = Tokenizer.load(folder).id_of("<|im_end|>")
    assert Tokenizer.load(folder).eos_ids == (end,)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(folder).eos_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7, 9]}')
    assert Tokenizer.load(folder).eos_ids == (9, 7)


@pytest.mark.parametrize("wrong", ["x", [1, "x"], True, -1, 7.0, {}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_eos_ids_are_whole_numbers(tmp_path: Path, name: str, wrong: object) -> None:
    folder = make_tokenizer_folder(tmp_path / "t", "qwen2")
    (folder / name).write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=rf"eos_token_id.*{name.partition('.')[0]}"):
        Tokenizer.load(folder)


def test_ids_are_checked_against_the_models_vocabulary(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "t", "qwen2")
    tokenizer = Tokenizer.load(folder)
    count = max(tokenizer.id_of(token) or 0 for token in CONTROL) + 1
    tokenizer.check_ids(count)
    with pytest.raises(CheckpointError, match=rf"eos_token_id {count - 1} is outside .* of {count - 1}"):
        tokenizer.check_ids(count - 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5]}')
    with pytest.raises(CheckpointError, match=rf"'<\|im_end\|>' has id {count - 1}, outside"):
        Tokenizer.load(folder).check_ids(count - 1)


def sentence_piece_folder(path: Path, style: str) -> Path:
    """A tokenizer that puts a space before every text: Llama 2's files old and new, and a byte-level one."""
    folder = make_tokenizer_folder(path, "gpt2")
    values = json.loads((folder / "tokenizer.json").read_text())
    space = "\u2581"
    if style == "byte-level":
        values["pre_tokenizer"]["add_prefix_space"] = True
    else:
        words = [f"{space}the", "th", f"{space}t", "he", *"abcdefghijklmnopqrstuvwxyz.,\n", space, "t", "h", "e"]
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        tokens = list(dict.fromkeys([*(token["content"] for token in values["added_tokens"]), *bytes_, *words]))
        merges = [["t", "h"], ["h", "e"], [space, "t"], [f"{space}t", "he"]]
        values["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
        values["model"] |= {"byte_fallback": True, "unk_token": None}
        values["added_tokens"] = [token | {"id": tokens.index(token["content"])} for token in values["added_tokens"]]
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": space}
        back = {"type": "Replace", "pattern": {"String": space}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        values["post_processor"] = values["pre_tokenizer"] = values["normalizer"] = None
        if style == "Prepend":
            first = {"type": "Prepend", "prepend": space}
            values["normalizer"] = {"type": "Sequence", "normalizers": [first, replace]}
        else:
            values["pre_tokenizer"] = {
                "type": "Metaspace",
                "replacement": space,
                "prepend_scheme": style,
                "split": False,
            }
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        values["decoder"] = {"type": "Sequence", "decoders": steps}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("style", ["Prepend", "first", "always", "byte-level"])
def test_pieces_get_no_space_of_their_own(tmp_path: Path, style: str) -> None:
    """The whole prompt has the space that transformers puts before it; what is spliced from pieces has none."""
    folder = sentence_piece_folder(tmp_path / "t", style)
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode_prompt("the keeper").tolist() == theirs("the keeper").input_ids
    assert tokenizer.encode_prompt("the keeper") == tokenizer.encode_template(" the keeper")
    update = Template(("<problem>\n", Slot.PROBLEM, "\n</problem>", Slot.MEMORY, "\n", Slot.CHUNK, "\nmemory:\n"))
    texts = {Slot.PROBLEM: "who is the keeper", Slot.MEMORY: "the lamps", Slot.CHUNK: " the Größe"}
    prompt = TokenTemplate(update, tokenizer).fill({slot: tokenizer.encode(text) for slot, text in texts.items()})
    message = "".join(texts[part] if isinstance(part, Slot) else part for part in update.parts)
    expected = tokenizer.chat([{"role": "user", "content": message}])
    ids = [token for segment in prompt for token in segment.ids]
    assert tokenizer.decode(ids, skip_special=False) == expected


def test_an_unknown_way_to_add_something_is_refused(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "t", "gpt2")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"Regex": "^"}, "content": " "}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"cannot be encoded apart.*normalizer"):
        Tokenizer.load(folder)


def test_fingerprint_follows_the_definition(
    tmp_path: Path, ours: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    assert Tokenizer.load(folders["qwen2"]).fingerprint() == ours["qwen2"].fingerprint()
    assert len({tokenizer.fingerprint() for tokenizer in ours.values()}) == len(ours)


def test_mistakes_are_named(tmp_path: Path, ours: dict[str, Tokenizer]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is absent"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(CheckpointError, match="Unigram"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}')
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer.load(tmp_path)
    with pytest.raises(RequestError, match="valid Unicode"):
        ours["qwen2"].encode("a \ud800 b")
