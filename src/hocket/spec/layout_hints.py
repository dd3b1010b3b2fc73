"""Misspelled layouts: what was meant, as a flag to paste."""

from __future__ import annotations

import re
from collections.abc import Collection

EXAMPLES = {"schedule": "1f1b", "recompute": "full", "sequence_parallel": "true"}


def meant_layout(text: str, terms: Collection[str], names: Collection[str]) -> str | None:
    """The flag for a text in which axes have `=` or a comma, fields are before the colon, or the
    degree of data parallelism is alone; None where it cannot be read so.

    `terms`: the axes. `names`: the fields of a layout.
    """
    axes, _, options = text.strip().partition(":")
    axes = f"dp{axes}" if axes.isdecimal() else axes
    words = re.findall(r"[^.,\s]+", axes)
    read = [re.fullmatch(r"([a-z_]+?)=?([0-9]+|(?<==)[a-z0-9-]+)", word) for word in words]
    pairs = [found.groups() for found in read if found is not None]
    split = [f"{name}{value}" for name, value in pairs if name in terms and value.isdecimal()]
    fields = [f"{name}={value}" for name, value in pairs if name in names and name not in terms]
    if not words or len(split) + len(fields) < len(words):
        return None
    fields += [options] if options else []
    return f"--layout {'.'.join(split) or 'dp1'}" + (":" + ",".join(fields) if fields else "")
