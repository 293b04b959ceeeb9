"""Data files: MemAgent's layout, other columns, order, truncation; each kind of bad row is refused or counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from palimpsest.engine.errors import ConfigError, RequestError
from palimpsest.engine.tokenizer import Tokenizer
from palimpsest.rl.data import DataConfig, FileSource
from palimpsest.tests.tiny_models import make_tokenizer_folder

Write = Callable[[Path, list[dict[str, Any]]], Path]


def row(index: int, **changes: Any) -> dict[str, Any]:
    values = {
        "prompt": [{"role": "user", "content": f"Who lit lamp {index}?"}],
        "context": f"The keeper lit lamp {index}.",
        "reward_model": {"style": "rule", "ground_truth": ["the keeper", f"keeper {index}"]},
        "extra_info": {"index": index, "num_docs": 200},
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def jsonl(folder: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file


def parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    file = folder / "train.parquet"
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), file, row_group_size=2)
    return file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen2"))


def opened(path: Path, tokenizer: Tokenizer, told: list[tuple[str, str]] | None = None, **options: Any) -> FileSource:
    told = [] if told is None else told
    return FileSource(DataConfig(str(path), **options), tokenizer, lambda name, text: told.append((name, text)))


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_in_the_layout_of_memagent(tmp_path: Path, tokenizer: Tokenizer, write: Write) -> None:
    source = opened(write(tmp_path, [row(i) for i in range(5)]), tokenizer)
    problem = source.problem(8)  # of the second epoch
    assert problem.question == "Who lit lamp 3?" and problem.document == "The keeper lit lamp 3."
    assert problem.answers == ("the keeper", "keeper 3") and problem.id == "3"
    assert dict(problem.extra) == {"index": 3, "num_docs": 200}
    shuffled = opened(source._files[0].path, tokenizer, shuffle=True, seed=3)
    epochs = [[shuffled.problem(5 * epoch + i).id for i in range(5)] for epoch in range(3)]
    assert all(sorted(epoch) == ["0", "1", "2", "3", "4"] for epoch in epochs) and epochs[0] != epochs[1]
    assert [shuffled.problem(i).id for i in range(5)] == epochs[0]  # whatever was asked for in between


def test_columns_of_other_names_and_none_for_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = jsonl(tmp_path, [{"q": "2 + 2?", "a": "4", "meta.id": "x", "text": "A sum."}, {"q": "3?", "a": ["3"]}])
    columns = {"question": "q", "answers": "a", "id": "meta.id"}
    source = opened(file, tokenizer, **columns, document=None)
    assert [(p.question, p.document, p.answers, p.id) for p in map(source.problem, range(2))] == [
        ("2 + 2?", "", ("4",), "x"),
        ("3?", "", ("3",), "row 1"),
    ]
    with pytest.raises(RequestError, match=r"1 with no text: .*train\.jsonl, line 2.*name other columns"):
        opened(file, tokenizer, **columns, document="text")


BAD = [
    (json.dumps(row(1, reward_model=None)).encode(), "no reward_model.ground_truth"),
    (json.dumps(row(1, context=None, prompt=None)).encode(), "no prompt and context"),
    (json.dumps(row(1, context="  \n")).encode(), "an empty document"),
    (json.dumps(row(1, context=7)).encode(), "a context that is no text"),
    (json.dumps(row(1, reward_model={"ground_truth": [1]})).encode(), "a reward_model.ground_truth that is no"),
    (json.dumps(row(1, prompt=[{"role": "system", "content": "?"}])).encode(), "a prompt that is neither"),
    (json.dumps(row(0)).encode(), "id of another row"),
    (b'{"prompt": "Who?", "context": "caf\xe9"}', "broken UTF-8"),
    (b'{"prompt": "Who?", "cont', "not JSON"),
    (json.dumps(row(1, context="The lamp \ud83d")).encode(), "half a character"),
    (json.dumps(row(1, extra_info={"index": 1.0})).encode(), "a extra_info.index that is neither text nor a whole"),
    (json.dumps(row(1, extra_info="easy")).encode(), "a extra_info that is no mapping"),
    (b"[3]", "no JSON object"),
]


@pytest.mark.parametrize(("line", "kind"), BAD)
def test_bad_rows_are_refused_by_name_or_counted(tmp_path: Path, tokenizer: Tokenizer, line: bytes, kind: str) -> None:
    file = tmp_path / "train.jsonl"
    whole = row(2, context="Lamp. " * 600_000)  # a line of 3.6 MB
    file.write_bytes(json.dumps(row(0)).encode() + b"\n\n" + line + b"\n" + json.dumps(whole).encode())
    with pytest.raises(RequestError, match=rf"1 bad rows. 1 with {kind}.*line 3.*bad_rows=skip"):
        opened(file, tokenizer)
    told: list[tuple[str, str]] = []
    source = opened(file, tokenizer, told, bad_rows="skip")
    assert source.places == 2 and source.problem(1).document == whole["context"]
    [(name, text)] = told
    assert name == "bad rows" and kind in text and sum(source.bad.values()) == 1


def test_parquet_with_broken_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    texts = arrow.array([b"The lamp.", b"caf\xe9"]).view(arrow.string())
    table = arrow.table({"q": ["Who?", "Who?"], "a": ["x", "y"], "context": texts})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(RequestError, match=r"1 with broken UTF-8: .*t\.parquet, row 1"):
        opened(tmp_path / "t.parquet", tokenizer, question="q", answers="a")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = arrow.table({"q": ["Who?"] * 99, "a": ["x"] * 99, "context": [f"The lamp {i}." for i in range(99)]})
    file, columns = tmp_path / "t.parquet", {"question": "q", "answers": "a"}
    pyarrow.parquet.write_table(table, file)
    source = opened(file, tokenizer, **columns)
    content = bytearray(file.read_bytes())
    place = content.index(b"lamp")
    content[place - 40 : place + 40] = bytes(80)
    file.write_bytes(content)
    with pytest.raises(RequestError, match=r"t\.parquet is damaged"):
        opened(file, tokenizer, **columns, bad_rows="skip")
    with pytest.raises(RequestError, match=r"t\.parquet is damaged"):
        source.problem(0)


def test_truncation_keeps_what_it_says_and_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = " ".join(f"lamp {i} — 灯塔 é" for i in range(60))
    ids = tokenizer.encode(text)
    file = jsonl(tmp_path, [row(0, context=text)])
    for limit in (1, 2, 40, 41, 200, len(ids) - 1):
        for truncation in ("head", "centre"):
            told: list[tuple[str, str]] = []
            cut = opened(file, tokenizer, told, truncation=truncation, document_tokens=limit).problem(0).document
            assert isinstance(cut, str) and limit - 8 <= len(tokenizer.encode(cut)) <= limit and "\ufffd" not in cut
            start = next((i for i in range(len(cut)) if cut[i] != text[i]), len(cut))
            assert text.endswith(cut[start:]) and (start == len(cut)) == (truncation == "head" or limit == 1)
            if truncation == "centre":
                assert abs(len(tokenizer.encode(cut[:start])) - len(tokenizer.encode(cut[start:]))) <= 8
            assert told == [("truncated document", f"problem 0: {len(ids):,} tokens, {truncation} cut to {limit:,}")]
    for limit in (len(ids), len(ids) + 1):
        told = []
        source = opened(file, tokenizer, told, truncation="centre", document_tokens=limit)
        assert source.problem(0).document == text and not told
    assert "first and the last half of 41" in str(DataConfig("x.jsonl", truncation="centre", document_tokens=41))


def test_files_that_cannot_serve_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no.parquet").write_text("text")
    for name, message in (
        ("empty.jsonl", "hold no usable row"),
        ("nowhere.jsonl", "there is no data file"),
        ("train.csv", "suffix '.csv'"),
        ("no.parquet", "is no parquet file"),
    ):
        with pytest.raises(RequestError, match=message):
            opened(tmp_path / name, tokenizer)
    file = jsonl(tmp_path, [row(0)])
    source = opened(file, tokenizer)
    file.write_text("{}\n")
    with pytest.raises(RequestError, match="has changed since the start"):
        source.problem(0)
    with pytest.raises(ConfigError, match="path must be"):
        DataConfig([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"names a\.jsonl twice"):
        DataConfig(("a.jsonl", "b.jsonl", "a.jsonl"))


def test_ids_are_those_of_their_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(str(jsonl(tmp_path / name, [row(0)])))
    source = FileSource(DataConfig(tuple(files)), tokenizer, lambda name, text: None)
    assert [source.problem(i).id for i in range(3)] == [f"{files[i]}: 0" for i in (0, 1, 0)]
