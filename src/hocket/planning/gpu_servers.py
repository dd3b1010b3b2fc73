"""Servers on GPUs: a replica's seconds by the service planner's constants, its bytes as rehearsals
find them.

How fast it steps is `service.problem.ServiceProblem`'s, as `hocket plan --serve` has it. What its
ranks hold is `ServingReplica`'s, in addition to what the planner's constants say of the process:
context, workspaces, graphs and the buffers of collectives.
"""

from __future__ import annotations

import dataclasses
import functools

from hocket.cost.serving import COMMUNICATION_BYTES
from hocket.cost.serving_replica import ServingReplica
from hocket.planning.machine_serving import EngineSizes, ReplicaEstimate, usual
from hocket.planning.service.problem import ServiceProblem
from hocket.spec.cluster import Cluster
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.serving import cached_bytes, replica_layout

ASSUMED = (
    "steps are those of a tuned server on this GPU, fitted to published measurements: no run of "
    "hocket's server on a GPU was measured yet"
)


@dataclasses.dataclass(frozen=True)
class GpuServers:
    """A model on GPUs, as `machine_serving.Servers`.

    Attributes:
        shape: traced in bf16, or the catalogue's. gpus: that are there.
        precision: of weights and matmuls, one of `cost.serving.WEIGHT_BYTES`.
        usable: fraction of a GPU's memory that the engine fills.
    """

    shape: ModelShape
    gpus: Cluster
    precision: str = "bf16"
    usable: float = 0.9

    @property
    def model(self) -> str:
        return self.shape.name

    @property
    def cluster(self) -> str:
        return self.gpus.name

    @property
    def measured(self) -> str:
        return "" if self.gpus.measured is None else self.gpus.measured.date

    @functools.cached_property
    def _problem(self) -> ServiceProblem:
        return ServiceProblem(
            shape=self.shape,
            cluster=self.gpus,
            service=usual(2048),  # prices do not depend on the load
            bounded=True,
            precision=self.precision,
            cache_precision="bf16",  # of any weights
            usable=self.usable,
        )

    def replica(self, layout: Layout, sizes: EngineSizes) -> ReplicaEstimate:
        """As `Servers.replica`. Raises OptionError for a precision that the GPU lacks."""
        one = replica_layout(layout)
        cached = "fp8" if sizes.kv_cache_dtype == "fp8" else "bf16"
        problem = dataclasses.replace(
            self._problem, ep=one.dp, cp=layout.cp, cache_precision=cached
        )
        prices = problem.prices(one.tp, one.pp, sizes.batch_tokens)
        available = int(self.usable * prices.memory)
        around = prices.replica.constants.overhead_bytes
        around += COMMUNICATION_BYTES if one.world_size > 1 else 0.0
        stages = ServingReplica(
            shape=self.shape,
            layout=one,
            dtype=sizes.dtype,
            quantization="fp8" if self.precision == "fp8" else None,
            cpu=False,
            cached_bytes=cached_bytes(sizes.kv_cache_dtype),
        ).stage_bytes(sizes.batch_tokens, sizes.rows)
        for stage in stages:
            stage["step"] += round(around)
        return ReplicaEstimate.of(
            stages, sizes, available, one, steps=prices, alone=prices, notes=(ASSUMED,)
        )
