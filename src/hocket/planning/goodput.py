"""Goodput: the part of a run's time that advances the training, on machines that fail.

    M   mean time between failures      1 / (failures per GPU and hour x GPUs)
    C   seconds that a save stops training
    R   seconds from a failure to the next step: found, ranks started, checkpoint loaded
    t   seconds of training between two saves

Failures come at random and uniformly, and one throws away what was computed since the last save. A
segment of t and its save take, with their repetitions, M exp(R / M) (exp((t + C) / M) - 1) on
average; the goodput is t over that (Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps", section 2). The best t is near sqrt(2 C M) - C (Young 1974); here it is
found on the exact expression.

A machine that is lost is repaired for hours. With k spare nodes the run waits when k + 1 nodes are
under repair at once: the blocking probability of k + 1 servers (Erlang B) at a load of failed nodes
per repair time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hocket.planning.forecast import LayoutForecast
from hocket.planning.problem import Problem
from hocket.spec.errors import OptionError

FAILURES = 2.0e-5
"""Unexpected interruptions per GPU and hour: 419 in 54 days on 16,384 H100 (Llama 3, Dubey et al.
2024, arXiv:2407.21783, section 3.3.4)."""

RESTART_SECONDS = 300.0
"""An assumption: ranks started and a checkpoint loaded on a cluster. Measure your own."""

REPAIR_HOURS = 24.0
"""An assumption: until a failed node is back."""

SAVE_RATE = 2e9
"""An assumption: bytes per second that one node writes to shared storage."""

_STEPS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """What failures cost a run.

    Attributes:
        failures: per GPU and hour. num_gpus: of the run, without spares.
        mean_hours: between two failures of the run.
        save_seconds: that a save stops training. restart_seconds: from a failure to the next step.
        interval_seconds: the best time between two saves.
        goodput: part of the time that advances the training, with nodes repaired at once.
        repair_hours: until a failed node is back.
        spares: the same for 0, 1, 2 ... spare nodes, waiting for repairs included.
        spare_nodes: what the first spare node is worth, in nodes of the run.
    """

    failures: float
    num_gpus: int
    mean_hours: float
    save_seconds: float
    restart_seconds: float
    interval_seconds: float
    goodput: float
    repair_hours: float
    spares: tuple[float, ...]
    spare_nodes: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def goodput(
    *,
    num_gpus: int,
    num_nodes: int,
    save_seconds: float,
    restart_seconds: float = RESTART_SECONDS,
    failures: float = FAILURES,
    repair_hours: float = REPAIR_HOURS,
    num_spares: int = 2,
) -> Goodput:
    """The expected goodput of a run, its best checkpoint interval, and the worth of spare nodes.

    Args:
        num_gpus, num_nodes: that the run needs.
        save_seconds: that a save stops training.
        restart_seconds, failures, repair_hours: see `Goodput`.
        num_spares: up to how many spare nodes are looked at.

    Raises:
        OptionError: a number that is not positive.
    """
    given = {
        "failures": failures,
        "save-seconds": save_seconds,
        "restart-seconds": restart_seconds,
        "repair-hours": repair_hours,
    }
    for name, value in given.items():
        if not (value > 0 and math.isfinite(value)):
            usual = {"failures": FAILURES, "repair-hours": REPAIR_HOURS, "save-seconds": 30}
            raise OptionError(
                f"--{name} is {value:g}; it is a number above 0",
                hint=f"--{name} {usual.get(name, RESTART_SECONDS):g}",
            )
    mean = 3600 / (failures * num_gpus)
    interval = best_interval(mean, save_seconds)
    part = efficiency(interval, mean, save_seconds, restart_seconds)
    load = failures * num_gpus * repair_hours
    spares = tuple(part * (1 - blocked(load, count + 1)) for count in range(num_spares + 1))
    return Goodput(
        failures=failures,
        num_gpus=num_gpus,
        mean_hours=mean / 3600,
        save_seconds=save_seconds,
        restart_seconds=restart_seconds,
        interval_seconds=interval,
        goodput=part,
        repair_hours=repair_hours,
        spares=spares,
        spare_nodes=num_nodes * (spares[1] - spares[0]) / spares[0] if num_spares else 0.0,
    )


def plan_goodput(  # noqa: PLR0917
    problem: Problem,
    best: LayoutForecast,
    save_seconds: float | None,
    restart_seconds: float | None,
    failures: float | None,
    repair_hours: float | None,
) -> Goodput:
    """Of a plan's best layout; None: the defaults. Raises OptionError: a number not above 0."""
    per_node = problem.cluster.node.num_gpus
    gpus = best.layout.world_size
    nodes = -(-gpus // per_node)
    if save_seconds is None:
        sizes = problem.state_bytes
        stored = problem.shape.num_trained * (sizes.weight + sizes.optimizer)
        save_seconds = stored / (nodes * SAVE_RATE)
    own = {
        "restart_seconds": restart_seconds,
        "failures": failures,
        "repair_hours": repair_hours,
    }
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return goodput(num_gpus=gpus, num_nodes=nodes, save_seconds=save_seconds, **given)


def efficiency(interval: float, mean: float, save: float, restart: float) -> float:
    """t / (M exp(R / M) (exp((t + C) / M) - 1)), all in seconds; 0 where that is beyond floats."""
    exponent = (interval + save) / mean
    if exponent + restart / mean > 700:
        return 0.0
    return interval / (mean * math.exp(restart / mean) * math.expm1(exponent))


def best_interval(mean: float, save: float) -> float:
    """The t of the largest `efficiency`, in seconds: where exp((t + C) / M) (1 - t / M) = 1.

    It does not depend on R, and lies between 0 and M.
    """
    low, high = 0.0, mean
    for _ in range(_STEPS):
        middle = (low + high) / 2
        # The logarithm of the condition: exp alone would overflow where saves take longer than M.
        part = min(middle / mean, 1 - 1e-15)
        rising = (middle + save) / mean + math.log1p(-part) > 0
        low, high = (middle, high) if rising else (low, middle)
    return low


def blocked(load: float, servers: int) -> float:
    """Erlang's B: how often all of `servers` are busy, by its recursion; `load` in servers."""
    found = 1.0
    for count in range(1, servers + 1):
        found = load * found / (count + load * found)
    return found
