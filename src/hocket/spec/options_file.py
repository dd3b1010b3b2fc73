"""The text of a `--config` file: options by name, as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def toml(values: Mapping[str, Any]) -> str:
    """Options as TOML, one a line; those that are None are left out."""
    return "".join(
        f"{name} = {_value(value)}\n" for name, value in values.items() if value is not None
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)  # a TOML basic string, but for DEL
    raise TypeError(f"{value!r} has no form in an options file")
