"""Servers on GPUs: a replica's seconds and bytes by the service planner's constants.

What a rank holds and how fast it steps is `service.problem.ServiceProblem`'s, as `hocket plan
--serve` has it; the engine's own sizes and the GPUs that are there bound it.
"""

from __future__ import annotations

import dataclasses
import functools

from hocket.cost.serving import ServingPrices
from hocket.planning.machine_serving import EngineSizes, ReplicaEstimate, rank_memory, usual
from hocket.planning.service.problem import ServiceProblem
from hocket.simulation.traffic import Floats
from hocket.spec.cluster import Cluster
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.serving import replica_layout

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
        stage = {
            "weights": round(prices.weight_bytes),
            "step": round(prices.overhead_bytes),
            "token": max(1, round(prices.cache_bytes * one.dp)),
        }
        memory, tokens = rank_memory([stage] * one.pp, sizes, available, one)
        steps = _Steps(prices)
        return ReplicaEstimate(
            steps=steps,
            alone=steps,
            memory=tuple(memory),
            cache_tokens=tokens * one.dp,
            cache_bytes=stage["token"],
            capacity=available,
            data_ranks=one.dp,
            notes=(ASSUMED,),
        )


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Prices as `machine_serving.ReplicaSteps`."""

    prices: ServingPrices

    @property
    def stages(self) -> int:
        return self.prices.stages

    def step_seconds(self, prefill_tokens: Floats, prefill_context: Floats, decode_batch: Floats,
                     decode_context: Floats) -> Floats:  # fmt: skip
        return self.prices.step_seconds(
            prefill_tokens, prefill_context, decode_batch, decode_context
        )

    def stage_seconds(self, prefill_tokens: Floats, prefill_context: Floats, decode_batch: Floats,
                      decode_context: Floats) -> Floats:  # fmt: skip
        return self.prices.stage_seconds(
            prefill_tokens, prefill_context, decode_batch, decode_context
        )

    def prefill_seconds(self, tokens: int, chunk: int) -> float:
        return self.prices.prefill_seconds(tokens, chunk=chunk).item()

    def decode_seconds(self, batch: float, context: float) -> float:
        return self.prices.decode_seconds(batch, context).item()
