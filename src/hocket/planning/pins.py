"""Pins: what a user holds fixed of the layouts that are searched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.cost.layout_batch import NAMES
from hocket.spec.errors import OptionError, unknown
from hocket.spec.layout import Layout

Pins = Mapping[str, Any]

PINS = (
    "dp", "pp", "cp", "tp", "ep", "etp", "virtual_stages", "microbatch", "microbatches",
    "schedule", "zero", "shard", "recompute", "sequence_parallel", "offload",
)  # fmt: skip
"""What can be pinned. `microbatch` is the sequences of one; the others are fields of a layout."""

COUNTS = (
    "dp",
    "pp",
    "cp",
    "tp",
    "ep",
    "etp",
    "virtual_stages",
    "microbatch",
    "microbatches",
    "shard",
)


def layout_pins(texts: Sequence[str]) -> dict[str, Any]:
    """Pins from `tp=8`, `recompute=full`, `shard=8`.

    Raises:
        OptionError: no such axis (with the nearest), or a value that it cannot have.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise OptionError(f"--pin {text!r} has no value", hint="--pin tp=8")
        if key not in PINS:
            message, hint = unknown("axis", key, PINS)
            raise OptionError(f"--pin: {message}", hint=hint)
        if key in COUNTS and not re.fullmatch(r"0{0,9}[1-9][0-9]{0,17}", value.strip()):
            raise OptionError(
                f"--pin {text!r} is not a whole number of at least 1", hint=f"--pin {key}=1"
            )
        if key in ("microbatch", "etp"):
            found[key] = int(value)
            continue
        # Read, and judged, as a layout's field, with the fields it needs.
        required = {
            "ep": {"cp": value.strip()},
            "shard": {"dp": value.strip(), "zero": "1"},
            "offload": {"zero": "3"},
        }
        fields = {key: value.strip(), **required.get(key, {})}
        again = getattr(Layout.parse("tp1" if "dp" in fields else "dp1", **fields), key)
        if found.get(key, again) != again:
            raise OptionError(f"--pin gives {key} twice: {found[key]} and {again}")
        found[key] = again
        if key == "schedule" and found[key] not in NAMES:
            message, hint = unknown("schedule", str(found[key]), NAMES)
            raise OptionError(f"--pin: {message}", hint=hint)
    return found


def pins_text(pins: Pins | None) -> str:
    """As they are written: `tp=8, sequence_parallel=true`."""
    return ", ".join(f"{k}={str(v).lower()}" for k, v in (pins or {}).items())
