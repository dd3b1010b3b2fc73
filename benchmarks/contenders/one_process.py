"""One process, no parallelism: the reference for losses, and what a laptop does by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss

if TYPE_CHECKING:
    import torch


def build(workload: Workload) -> Step:
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        loss = next_token_loss(model(ids).logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
