"""PyTorch's context parallelism on CPU: its ring, its balance, its merge, around the CPU's kernel.

`torch.distributed.tensor.experimental.context_parallel` only dispatches CUDA's attention kernels to
its ring. The ring itself takes any kernel, so it is called here with the CPU's fused one, from the
place where transformers calls attention.

Letters: B batch, h heads, S sequence, D size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.rank import Step
from benchmarks.workload import IGNORED, Workload

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _forward_kernel(*given: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
    # The operators of the CPU do not ask how their inputs lie in memory.
    out: tuple[torch.Tensor, ...] = KERNEL(*(t.contiguous() for t in given), **how)
    return out


def _backward_kernel(**given: Any) -> tuple[torch.Tensor, ...]:
    dense = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    out: tuple[torch.Tensor, ...] = BACKWARD(**dense)
    return out


class RingAttention(torch.autograd.Function):
    """Causal attention of [B, h, S / ranks, D] over the ranks of the world."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        world = dist.group.WORLD
        assert world is not None
        out, lse = _templated_ring_attention(
            world, 2, _forward_kernel, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        world = dist.group.WORLD
        assert world is not None
        q, k, v, out, lse = ctx.saved_tensors
        return _templated_ring_attention_backward(
            world,
            2,
            _backward_kernel,
            grads[0],
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
            dropout_p=0.0,
        )


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    groups = module.num_key_value_groups
    out = RingAttention.apply(query, repeat_kv(key, groups), repeat_kv(value, groups))
    return out.transpose(1, 2), None


def build(workload: Workload) -> Step:
    """Replicas of the model, each on its two blocks of every sequence (head and tail)."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention
    model = torch.nn.parallel.DistributedDataParallel(
        workload.model(), gradient_as_bucket_view=True
    )
    optimizer = workload.optimizer(model.parameters())

    def mine(whole: torch.Tensor) -> torch.Tensor:
        blocks = whole.chunk(2 * ranks, dim=1)
        return torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]], dim=1)

    def step(ids: torch.Tensor) -> float:
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]
        positions = torch.arange(workload.seq_len).expand_as(ids)
        logits = model(mine(ids), position_ids=mine(positions)).logits
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), mine(labels).flatten(), reduction="sum"
        )
        # DistributedDataParallel averages gradients over ranks.
        loss = summed / (labels != IGNORED).sum()
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    return step
