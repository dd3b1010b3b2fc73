"""transformers' own tensor and expert parallelism (`DistributedConfig`), weights from disk."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.contenders.pytorch import mean_over_ranks
from benchmarks.rank import Step
from benchmarks.workload import Workload, next_token_loss


def tensor_parallel(workload: Workload) -> Step:
    dist.init_process_group("gloo")
    return _split(workload, DistributedConfig(tp_size=dist.get_world_size()))


def expert_parallel(workload: Workload, exchange: bool) -> Step:
    """Ranks own experts. With `exchange` each has its share of the batch and sends tokens to their
    experts, and what is not an expert is in shards (FSDP2); without it all have the whole batch and
    sum the outputs of their experts."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if exchange:
        how = DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="all_to_all")
    else:
        # Without a rule for what is dense it asks for one; the head's is that of other models.
        dense = {"lm_head": "colwise_gather_output"}
        how = DistributedConfig(
            ep_size=ranks, tp_size=ranks, tp_plan=dense, ep_implementation="all_reduce"
        )
    return _split(workload, how, data_ranks=ranks if exchange else 1)


def _split(workload: Workload, how: DistributedConfig, data_ranks: int = 1) -> Step:
    model = AutoModelForCausalLM.from_pretrained(
        workload.model_dir,
        distributed_config=how,
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    model.config.use_cache = False
    model.train()
    optimizer = workload.optimizer(model.parameters())

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(data_ranks)[dist.get_rank() if data_ranks > 1 else 0]
        loss = next_token_loss(model(input_ids=mine).logits, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss) if data_ranks > 1 else loss.item()

    return step
