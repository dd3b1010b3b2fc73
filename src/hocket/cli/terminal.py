"""What stdout can show."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 100
"""Columns where there is no terminal to ask."""


def terminal() -> tuple[bool, int]:
    """(whether colours help, columns) of stdout."""
    if not sys.stdout.isatty():
        return False, WIDTH
    color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return color, shutil.get_terminal_size((WIDTH, 24)).columns


def show_text(text: str, end: str = "\n", most: int | None = None) -> None:
    """Print words and tables, in a terminal within its columns, elsewhere within `most`."""
    width = terminal()[1] if sys.stdout.isatty() else most
    print(text if width is None else fit_width(text, width), end=end, flush=True)


_RULE = re.compile(r" *-+(  -+)+ *")
_BREAK = re.compile(r"( +|(?<=[,;])(?=[a-z]))")
_COMMAND = re.compile(r"\s*(next: |hint: |hocket |curl )")


def fit_width(text: str, width: int) -> str:
    """The text with no line longer than `width`, but for commands and pictures: sentences are
    wrapped, and the columns of a table that do not fit follow below under its first column."""
    lines, found = text.split("\n"), list[str]()
    while lines:
        if len(lines) > 1 and _RULE.fullmatch(lines[1]):
            spans = [match.span() for match in re.finditer("-+", lines[1])]
            count = next(n for n in itertools.count(2) if not _row(lines, n, spans))
            table, lines = lines[:count], lines[count:]
            found += table if max(map(len, table)) <= width else _folded(table, spans, width)
        else:
            found += _wrapped(lines.pop(0), width)
    return "\n".join(found)


def _row(lines: Sequence[str], number: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a line is of the table: blank between columns, or the label of an indented row."""
    line, below = [*lines[number:], "", ""][:2]
    if spans[0][0] and line[:1] not in ("", " "):
        line = below if below.startswith(" " * spans[0][0]) else ""
    return bool(line) and not any(line[a[1] : b[0]].strip() for a, b in itertools.pairwise(spans))


def _folded(table: Sequence[str], spans: Sequence[tuple[int, int]], width: int) -> Iterator[str]:
    """The table in blocks of as many columns as fit, each with the labels of its rows."""
    if spans[0][0] == 0 and spans[0][1] > width // 2:  # long labels get lines of their own
        cut = spans[1][0]
        heads = [line[:cut].rstrip() if number > 1 else "" for number, line in enumerate(table)]
        both = zip(heads, table, strict=True)
        table = [text for head, line in both for text in (head, "    " + line[cut:]) if text]
        spans = [(start - cut + 4, end - cut + 4) for start, end in spans[1:]]
    indent = " " * spans[0][0]  # of rows whose labels are lines of their own
    named = int(not indent)  # leading columns: as many as tell rows apart
    while named and len({line[: spans[named][0]] for line in table}) < len(table):
        if spans[named][1] > 2 * width // 3 or named == len(spans) - 1:
            break
        named += 1
    first, rest = [*spans[:named]], [*spans[named:]]
    while rest:
        block = [*first, rest.pop(0)]
        while rest and rest[0][1] - rest[0][0] + _columns(indent, block) <= width:
            block.append(rest.pop(0))
        before = _columns(indent, block[:-1])
        room = max(12, width - before)
        for number, line in enumerate(table):
            if indent and line[:1] != " ":
                yield from _wrapped(line, width, label=True)
                continue
            *cells, last = (line[start:end].ljust(end - start) for start, end in block)
            head = indent + "".join(cell + "  " for cell in cells)
            for part in [last[:room]] if number == 1 else textwrap.wrap(last, room) or [""]:
                yield (head + part).rstrip()
                head = " " * before
        if rest:
            yield ""


def _columns(indent: str, block: Sequence[tuple[int, int]]) -> int:
    """Where a column behind these begins."""
    return len(indent) + sum(end - start + 2 for start, end in block)


def _wrapped(line: str, width: int, label: bool = False) -> list[str]:
    """A sentence in lines of at most `width` columns (100 are enough), also cut at the commas of a
    layout; commands, what is aligned, and pictures stay whole."""
    width = min(width, WIDTH)
    whole = _COMMAND.match(line) or ("  " in line.strip() and not label) or not line.isascii()
    if len(line) <= width or whole:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()) + 2)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=margin, break_long_words=False)
    wrapper.wordsep_re = _BREAK  # type: ignore[misc]
    return wrapper.wrap(line)


def draws() -> bool:
    """Whether stdout's encoding can show the letters that pictures are made of."""
    try:
        "░█·▁".encode(_encoding())
    except UnicodeEncodeError:
        return False
    return True


def printable(words: str) -> str:
    """The words as stdout can show them: what its encoding lacks is written out."""
    encoding = _encoding()
    return words.encode(encoding, "backslashreplace").decode(encoding)


def _encoding() -> str:
    return sys.stdout.encoding or "ascii"
