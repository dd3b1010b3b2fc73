"""Hugging Face accelerate on CPU: its data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import Accelerator

from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss

if TYPE_CHECKING:
    import torch


def data_parallel(workload: Workload) -> Step:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes > 1, "accelerate did not join the process group"
    whole = workload.model()
    model, optimizer = accelerator.prepare(whole, workload.optimizer(whole.parameters()))

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = next_token_loss(model(input_ids=mine).logits, mine)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    return step
