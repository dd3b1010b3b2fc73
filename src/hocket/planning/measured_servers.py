"""Servers on CPU cores that were measured: a replica's seconds and bytes."""

from __future__ import annotations

import dataclasses

from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_rates import Rates
from hocket.cost.measured_serving import MeasuredServing
from hocket.cost.serving_replica import ServingReplica
from hocket.planning.machine_forecast import MeasuredMachine
from hocket.planning.machine_serving import EngineSizes, ReplicaEstimate
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.serving import cached_bytes, replica_layout


@dataclasses.dataclass(frozen=True)
class MeasuredServers:
    """A model on the machine, as `machine_serving.Servers`.

    Attributes:
        shape: traced in the type that is served. machine: as it was measured.
    """

    shape: ModelShape
    machine: MeasuredMachine

    @property
    def model(self) -> str:
        return self.shape.name

    @property
    def cluster(self) -> str:
        return self.machine.name or self.machine.measured.host.name

    @property
    def measured(self) -> str:
        measured = self.machine.measured
        return f"{measured.date}, {'quick' if measured.quick else 'full'}"

    def replica(self, layout: Layout, sizes: EngineSizes) -> ReplicaEstimate:
        """As `Servers.replica`. Raises OptionError where no matmul was measured."""
        machine = self.machine
        replica = ServingReplica(
            shape=self.shape,
            layout=replica_layout(layout),
            dtype=sizes.dtype,
            cached_bytes=cached_bytes(sizes.kv_cache_dtype),
            block_size=sizes.block_size,
        )
        rates = Rates(machine.measured, replica.dtype)
        links = MeasuredLinks(
            machine.measured,
            machine.backend,
            wires=machine.wires,
            layout=replica.layout,
            element_bytes=replica.state_bytes,
        )

        def steps(busy: int) -> MeasuredServing:
            return MeasuredServing(replica, rates, links, machine.slowdown(busy))

        return ReplicaEstimate.of(
            replica.stage_bytes(sizes.batch_tokens, sizes.rows),
            sizes,
            machine.room(layout.world_size),
            replica.layout,
            steps=steps(layout.world_size),
            alone=steps(layout.tp),
            notes=(*rates.notes, *links.notes, *_notes(machine)),
        )


def _notes(machine: MeasuredMachine) -> list[str]:
    measured = machine.measured
    if any(one.name == "rows" for one in measured.kernels):
        return []
    small = min((p.m for p in measured.products), default=1)
    return [
        "the kernels that serve were not measured (hocket probe measures them): matmuls of "
        f"fewer than {small} rows take the rate of {small}, and no less than streaming their "
        "weights"
    ]
