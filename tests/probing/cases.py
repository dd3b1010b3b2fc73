"""What ranks do in the tests of the probe: the real one, with few and small sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.launch import RankContext
from hocket.probing.rank import Probe
from hocket.probing.sizes import QUICK

SMALL = dataclasses.replace(
    QUICK,
    tokens=(16,),
    weights=((32, 16),),
    streams=(2**14,),
    heads=((1, 2, 16, 8),),
    widths=((16, 32),),
    layers=((16, 16),),
    vocabularies=((16, 64, 8),),
    rows=(1, 4),
    matrices=((32, 16, 2),),
    half_rows=(1, 4),
    halves=((32, 16, 2),),
    decoding=((2, 2, 1, 20, 8, 2),),
    chunks=((2, 1, 16, 8),),
    updates=((2**10, 2),),
    messages=(64, 1024, 2**14, 2**16),
    rounds=2,
    others=2,
    seconds=dict.fromkeys(QUICK.seconds, 0.02),
)


def probe(context: RankContext, **payload: Any) -> list[dict[str, Any]]:
    """The events of this rank."""
    sent: list[dict[str, Any]] = []
    Probe(dataclasses.replace(context, _send=sent.append), payload, SMALL).run()
    return [event for event in sent if "event" in event]
