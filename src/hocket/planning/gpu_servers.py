"""Servers on GPUs: a replica's seconds by the service planner's constants, its bytes as rehearsals
find them.

How fast it steps is `service.problem.ServiceProblem`'s, as `hocket plan --serve` has it. What its
ranks hold is `MeasuredReplica`'s, in addition to what the planner's constants say of the process:
context, workspaces, graphs and the buffers of collectives.
"""

from __future__ import annotations

import dataclasses
import functools

from hocket.cost.measured_serving import MeasuredReplica
from hocket.cost.serving import COMMUNICATION_BYTES, ServingPrices
from hocket.planning.machine_serving import EngineSizes, ReplicaEstimate, rank_memory, usual
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
        stages = MeasuredReplica(
            shape=self.shape,
            layout=one,
            dtype=sizes.dtype,
            quantization="fp8" if self.precision == "fp8" else None,
            cpu=False,
            cached_bytes=cached_bytes(sizes.kv_cache_dtype),
        ).stage_bytes(sizes.batch_tokens, sizes.rows)
        for stage in stages:
            stage["step"] += round(around)
        memory, tokens = rank_memory(stages, sizes, available, one)
        steps = _Steps(prices)
        return ReplicaEstimate(
            steps=steps,
            alone=steps,
            memory=tuple(memory),
            cache_tokens=tokens * one.dp,
            cache_bytes=max(stage["token"] for stage in stages),
            capacity=available,
            data_ranks=one.dp,
            notes=(ASSUMED,),
        )


class _Steps:
    """Prices as `machine_serving.ReplicaSteps`."""

    def __init__(self, prices: ServingPrices) -> None:
        self.prices, self.stages = prices, prices.stages
        self.step_seconds, self.stage_seconds = prices.step_seconds, prices.stage_seconds

    def prefill_seconds(self, tokens: int, chunk: int) -> float:
        return self.prices.prefill_seconds(tokens, chunk=chunk).item()

    def decode_seconds(self, batch: float, context: float) -> float:
        return self.prices.decode_seconds(batch, context).item()
