"""Sections: files of nested keys (TOML, JSON, YAML) as one flat mapping, and with other values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from hocket.spec.errors import OptionError

Flat = dict[str, Any]
"""Keys of all levels joined by dots."""


def load_sections(text: str, kind: str) -> Flat:
    """A `toml`, `json` or `yaml` file.

    Raises:
        OptionError: text that is not of that kind, is nested too deeply, or (YAML) has aliases.
    """
    try:
        parse: Callable[[str], Any]
        parse = {"toml": tomllib.loads, "json": json.loads, "yaml": _yaml}[kind]  # type: ignore[assignment]
        found = parse(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the file is not {kind.upper()}: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise OptionError(f"the file holds a {type(found).__name__}, not keys with values")
    return _flat(found, "", 0)


def _yaml(text: str) -> Any:
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases (*name), which can stand for any amount of text")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _flat(values: Mapping[Any, Any], prefix: str, depth: int) -> Flat:
    if depth > 8:
        raise OptionError("the file is nested more than 8 levels deep")
    found: Flat = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flat(value, f"{name}.", depth + 1)
        else:
            found[name] = value
    return found


def edit_sections(text: str, kind: str, changes: Flat) -> str:
    """The text with other values; None takes a key out."""
    if kind == "json":
        return _edit_json(text, changes)
    has = load_sections(text, kind)
    for name, value in changes.items():
        if value is None or repr(has.get(name)) != repr(value):  # else it stays as spelled
            text = _edit_line(text, kind, name, value)
    return text


def _edit_json(text: str, changes: Flat) -> str:
    found = json.loads(text)
    for name, value in changes.items():
        *path, key = name.split(".")
        into = found
        for part in path:
            if not isinstance(into.get(part), dict):  # a value where the tool has a section
                into[part] = {}
            into = into[part]
        if value is None:
            into.pop(key, None)
        else:
            into[key] = value
    indent = re.search(r"\n( +)\"", text)
    written = json.dumps(found, indent=len(indent[1]) if indent else None)
    return written + ("\n" if text.endswith("\n") else "")


def _edit_line(text: str, kind: str, name: str, value: Any) -> str:
    section, _, key = name.rpartition(".")
    lines = text.split("\n")
    first, last, indent = _range(lines, kind, section)
    sign, literal = (" = ", json.dumps(value)) if kind == "toml" else (": ", _scalar(value))
    pattern = re.compile(rf"\s*{re.escape(key)}\s*{sign.strip()}")
    for i in range(first, last):
        if pattern.match(lines[i]):
            end = i + 1
            while kind == "toml" and end < last and not _closed("\n".join(lines[i:end])):
                end += 1
            if value is None:
                del lines[i:end]
                if (
                    kind == "yaml"
                    and section
                    and not "".join(lines[first : last - end + i]).strip()
                ):
                    del lines[first - 1]  # nothing is left in the section
            else:
                comment = re.search(r"\s+#[^\"']*$", lines[end - 1])
                head = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
                lines[i:end] = [f"{head}{key}{sign}{literal}{comment[0] if comment else ''}"]
            return "\n".join(lines)
    if value is None:
        return text
    if first < 0 and kind == "yaml" and "." in section:
        outer, _, inner = section.rpartition(".")
        start, stop, deep = _range(lines, kind, outer)
        if start >= 0:  # a section inside one that there is
            while stop > start and not lines[stop - 1].strip():
                stop -= 1
            lines[stop:stop] = [f"{deep}{inner}:", f"{deep}  {key}{sign}{literal}"]
            return "\n".join(lines)
    if first < 0:  # there is no such section
        head = f"[{section}]" if kind == "toml" else f"{section}:"
        while lines and not lines[-1].strip():
            lines.pop()
        return "\n".join([*lines, *([""] if kind == "toml" else []), head,
                          f"{indent}{key}{sign}{literal}", ""])  # fmt: skip
    while last > first and not lines[last - 1].strip():
        last -= 1
    lines.insert(last, f"{indent}{key}{sign}{literal}")
    return "\n".join(lines)


def _closed(text: str) -> bool:
    return text.count("[") <= text.count("]")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'no'" if value == "no" else str(value)


def _range(lines: list[str], kind: str, section: str) -> tuple[int, int, str]:
    """First and last line (excluded) of a section's keys, and their indent; first -1: none."""
    if kind == "toml":
        heads = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
        heads = [i for i in heads if re.match(r"\s*\[[\w.\"-]+\]\s*(#.*)?$", lines[i])]
        for place, i in enumerate(heads):
            if re.match(rf"\s*\[{re.escape(section)}\]", lines[i]):
                return i + 1, heads[place + 1] if place + 1 < len(heads) else len(lines), ""
        return -1, -1, ""
    if not section:
        return 0, len(lines), ""
    outer, _, inner = section.rpartition(".")
    start, stop, indent = _range(lines, kind, outer)
    for i in range(max(start, 0), stop):
        if re.match(rf"{indent}{re.escape(inner)}\s*:\s*(#.*)?$", lines[i]):
            end = i + 1
            deeper = re.compile(rf"{indent}\s|\s*$")
            while end < stop and deeper.match(lines[end]):
                end += 1
            own = next((line for line in lines[i + 1 : end] if line.strip()), f"{indent}  ")
            return i + 1, end, own[: len(own) - len(own.lstrip())]
    return -1, -1, "  "
