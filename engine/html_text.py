"""The visible text of an HTML page, in one linear walk over its markup, however broken that is."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape

__all__ = ["page_encoding", "visible_lines"]

# Tags that end a line of text; all others stand within one.
BLOCKS = re.compile(
    "(address|article|aside|blockquote|br|d[dlt]|div|fig(ure|caption)|footer|form|h[1-6]|header|hr|li|main|nav|ol|p|pre|"
    "section|table|td|th|title|tr|ul)"
)
INVISIBLE = ("template", "noscript")

# Each alternative ends at the end of the page if its own end is missing, and nothing backtracks: a page of n characters
# takes n steps. The standard library's parser starts again at every such place (200 kB of "<!--" take half a minute).
_ATTRIBUTES = r"""(?:[^>=]++|=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z))?+)*+(?:>|\Z)"""
MARKUP = re.compile(
    rf"""
      <!--(?:-?>|.*?(?:--!?>|\Z))                                                             # a comment
    | <(?P<code>script|style)(?=[\s/>]){_ATTRIBUTES}.*?(?:</(?P=code)(?=[\s/>])[^>]*+(?:>|\Z)|\Z)
    | <(?P<slash>/?)(?P<tag>[a-z][^\s/>]*+){_ATTRIBUTES}
    | <[!?/][^>]*+(?:>|\Z)                              # doctype, processing instruction, CDATA: comments in HTML
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)

BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def visible_lines(page: str) -> Iterator[str]:
    """The text that a browser shows, a line for each block, none empty; white space collapsed but in <pre>."""
    line: list[str] = []
    hidden = preformatted = 0
    for text, tag, step in _pieces(page):
        if not hidden:
            line.append(text)
            if BLOCKS.fullmatch(tag):
                yield from _ended("".join(line), preformatted > 0)
                line.clear()
        if tag == "pre":
            preformatted = max(0, preformatted + step)
        elif tag in INVISIBLE:
            hidden = max(0, hidden + step)
    yield from _ended("".join(line), preformatted > 0)


def page_encoding(data: bytes) -> str:
    """Python's name of a page's encoding: by byte order mark or <meta charset>, else UTF-8 (WHATWG, HTML 13.2.3)."""
    for mark, name in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return name
    found = re.search(rb"<meta\b[^>]*?\bcharset\s*=\s*[\"']?\s*([\w.:-]+)", data[:1024], re.IGNORECASE)
    try:
        name = codecs.lookup(found[1].decode("ascii")).name if found else "utf-8"
        b"\xff".decode(name, "replace")  # some codecs are not for text, or know no replacement
    except (LookupError, UnicodeError):
        return "utf-8"
    if name.startswith(("utf-16", "utf-32")):  # then the name itself could not have been read
        return "utf-8"
    return "cp1252" if name in ("ascii", "iso8859-1") else name


def _pieces(page: str) -> Iterator[tuple[str, str, int]]:
    """Each stretch of text, the name of the tag that follows it ("" for other markup and at the end), and +1 if that
    opens, -1 if it closes."""
    start = 0
    for markup in MARKUP.finditer(page):
        yield unescape(page[start : markup.start()]), (markup["tag"] or "").lower(), -1 if markup["slash"] else 1
        start = markup.end()
    yield unescape(page[start:]), "", 1


def _ended(text: str, preformatted: bool) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")] if preformatted else [" ".join(text.split())]
    return [line for line in lines if line]
