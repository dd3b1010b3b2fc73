"""Vocabulary: which part of the vocabulary the logits of one rank cover."""

from __future__ import annotations

import dataclasses

from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.pipeline.stage import Stage
from hocket.runtime.tensor_parallel.layers import VocabParallelHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary of the last stage, split over the tensor axis or whole on each rank of it.

    Attributes:
        axis: the tensor axis; its index 0 samples.
        sizes: token ids held by each rank of the axis; empty: every rank holds all.
        start: first token id of this rank.
    """

    axis: Axis
    sizes: tuple[int, ...] = ()
    start: int = 0

    @property
    def split(self) -> bool:
        """Whether this rank's logits cover a part only."""
        return self.axis.size > 1 and bool(self.sizes)

    @classmethod
    def of(cls, stage: Stage, mesh: Mesh) -> Vocabulary:
        """That of the last stage."""
        axis = mesh.axis("tp")
        for module in stage.module.modules():
            if isinstance(module, VocabParallelHead):
                return cls(axis=axis, sizes=tuple(module.sizes), start=module.start)
        return cls(axis=axis)
