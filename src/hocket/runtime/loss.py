"""The default loss: next-token cross-entropy of a model's logits, split by vocabulary or whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from hocket.runtime.tensor_parallel.layers import VocabParallelHead

IGNORED = -100
"""The label of a token that has no target."""


class NextTokenLoss:
    """Sum of the cross-entropies of a microbatch's `labels` [B, S], and their number.

    The logits [B, S, V] (or [B, S, V of this rank], if `module` ends in a vocabulary-parallel
    head) are the output's `logits`, or its first entry, or the output itself. They are overwritten.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self.recorder = mesh.recorder
        heads = [m for m in module.modules() if isinstance(m, VocabParallelHead)]
        self.axis = heads[-1].axis if heads else Axis("tp")
        self.start = heads[-1].start if heads else 0

    def __call__(self, output: Any, microbatch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = microbatch["labels"]
        loss = vocab_parallel_cross_entropy(
            logits_of(output),
            labels,
            self.axis,
            self.start,
            ignore_index=IGNORED,
            recorder=self.recorder,
        )
        return loss.sum(), (labels != IGNORED).sum()


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    found = output[0] if logits is None else logits
    assert isinstance(found, Tensor), type(output)
    return found
