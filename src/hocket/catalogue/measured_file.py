"""The measured part of a machine's TOML: sections that a person can read, rows beneath headings.

[measured]                      what, when, with what
[measured.host]                 the machine
products = [                    a row each; the comment above says what stands where
[[measured.devices]]            one table each
[[measured.curves]]             one table each; sizes and seconds are lists
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hocket.spec.measured import MachineMeasurements, fields_of

_WORDS = {
    "pairs": "what joins two devices; rates in bytes/s each way, latencies in seconds",
    "products": "matmuls, one thread: result [m, n], summed over k, in seconds",
    "streams": "memory: bytes read and written in one call, and its seconds",
    "dispatch": "what a small operation costs whatever its size, in seconds",
    "kernels": "other operations by shape, seconds forward and backward",
    "updates": "one step of an optimizer over so many elements in so many tensors",
    "sharing": "times longer than alone, where so many ranks compute at once",
}
_TABLES = ("devices", "curves")


def measured_toml(measured: MachineMeasurements) -> str:
    """The `[measured]` part, of which `MachineMeasurements.from_dict` makes an equal one again."""
    data = measured.to_dict()
    lines = ["[measured]"]
    lines += [f"{k} = {_value(v)}" for k, v in data.items() if _plain(k, v)]
    for key, what in _WORDS.items():
        if data[key]:
            lines += ["", f"# {what}", f"# {', '.join(fields_of(key))}", f"{key} = ["]
            lines += [f"    {_value(row)}," for row in data[key]]
            lines.append("]")
    lines += ["", "[measured.host]", *_table(data["host"])]
    for key in _TABLES:
        for table in data[key]:
            lines += ["", f"[[measured.{key}]]", *_table(table)]
    return "\n".join([*lines, ""])


def _plain(key: str, value: Any) -> bool:
    """Whether it stands at the head: a figure or sentences, no rows and no table."""
    return key not in (*_WORDS, *_TABLES) and not isinstance(value, Mapping)


def _table(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_value(one) for one in value)}]"
    if isinstance(value, str):
        # JSON's text is TOML's, but for DEL, which TOML wants written out.
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)
