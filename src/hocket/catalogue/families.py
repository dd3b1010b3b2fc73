"""Families: under which axes each model type of transformers trains and serves, as it was checked.

`docs/reference/write_families.py` writes the data from the rows of `hocket check --matrix`: a tiny
model of each type, compared with one process at every kind of layout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilySupport:
    """What works for one model type.

    Attributes:
        trains: of dp, pp, tp, zero, sequence: those under which every layout tried was equal.
        why: the reason of a layout that is rejected; empty where all are equal.
        serves: of dp, tp, pp, cp, ep. why_served: as `why`.
    """

    trains: tuple[str, ...]
    why: str
    serves: tuple[str, ...]
    why_served: str


@functools.cache
def families() -> dict[str, FamilySupport]:
    """Every type that was checked."""
    text = resources.files("hocket.catalogue").joinpath("data", "families.json").read_text("utf-8")
    return {
        kind: FamilySupport(
            trains=tuple(one["trains"]),
            why=one["why"],
            serves=tuple(one.get("serves", ())),
            why_served=one.get("why_served", ""),
        )
        for kind, one in json.loads(text).items()
    }
