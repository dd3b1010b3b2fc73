"""Execution: what one rank runs in: a fake GPU, groups that record, and counters of what it does.

    with executing(device, rank, world_size) as execution:
        ... build on the meta device: mesh, parallelize ...
        with execution.fake():                     fake CUDA tensors from here on
            allocate(module, cuda)
            execution.begin(recorder)              what follows is counted
            ... a step ...
            execution.end()
        execution.into(found, mesh, recorder)

Training and serving execute their ranks in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.rehearsal.attention import AttentionCounter
from hocket.rehearsal.device import FakeGpu
from hocket.rehearsal.generated import GeneratedKernels, generating
from hocket.rehearsal.graph_collectives import GraphCollectives
from hocket.rehearsal.launches import Launches, StepObserver
from hocket.rehearsal.memory import LiveMemory
from hocket.rehearsal.process_group import Group, RehearsedWorld, rehearsed_world
from hocket.rehearsal.shape_cache import ShapeCache
from hocket.runtime.mesh import Mesh
from hocket.runtime.record import Recorder
from hocket.spec.rehearsal import RankRehearsal, RehearsedDevice


class Actions(Recorder):
    """A recorder that notes which actions of the schedule run, in order."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self.actions: list[str] = []

    def span(self, lane: str, kind: str, name: str, **fields: Any) -> AbstractContextManager[None]:
        if lane == "compute" and fields.get("stage") is not None:
            self.actions.append(name)
        return nullcontext()


class Execution:
    """What is counted of one rank.

    Attributes:
        world: what it enqueues. memory: what it allocates. launches: kernels and host reads.
        attention: kernels that attention chose. gpu: the fake GPU. generated: what torch.compile
            generates; None: nothing is compiled.
    """

    def __init__(
        self, world: RehearsedWorld, memory: LiveMemory, launches: Launches, gpu: FakeGpu,
        generated: GeneratedKernels | None = None,
    ) -> None:  # fmt: skip
        self.world, self.memory, self.launches, self.gpu = world, memory, launches, gpu
        self.generated = generated
        self.in_graphs = GraphCollectives()
        self.attention = AttentionCounter(gpu.device.capability, generated=generated is not None)

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Within, tensors are fake and what operations do is counted."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        observer = StepObserver(self.memory, self.launches, ShapeCache(mode), self.in_graphs)
        with mode, observer, self.attention.installed():
            yield

    def begin(self, recorder: Actions) -> None:
        """Count from here on."""
        recorder.clear()
        recorder.actions.clear()
        self.world.trace.ops.clear()
        self.world.trace.events.clear()
        self.attention.chosen.clear()
        self.launches.kernels.clear()
        self.launches.host_reads.clear()
        self.in_graphs.clear()
        self.in_graphs.recorder = recorder
        if self.generated is not None:
            self.generated.launches.clear()
        self.memory.restart_peak()
        self.launches.counting = True

    def end(self) -> None:
        self.launches.counting = False

    def into(self, found: RankRehearsal, mesh: Mesh, recorder: Actions) -> None:
        """Write down what was counted."""
        world, memory, launches = self.world, self.memory, self.launches
        found.standing = {"total": memory.now()[0], **memory.owned}
        found.peak = {"total": memory.peak, **memory.at_peak}
        found.host_peak = memory.host_peak
        found.ops = _ops(world)
        found.events = list(world.trace.events)
        found.families = {
            str(label): [list(row) for row in family.rows]
            for label, family in enumerate(world.families)
        }
        found.axes = _axes(mesh)
        found.calls = world.num_calls
        self.in_graphs.count(found.axes)
        found.collectives = recorder.collectives()
        found.host_reads = launches.reads()
        found.launches = dict(launches.kernels)
        found.attention = dict(self.attention.chosen)
        if self.generated is not None:
            found.attention = self.attention.of_graphs(launches.kernels)
            found.generated = self.generated.figures()
        found.actions = list(recorder.actions)


@contextmanager
def executing(
    device: RehearsedDevice, rank: int, world_size: int, *, compiles: bool = False
) -> Iterator[Execution]:
    """Within, this process is one rank on a machine of such GPUs, in a world that only records.

    Args:
        compiles: what `torch.compile` is given is compiled for them.

    Raises:
        OptionError: as `rehearsal.generated.generating`.
    """
    memory, launches = LiveMemory(), Launches()
    gpu = FakeGpu(device, launches.wait, memory.now)
    with ExitStack() as stack:
        stack.callback(memory.close)
        stack.enter_context(gpu.installed())
        stack.enter_context(_real_branches())
        world = stack.enter_context(rehearsed_world(rank, world_size, memory.communicated))
        generated = generating(device, launches.generated) if compiles else nullcontext()
        yield Execution(world, memory, launches, gpu, stack.enter_context(generated))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Take a module off the meta device, without values; a parameter of several modules stays
    one."""
    made: dict[int, nn.Parameter] = {}
    kept = list(module.parameters())  # so that no id is given twice
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                fresh = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                    parameter.requires_grad,
                )
                fresh.__dict__.update(parameter.__dict__)
                made[id(parameter)] = fresh
            child._parameters[key] = made[id(parameter)]
        for key, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    del kept


@contextmanager
def _real_branches() -> Iterator[None]:
    """Within, transformers takes the branches of a real run: it treats fake tensors as a trace,
    and would build masks that a run does not hold."""
    from transformers.utils import import_utils

    module: Any = import_utils
    before = module.is_fake_tensor
    module.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        module.is_fake_tensor = before


def _ops(world: RehearsedWorld) -> list[list[Any]]:
    return [
        [
            op.name,
            op.group[0],
            op.numel,
            op.dtype,
            -1 if op.peer is None else op.peer,
            -1 if op.root is None else op.root,
            op.blocks,
            op.batch,
        ]
        for op in world.trace.ops
    ]


def _axes(mesh: Mesh) -> dict[str, list[str]]:
    """Label of each group to the mesh axes that use it."""
    found: dict[str, list[str]] = {}
    for name, axis in mesh._axes.items():
        group: Any = axis.group
        if group is dist.group.WORLD:
            found.setdefault("0", []).append(name)
        elif isinstance(group, Group):
            found.setdefault(group._label, []).append(name)
    return found
