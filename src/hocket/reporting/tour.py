"""A tour's stops as text for a terminal and as Markdown for a page, in one of two languages."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from hocket.reporting.table import text_width
from hocket.spec.errors import OptionError, unknown
from hocket.spec.tour import LANGUAGES, Stop
from hocket.spec.units import format_seconds

_PARTS = ("predicted", "measured")


@functools.cache
def tour_words(language: str) -> dict[str, Any]:
    """The sentences of a language. Raises OptionError for one that is not there."""
    if language not in LANGUAGES:
        message, hint = unknown("language", language, LANGUAGES)
        raise OptionError(message, hint=hint)
    file = resources.files("hocket.reporting") / "words" / f"tour.{language}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def stop_text(stop: Stop, number: int, language: str = "en", width: int = 100) -> str:
    said = tour_words(language)
    page = said["page"]
    mine = _filled(stop, language)
    lines = [f"{number}. {mine['title']}", "", *_wrapped(mine["claim"], width, "   ")]
    label = max(text_width(page[part]) for part in (*_PARTS, "try", "verdict"))
    lines.append("")
    for part in _PARTS:
        lines += _labelled(page[part], mine[part], label, width)
    picture = _picture(stop, page)
    if picture:
        lines += ["", *(f"   {line}".rstrip() for line in picture.splitlines()), ""]
    lines += _labelled(page["verdict"], _verdict(stop, mine, said), label, width)
    lines += _labelled(page["try"], stop.command, label, max(width, len(stop.command) + label + 6))
    return "\n".join(lines)


def page_markdown(stops: Sequence[Stop], cores: int, language: str = "en") -> str:
    said = tour_words(language)
    page = said["page"]
    parts = [f"# {page['title']}", page["intro"].strip().format(cores=cores)]
    for number, stop in enumerate(stops, 1):
        mine = _filled(stop, language)
        parts.append(f"## {number}. {mine['title']}")
        parts.append("\n".join(f"> {line}" for line in mine["claim"].splitlines()))
        rows = [f"- **{page[part]}**: {mine[part]}" for part in _PARTS]
        parts.append("\n".join(rows))
        picture = _picture(stop, page)
        if picture:
            parts.append(f"```text\n{picture}\n```")
        parts.append(f"**{page['verdict']}**: {_verdict(stop, mine, said)}")
        parts.append(f"{page['try']}: `{stop.command}`")
    parts.append(footer(stops, language))
    return "\n\n".join(parts) + "\n"


def footer(stops: Sequence[Stop], language: str = "en") -> str:
    """How many stops there were and how long they took."""
    seconds = format_seconds(sum(stop.seconds for stop in stops))
    line: str = tour_words(language)["page"]["footer"]
    return line.format(count=len(stops), seconds=seconds)


def _picture(stop: Stop, page: dict[str, str], width: int = 40) -> str:
    """A stop's bars, or its drawing. Labels may hold {predicted} and {measured}."""
    names = [name.format(**page) for name, _, _ in stop.bars]
    room = max((text_width(name) for name in names), default=0)
    rows = [
        f"{' ' * (room - text_width(name))}{name}  {'█' * max(0, round(width * share))} {label}"
        for name, (_, share, label) in zip(names, stop.bars, strict=True)
    ]
    return "\n".join(row.rstrip() for row in rows) or stop.drawing


def _filled(stop: Stop, language: str) -> dict[str, str]:
    """A stop's sentences with its values in their places."""
    said = tour_words(language)["stops"][stop.key]
    return {
        name: sentence.strip() if name == "claim" else sentence.strip().format(**stop.values)
        for name, sentence in said.items()
    }


def _verdict(stop: Stop, mine: dict[str, str], said: dict[str, Any]) -> str:
    verdict: str = said["verdicts"][stop.verdict]
    if "provided" not in mine:
        return f"{verdict}. {mine['because']}"
    condition = f"{said['verdicts']['true_if']}: {mine['provided']}"
    return condition if stop.verdict == "true_if" else f"{verdict}; {condition}"


def _labelled(label: str, text: str, room: int, width: int) -> list[str]:
    first = f"   {label}{' ' * (room - text_width(label))}  "
    rest = " " * (room + 5)
    lines = _wrapped(text, width, rest)
    return [first + lines[0].strip(), *lines[1:]]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most `width` columns; an ideograph or a Hangul syllable takes two."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if line and text_width(indent + longer) > width:
            lines.append(line)
            longer = word
        line = longer
    return [indent + each for each in (*lines, line)]
