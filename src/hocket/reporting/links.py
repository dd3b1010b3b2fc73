"""The links of a run's machine, for the page: each two of its devices, and where the ranks are."""

from __future__ import annotations

from typing import Any

from hocket.reporting.topology import LEGEND, labels, pair_of
from hocket.spec.layout import Layout
from hocket.spec.measured import MachineMeasurements
from hocket.spec.units import format_bytes

MOST = 16
"""Devices of a matrix on a page."""


def links_payload(
    measured: MachineMeasurements | None, layout: Layout | None
) -> dict[str, Any] | None:
    """The matrix of a machine as plain values; None where it is not known.

    Ranks are on GPUs in their order, as many on each machine as it has GPUs. On a CPU they are on
    no core of their own, so that there only the machine's own cores are shown.
    """
    if measured is None:
        return None
    names = labels(measured)
    gpus = measured.device == "cuda"
    ranks = layout.world_size if layout is not None else 0
    host = measured.host
    machine = [
        f"{host.cores} core{'s' if host.cores > 1 else ''} of {host.cpu}",
        f"{format_bytes(host.memory)} of memory",
    ]
    if gpus and measured.devices:
        machine.insert(0, f"{len(measured.devices)} x {measured.devices[0].name}")
    used = {pair.path for pair in measured.pairs}
    return {
        "title": f"{host.name}: {', '.join(machine)}",
        "when": f"measured {measured.date[:10]}, {'quick' if measured.quick else 'full'} form",
        "gpus": gpus,
        "names": names[:MOST],
        "left_out": max(0, len(names) - MOST),
        "ranks": [
            [rank for rank in range(ranks) if gpus and rank % len(names) == i]
            for i in range(min(len(names), MOST))
        ],
        "cells": [
            [_cell(measured, i, j) for j in range(min(len(names), MOST))]
            for i in range(min(len(names), MOST))
        ],
        "words": [
            text.split(maxsplit=1)
            for key, text in LEGEND.items()
            if any(path.startswith(key) for path in used)
        ],
        "bracketed": any(pair.rate and not pair.measured for pair in measured.pairs),
    }


def _cell(measured: MachineMeasurements, one: int, other: int) -> dict[str, Any] | None:
    pair = None if one == other else pair_of(measured, one, other)
    if pair is None:
        return None
    return {
        "path": pair.path,
        "rate": pair.rate or None,
        "latency": pair.latency or None,
        "measured": pair.measured,
    }
