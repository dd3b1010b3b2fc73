"""Pool: what GPUs that share links hold together, and what holding it together costs in time."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.planning.plan import plan_one
from hocket.planning.problem import Problem
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The memory of one domain of links.

    Attributes:
        gpus: of the domain. each: bytes of one GPU, as marketed. together: of all.
        need: bytes that one GPU would have to hold to train the model alone.
        smallest: GPUs of the domain that hold the model by tensor parallelism; None if none do.
        held: bytes of each of those.
        price: seconds of a step on them times their number, over those of one GPU that held it
            all, less 1; None without `smallest`.
    """

    gpus: int
    each: int
    together: int
    need: int
    smallest: int | None = None
    held: int | None = None
    price: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    def words(self, link: str) -> str:
        """All of it as a sentence."""
        each, need = format_bytes(self.each), format_bytes(self.need)
        pool = (
            f"{self.gpus} GPUs of {each} over {link} hold {format_bytes(self.together)} together"
            if self.gpus > 1
            else f"One GPU of {each} has exclusive links"
        )
        pool += f"; this model needs {need} on one GPU"
        if self.smallest == 1:
            return pool + f", which one of {each} holds."
        if self.smallest is None:
            return pool + ", and does not fit this domain by tensor parallelism alone."
        assert self.price is not None
        assert self.held is not None
        return (
            f"{pool}. {self.smallest} of them hold it with {format_bytes(self.held)} each, as one "
            f"of {format_bytes(self.smallest * self.each)} would. The price in time is "
            f"{self.price:.0%}."
        )


def pool(problem: Problem, microbatches: int) -> Pool:
    """The pool of one domain, for one replica that takes the batch in so many microbatches."""
    cluster = problem.cluster
    domain = max(1, min(cluster.node.link.domain, cluster.num_gpus))
    if cluster.node.link.kind == "none":
        domain = 1
    # As many sequences as the microbatches divide: of a replica alone only the ratio is asked for.
    one = dataclasses.replace(
        problem,
        global_batch=microbatches,
        cluster=_of(cluster, max(domain, 1)),
    )
    alone = plan_one(one, Layout(microbatches=microbatches)).best
    found = Pool(
        gpus=domain,
        each=cluster.node.gpu.memory,
        together=domain * cluster.node.gpu.memory,
        need=alone.memory_high,
    )
    size = 1
    while size <= domain:
        try:
            split = plan_one(one, Layout(tp=size, microbatches=microbatches)).best
        except HocketError:
            break  # the heads do not divide any further
        if split.fits:
            price = split.step_seconds.median * size / alone.step_seconds.median - 1
            return dataclasses.replace(
                found, smallest=size, held=split.memory_high, price=max(0.0, price)
            )
        size *= 2
    return found


def _of(cluster: Cluster, gpus: int) -> Cluster:
    """One machine of the same kind with the domain's GPUs."""
    node = dataclasses.replace(cluster.node, num_gpus=gpus)
    return dataclasses.replace(cluster, num_nodes=1, node=node)
