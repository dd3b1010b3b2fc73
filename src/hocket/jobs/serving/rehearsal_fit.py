"""Fit: why a rehearsed server is rejected, with the numbers and the nearest layout that works."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.jobs.rehearsal_fit import MARGIN, TENSOR_RANKS, unfinished
from hocket.spec.errors import HocketError, LayoutError, ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from hocket.spec.units import format_bytes

if TYPE_CHECKING:
    from hocket.jobs.serving.rehearse import ServingReport


def require_replica(found: ServingReport, spec: RunSpec) -> None:
    """Reject a replica whose steps do not end, or that does not fit its GPUs.

    Args:
        found: the rehearsal of `spec`.

    Raises:
        ScheduleError: ranks wait for ever under the rule that hocket's groups obey, or call a
            collective differently.
        LayoutError: weights, the largest step and the cache of one longest request do not fit.
    """
    verdict = found.verdicts["eager"]
    if not verdict.ok:
        raise ScheduleError(
            unfinished(verdict, len(found.stands_for)),
            hint="--layout tp1, or another degree of tp and pp",
        )
    if found.fits:
        return
    rank, one = max(found.ranks.items(), key=lambda item: found.held(item[1]))
    memory = one["memory"]
    other = nearest_replica(found, spec)
    raise LayoutError(
        f"rank {rank} needs {format_bytes(found.held(one))}: {format_bytes(memory['weights'])} of "
        f"weights, {format_bytes(memory['step'])} for the largest step and "
        f"{format_bytes(memory['cache'])} for the keys and values of {memory['cache_tokens']:,} "
        f"tokens; {found.gpu} has {format_bytes(found.device_memory)}",
        hint=None if other is None else f"--layout {other}",
    )


def nearest_replica(found: ServingReport, spec: RunSpec) -> str | None:
    """The first of the alternatives that is predicted to fit; None: none of them is."""
    from hocket.jobs.rehearsal_workers import RehearsalWorkers

    texts = list(dict.fromkeys(one.axes_text() for one in larger_replicas(spec)))
    task = {
        "task": "call",
        "entry": "hocket.ranks.rehearsal_expected:first_served_fit",
        "arguments": {
            "spec": spec.to_json(),
            "layouts": texts,
            "allowed": (1 - MARGIN) * found.device_memory,
        },
    }
    with RehearsalWorkers(1) as workers:
        (event,) = workers.run([task])
    text: str | None = event["value"]
    return text


def larger_replicas(spec: RunSpec) -> Iterator[Layout]:
    """Layouts of one replica with more ranks: of tp up to those of one node, then of pp."""
    from hocket.jobs.serving.request import legal_server_layout
    from hocket.models.source import run_source

    source, layout = run_source(spec), spec.layout
    for pp in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            if pp * tp == 1 or layout.tp * tp > TENSOR_RANKS:
                continue
            one = dataclasses.replace(layout, tp=layout.tp * tp, pp=layout.pp * pp)
            try:
                yield legal_server_layout(source, one, "cpu")
            except HocketError:
                continue
