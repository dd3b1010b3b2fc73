"""Words: the flags of a command line or a launch script, as text; the script is never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from hocket.spec.errors import OptionError

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([\"']?)([\w./:+*|,-]*)\2\s*(?:#.*)?$", re.M
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


def variables(text: str) -> dict[str, str]:
    """Variables that a script sets to plain words."""
    return {name: value for name, _, value in _ASSIGNED.findall(text)}


LISTS = ("--recompute-modules",)
"""Flags that take several words."""

_SWITCH = re.compile(
    r"--(enable|disable|no|use)-|(--trust-remote-code|--headless|--enforce-eager|-ep)$"
)
"""Flags without a value, or with one of `_TRUTH`: another word behind one is not its value."""
_TRUTH = "true|false|0|1"


def words_and_flags(text: str) -> tuple[list[str], dict[str, str | None]]:
    """Words that are no flags' values, in order, and flags with their values.

    A flag without a value has None. Of a flag that is given twice the last one counts.

    Raises:
        OptionError: quotes that are not closed.
    """
    known = variables(text)
    plain = re.sub(r"(^|\s)#.*", r"\1", text.replace("\\\n", " "))
    plain = _USED.sub(lambda match: known.get(match[1], match[0]), plain)
    try:
        words = shlex.split(re.sub(r"[()]", " ", plain))
    except ValueError as error:
        raise OptionError(f"the command cannot be read: {error}") from None
    others: list[str] = []
    found: dict[str, str | None] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            found[name] = value if equals else None
            if equals:
                name = ""
        elif _SWITCH.match(name) and not re.fullmatch(_TRUTH, word, re.IGNORECASE):
            name = ""
            others.append(word)
        elif name and found[name] is None:
            found[name] = word
            name = name if name in LISTS else ""
        elif name:
            found[name] = f"{found[name]} {word}"
        else:
            others.append(word)
    return others, found


def edit_flags(text: str, changes: Mapping[str, Any]) -> str:
    """The text with other values of flags: True is a flag alone, None or False takes it out."""
    last = 0
    for name, value in changes.items():
        present = value is not None and value is not False
        written = f"{name}" if value is True else f"{name} {value}"
        times = "*" if name in LISTS else "?"
        own = rf"(?i:{_TRUTH})(?!\S)" if _SWITCH.match(name) else r"(?:'[^']*'|[^\s\\)]+)"
        pattern = re.compile(rf"{re.escape(name)}(?![\w-])(?:[= ]+(?!--){own}){times}")
        match = next((m for m in pattern.finditer(text) if not _comment(text, m.start())), None)
        if match is not None:
            if present:
                text = text[: match.start()] + written + text[match.end() :]
                last = match.start() + len(written)
            else:
                text = _without(text, match.start(), match.end())
        elif present:
            if not last:
                word = re.search(r"\s+activation-checkpoint:", text)  # torchtitan's last word
                last = word.start() if word else len(text.rstrip().rstrip("\\").rstrip())
            text = f"{text[:last]} \\\n  {written}{text[last:]}"
            last += len(written) + 5
    return text


def _comment(text: str, place: int) -> bool:
    """Whether a place is behind the `#` of its line."""
    return bool(re.search(r"(^|\s)#", text[text.rfind("\n", 0, place) + 1 : place]))


def _without(text: str, start: int, end: int) -> str:
    """The text without a part, and without its line where nothing else is on it."""
    first = text.rfind("\n", 0, start) + 1
    stop = text.find("\n", end)
    stop = len(text) if stop < 0 else stop
    if text[first:start].strip() or text[end:stop].strip(" \\"):
        return text[:start].rstrip(" ") + text[end:]
    if text[end:stop].strip() == "" and first:  # the last line of a command: it ends one earlier
        return text[: first - 1].rstrip().rstrip("\\").rstrip() + text[stop:]
    return text[:first] + text[stop + 1 :]
