"""The service need: GPUs over load and latency, every number searched for as the answer was."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.planning.service.forecast import ServiceForecast
from hocket.planning.service.problem import ServiceProblem
from hocket.planning.service.search import Deployed, Pins, candidate_replicas, search_deployments
from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedMap:
    """GPUs of one kind.

    Attributes:
        gpu: the kind.
        rates: requests per second, one a row. tpots: goals in milliseconds, one a column; None:
            no goal for either latency.
        gpus: [row][column]; None where no number of GPUs that is looked at meets the goals.
        layouts: as text, likewise.
    """

    gpu: str
    rates: tuple[float, ...]
    tpots: tuple[float | None, ...]
    gpus: tuple[tuple[int | None, ...], ...]
    layouts: tuple[tuple[str | None, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def need_map(
    problem: ServiceProblem,
    *,
    rates: tuple[float, ...],
    tpots: tuple[float | None, ...],
    pins: Pins | None = None,
    known: ServiceForecast | None = None,
) -> NeedMap:
    """GPUs that carry so many requests a second (rows) within so many milliseconds a token.

    The goal for the first token is the service's, except where there is no goal at all.

    Args:
        known: the answer for the service's own load and goals.
    """
    service = problem.service

    def cell(rate: float, tpot: float | None) -> tuple[int | None, str | None]:
        if known is not None and (rate, tpot) == (service.requests_per_second, service.tpot_ms):
            return known.num_gpus, str(known.layout)
        found = need(problem, rate, tpot, pins)
        return (None, None) if found is None else (found.gpus, _layout_text(found))

    cells = [[cell(rate, tpot) for tpot in tpots] for rate in rates]
    return NeedMap(
        gpu=problem.gpu.name,
        rates=rates,
        tpots=tpots,
        gpus=tuple(tuple(gpus for gpus, _ in row) for row in cells),
        layouts=tuple(tuple(layout for _, layout in row) for row in cells),
    )


def need(
    problem: ServiceProblem, rate: float, tpot: float | None, pins: Pins | None = None
) -> Deployed | None:
    """The fewest GPUs for one load and one goal."""
    service = dataclasses.replace(
        problem.service,
        requests_per_second=rate,
        tpot_ms=tpot,
        ttft_ms=None if tpot is None else problem.service.ttft_ms,
    )
    other = problem.under(service, bounded=False)
    found = search_deployments(other, top=1, pins=pins, found=candidate_replicas(other, pins))
    return found[0] if found else None


def _layout_text(deployed: Deployed) -> str:
    """The layout of a deployment: `dp2.tp4`."""
    one = deployed.candidate
    return str(Layout(dp=deployed.replicas * one.ep, pp=one.pp, cp=one.cp, tp=one.tp, ep=one.ep))
