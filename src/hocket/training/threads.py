"""Threads: data parallelism in one process (`--data-parallel threads`), stepped like any layout.

A face that the loop cannot tell from `Parallel`, over the replicas of
`runtime.data_parallel.threads`. It exists for comparison with one process a replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from hocket.runtime.data_parallel.threads import ThreadedReplicas
from hocket.runtime.loss import NextTokenLoss
from hocket.runtime.mesh import Mesh
from hocket.runtime.parallelize import Parallel
from hocket.runtime.pipeline.stage import Microbatch, Stage
from hocket.runtime.record import Recorder
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement


class ThreadedParallel:
    """One process's model and its replicas in threads.

    Args:
        whole: the model, unsplit; it becomes the master replica.
        replicas: degree of data parallelism.
    """

    def __init__(self, whole: Parallel, replicas: int) -> None:
        assert len(whole.stages) == 1, "replicas in threads hold the whole model"
        self._whole = whole
        self.layout: Layout = whole.layout
        self.mesh: Mesh = whole.mesh
        self.stages: list[Stage] = whole.stages
        self.placements: Mapping[str, Placement] = whole.placements
        self.recorder: Recorder = whole.recorder
        module = whole.stages[0].module
        self._replicas = ThreadedReplicas(
            module, replicas, NextTokenLoss(module, whole.mesh), whole.recorder
        )

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._whole.step

    @step.setter
    def step(self, step: int) -> None:
        self._whole.step = step

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The master's."""
        return self._whole.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The master's."""
        return self._whole.parameters()

    def train(self, mode: bool = True) -> None:
        """Set every replica to training (or evaluation) mode."""
        for replica in self._replicas.replicas:
            replica.train(mode)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], num_tokens: int | None = None
    ) -> Tensor:
        """As `Parallel.forward_backward`; each microbatch's rows are shared by the replicas."""
        if num_tokens is None:
            num_tokens = self._whole.count_tokens(microbatches)
        self._whole.zero_grad()
        with self.recorder.in_phase("microbatch"):
            loss = self._replicas.forward_backward(microbatches, max(1, num_tokens))
        self._whole.step += 1
        return loss

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """As `Parallel.evaluate`, on the master alone."""
        return self._whole.evaluate(microbatches)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """As `Parallel.clip_grad_norm`."""
        return self._whole.clip_grad_norm(max_norm)

    def replica_bytes(self) -> list[dict[str, int]]:
        """Counted tensor bytes of each replica in the first step, the master first."""
        return self._replicas.replica_bytes()
