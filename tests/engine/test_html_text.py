"""The text of HTML pages: what a browser shows, in time that grows with the page however broken it is."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from palimpsest.engine.html_text import page_encoding, visible_lines


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("<p>The <b>big</b>\n ship &amp;&nbsp;crew<br>left.", ["The big ship & crew", "left."]),
        ("<ul><li>one<li>two</ul>after", ["one", "two", "after"]),
        ("a<b> b </b> c<br/>d", ["a b c", "d"]),
        ("<P>x</P><PRE>  a\n\n  b </PRE>c  d", ["x", "  a", "  b", "c d"]),
        ("<pre>a\nb</pre></pre>c\nd", ["a", "b", "c d"]),
        ("a<template>b<p>c</template>d</template>e", ["ade"]),
        ("<p>a<noscript>b<br>never closed", ["a"]),
        ("x<script>if (a<b) '<p>'</script >y<style>p{}</style>z", ["xyz"]),
        ("x<scripted>y</scripted>z", ["xyz"]),
        ("a<!-- <p>b --!>c<!-->d<!--->e<!-- never closed <p>f", ["acde"]),
        ("<!doctype html><?php x ?><![CDATA[y]]><![x <p>z", ["z"]),
        ("<img alt='a > b' title=\"<p>\">seen<p class=x'y>too", ["seen", "too"]),
        ("1 < 2 and 3 > 2 <3", ["1 < 2 and 3 > 2 <3"]),
        ("", []),
    ],
)
def test_visible_lines(page, lines):
    assert list(visible_lines(page)) == lines


OPEN_TAGS = ["<p>hi ", "<pre>x\n", "<script>", "<template>", "<div>"]
UNFINISHED = [
    "<!--",
    "<![x ",
    "<a ",
    '<a b="',
    "<a b='<",
    "<a =",
    "= '<a b=",
    "</",
    "</p ",
    "<script></script",
    "<?",
    "&#",
]


@pytest.mark.parametrize("unit", [*OPEN_TAGS, *UNFINISHED])
def test_a_megabyte_of_anything_takes_seconds(unit):
    page = unit * (1_000_000 // len(unit))
    started = time.process_time()
    for _ in visible_lines(page):
        pass
    assert time.process_time() - started < 10  # about 1 s; a walk that starts again at each unit takes minutes


@given(st.text(st.sampled_from("<>!-/=\"' \nap&;#x1") | st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_page_can_be_read(page):
    for line in visible_lines(page):
        assert line.strip() and "\n" not in line


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"<p>x", "utf-8"),
        (b"\xef\xbb\xbfx<meta charset=latin-1>", "utf-8-sig"),
        (b"\xff\xfex\0", "utf-16"),
        (b'<meta charset="ISO-8859-1">', "cp1252"),
        (b"<META http-equiv=Content-Type content='text/html; charset=windows-1251'>", "cp1251"),
        (b"<meta charset=shift_jis>", "shift_jis"),
        (b"<meta charset=utf-16>", "utf-8"),
        (b"<meta charset=none-such>", "utf-8"),
        (b"<meta charset=hex>", "utf-8"),
        (b"<meta charset=idna>", "utf-8"),
        (b"<p>" * 400 + b"<meta charset=latin-1>", "utf-8"),
    ],
)
def test_page_encoding(data, encoding):
    assert page_encoding(data) == encoding
