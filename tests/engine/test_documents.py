"""Readers of documents: the text comes out whole, in bounded pieces, and every mistake has a clear message."""

import hashlib
import io
import os
import sys
import threading
import warnings

import pytest
from palimpsest.engine.documents import PIECE_BYTES, file_sha256, open_document
from palimpsest.engine.errors import RequestError


@pytest.mark.parametrize("suffix", [".txt", ".md", ".MD"])
def test_text_is_unchanged_across_piece_borders(tmp_path, suffix):
    text = "a" + "€🙂é\r\n" * PIECE_BYTES  # characters of 2, 3 and 4 bytes straddle the borders
    path = tmp_path / f"document{suffix}"
    path.write_bytes(text.encode())
    document = open_document(path)
    pieces = list(document)
    assert "".join(pieces) == text
    assert max(len(piece) for piece in pieces) <= PIECE_BYTES
    assert document.done == document.total == len(text.encode())


def test_text_is_read_as_it_is_asked_for(tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * (3 * PIECE_BYTES))
    document = open_document(path)
    next(document)
    assert document.done == PIECE_BYTES


def test_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert "".join(open_document(path)) == "hello"


def test_empty_file(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    assert list(open_document(path)) == []


def test_broken_utf8_is_replaced_and_counted(tmp_path):
    path = tmp_path / "broken.txt"
    path.write_bytes(
        b"a\xffb\xc3(c\xe2\x82"
    )  # a stray byte, a broken pair, a cut character at the end: 1 + 1 + 2 bytes
    with pytest.warns(UserWarning, match="4 bytes are not UTF-8"):
        text = "".join(open_document(path))
    assert text == "a\ufffdb\ufffd(c\ufffd\ufffd"


def test_a_replacement_character_in_the_file_is_not_counted(tmp_path):
    path = tmp_path / "fine.txt"
    path.write_text("\ufffd", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "".join(open_document(path)) == "\ufffd"


def test_standard_input_has_no_known_size(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode())))
    document = open_document("-")
    assert document.total is None
    assert "".join(document) == "naïve"
    assert file_sha256("-") is None


def test_html_becomes_lines_of_visible_text(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<html><head><title>Ships</title><style>p{}</style></head><body><h1>Log</h1><p>The <b>big</b>\n "
        "ship &amp; crew<br>left.</p><!-- hidden --><script>track()</script><ul><li>one<li>two</ul>"
        "<pre>x\ny</pre></body></html>"
    )
    document = open_document(path)
    assert "".join(document) == "Ships\nLog\nThe big ship & crew\nleft.\none\ntwo\nx\ny"
    assert document.done == document.total


def test_html_encoding_is_taken_from_the_page(tmp_path):
    path = tmp_path / "latin.htm"
    path.write_bytes('<meta charset="iso-8859-1"><p>Größe</p>'.encode("latin-1"))
    assert "".join(open_document(path)) == "Größe"
    path.write_bytes(b"<p>caf\xe9</p>")
    with pytest.warns(UserWarning, match="some bytes are not utf-8"):
        assert "".join(open_document(path)) == "caf\ufffd"


def test_html_that_python_cannot_count_is_refused(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("&#" + "9" * 5000)
    with pytest.raises(RequestError, match="cannot be read as HTML"):
        list(open_document(path))


def _pdf_bytes(*lines):
    """A PDF with one page per line of text, written by hand."""
    count = len(lines)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(count))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, line in enumerate(lines):
        stream = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    out += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n".encode()
    return out + f"startxref\n{out.rindex(b'xref', 0, out.rindex(b'trailer'))}\n%%EOF\n".encode()


def test_pdf_is_read_page_by_page(tmp_path):
    path = tmp_path / "book.pdf"
    path.write_bytes(_pdf_bytes("First page", "Second page"))
    document = open_document(path)
    assert next(document).strip() == "First page"
    assert (document.done, document.total) == (1, 2)
    assert next(document).strip() == "Second page"


def test_pdf_pages_without_text_are_counted(tmp_path):
    path = tmp_path / "scan.pdf"
    path.write_bytes(_pdf_bytes("", "words"))
    with pytest.warns(UserWarning, match="1 of 2 pages have no text"):
        list(open_document(path))


def test_damaged_pdf(tmp_path):
    path = tmp_path / "bad.pdf"
    path.write_bytes(b"not a pdf at all")
    with pytest.raises(RequestError, match="cannot be read as PDF"):
        list(open_document(path))


def test_missing_file_directory_and_unknown_suffix(tmp_path):
    with pytest.raises(RequestError, match=r"absent\.txt: No such file"):
        open_document(tmp_path / "absent.txt")
    with pytest.raises(RequestError, match="is a directory"):
        open_document(tmp_path)
    (tmp_path / "sheet.xlsx").touch()
    with pytest.raises(RequestError, match=r"'.xlsx', known are .txt"):
        open_document(tmp_path / "sheet.xlsx")


def test_a_missing_reader_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "a.pdf").touch()
    with pytest.raises(RequestError, match="pip install pypdf"):
        open_document(tmp_path / "a.pdf")


@pytest.mark.parametrize("path", [None, 3, b"a.txt", "a\0.txt"])
def test_what_is_no_path_is_refused(path):
    for read in (open_document, file_sha256):
        with pytest.raises(RequestError, match="a document is opened by a path"):
            read(path)


def test_a_pipe_has_no_size_and_no_hash(tmp_path):
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    with pytest.raises(RequestError, match=r"pipe\.txt is no regular file"):
        file_sha256(path)
    writer = threading.Thread(target=path.write_text, args=("once",))
    writer.start()
    document = open_document(path)
    assert document.total is None
    assert "".join(document) == "once"
    writer.join()


def test_sha256_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xffabc")
    assert file_sha256(tmp_path / "a.txt") == hashlib.sha256(b"\xffabc").hexdigest()
    with pytest.raises(RequestError, match="No such file"):
        file_sha256(tmp_path / "b.txt")
