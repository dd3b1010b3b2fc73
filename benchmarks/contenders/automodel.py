"""NVIDIA NeMo Automodel on CPU: its FSDP2 strategy, which is ZeRO-3.

Its default is bf16; here it computes in fp32, as everybody. The model is transformers' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.contenders.pytorch import mean_over_ranks
from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss

if TYPE_CHECKING:
    import torch


def sharded(workload: Workload) -> Step:
    """Parameters, gradients and optimizer state in shards over all ranks."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, ranks, 1, 1), mesh_dim_names=names)
    # The names under which the strategy looks for its groups.
    mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    mesh[("dp_replicate", "dp_shard")]._flatten("dp")
    model = fsdp2_strategy_parallelize(workload.model(), mesh, mp_policy=MixedPrecisionPolicy())
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(ranks)[dist.get_rank()]
        loss = next_token_loss(model(input_ids=mine).logits, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    return step
