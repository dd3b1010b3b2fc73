"""transformers' own tensor parallelism (`DistributedConfig`), from the weights on disk."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss


def tensor_parallel(workload: Workload) -> Step:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(
        workload.model_dir,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    model.config.use_cache = False
    model.train()
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        loss = next_token_loss(model(input_ids=ids).logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
