"""Documents as streams of text: txt, md, html, pdf and standard input."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from .errors import RequestError
from .html_text import page_encoding, visible_lines

__all__ = ["STDIN", "Document", "file_sha256", "open_document"]

STDIN = "-"
PIECE_BYTES = 1 << 13
TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown")
HTML_SUFFIXES = (".html", ".htm")
PDF_SUFFIX = ".pdf"


class Document(Iterator[str]):
    """A document's text in pieces, read as they are asked for.

    total: size of the whole in a unit of its own (bytes, characters or pages), None where it is unknown.
    done: the part of it that has been handed out.
    """

    def __init__(self, name: str, total: int | None, read: Callable[[Document], Iterator[str]]) -> None:
        """read: makes the iterator of pieces; it keeps `total` and `done` up to date."""
        self.name = name
        self.total = total
        self.done = 0
        self._pieces = read(self)

    def __next__(self) -> str:
        return next(self._pieces)


def open_document(path: str | Path) -> Document:
    """Open a file, or standard input as "-", to be read as text in pieces.

    Text (UTF-8) is read piece by piece, PDF page by page, HTML whole; standard input is taken as text. Bytes that
    are not UTF-8 become U+FFFD, with a warning that counts them. Raises RequestError for what is no path, for a file
    that is missing, unreadable or of another kind, and for a reader that is not installed.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise RequestError("standard input is closed; name a file, or pipe the text in")
        return Document("standard input", None, partial(_text, sys.stdin.buffer))
    path = _path(path)
    status = _status(path)
    read = _reader(path)
    with _reading(path):
        file = path.open("rb")
    return Document(str(path), status.st_size if stat.S_ISREG(status.st_mode) else None, partial(read, file))


def file_sha256(path: str | Path) -> str | None:
    """SHA-256 of a document's file in hexadecimal, None for standard input.

    Raises RequestError if it is unreadable, or no regular file: what a pipe gives it gives once.
    """
    if str(path) == STDIN:
        return None
    path = _path(path)
    if not stat.S_ISREG(_status(path).st_mode):
        raise RequestError(f"{path} is no regular file, and a trace knows a document by its bytes; copy it into a file")
    with _reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _path(path: object) -> Path:
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise RequestError(f"a document is opened by a path, a str or Path without NUL characters; got {path!r}")
    return Path(path)


def _status(path: Path) -> os.stat_result:
    with _reading(path):
        return path.stat()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"cannot read the document {path}: {error.strerror}") from error


def _reader(path: Path) -> Callable[[BinaryIO, Document], Iterator[str]]:
    suffix = path.suffix.lower()
    if path.is_dir():
        raise RequestError(f"{path} is a directory; give a file")
    if suffix in TEXT_SUFFIXES:
        return _text
    if suffix in HTML_SUFFIXES:
        return _html
    if suffix == PDF_SUFFIX:
        _require("pypdf", "pypdf", path)
        return _pdf
    known = ", ".join((*TEXT_SUFFIXES, *HTML_SUFFIXES, PDF_SUFFIX))
    raise RequestError(
        f"{path} has the suffix {suffix or '(none)'!r}, known are {known}; plain text can come as - from stdin"
    )


def _require(module: str, package: str, path: Path) -> None:
    try:
        __import__(module)
    except ImportError as error:
        raise RequestError(f"reading {path} needs {package}: pip install {package}") from error


def _text(file: BinaryIO, document: Document) -> Iterator[str]:
    """UTF-8 with or without a byte order mark, decoded piece by piece."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    broken = 0
    with file:
        data = b"not read yet"
        while data:
            data = file.read(PIECE_BYTES)
            document.done += len(data)
            # `surrogateescape` turns each broken byte into one of these, so that they can be counted
            text, count = re.subn("[\udc80-\udcff]", "\ufffd", decoder.decode(data, final=not data))
            broken += count
            if text:
                yield text
    if broken:
        warnings.warn(f"{document.name}: {broken} bytes are not UTF-8 and were replaced by U+FFFD", stacklevel=2)


def _html(file: BinaryIO, document: Document) -> Iterator[str]:
    with file:
        data = file.read()
    encoding = page_encoding(data)
    try:
        page = data.decode(encoding)
    except UnicodeError:
        warnings.warn(f"{document.name}: some bytes are not {encoding} and were replaced by U+FFFD", stacklevel=2)
        page = data.decode(encoding, "replace")
    try:
        text = "\n".join(visible_lines(page))
    except ValueError as error:  # a character reference of thousands of digits
        raise RequestError(f"{document.name} cannot be read as HTML: {error}") from error
    document.total = len(text)
    for start in range(0, len(text), PIECE_BYTES):
        piece = text[start : start + PIECE_BYTES]
        document.done += len(piece)
        yield piece


def _pdf(file: BinaryIO, document: Document) -> Iterator[str]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    empty = 0
    with file:
        try:
            reader = PdfReader(file)
            document.total = len(reader.pages)
            for page in reader.pages:
                text = page.extract_text()
                empty += not text.strip()
                document.done += 1
                yield re.sub("[\ud800-\udfff]", "\ufffd", text) + "\n\n"  # some fonts map glyphs to half a character
        except (DependencyError, PyPdfError) as error:
            raise RequestError(f"{document.name} cannot be read as PDF: {error}") from error
    if empty:
        warnings.warn(
            f"{document.name}: {empty} of {document.total} pages have no text (scans are not read)", stacklevel=2
        )
