"""An emulation of the library `deep_ep`, on any backend of torch: its `ElasticBuffer` with the
expanded layout, as its documentation and its own tests describe it (DeepEP 2.1).

It sends whole tensors to everybody and picks from them, so it shares no code with what it tests.
What the library asserts of its arguments, it asserts.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int32


def install() -> None:
    """Have this process take it for the library, with rows of fp32."""
    from hocket.runtime.expert_parallel import deep_ep

    sys.modules["deep_ep"] = sys.modules[__name__]
    deep_ep.ROWS = torch.float32


@dataclasses.dataclass
class EPHandle:
    num_experts: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    sources: Tensor
    """[R, 3] of each row: rank, token, choice."""
    num_sms: int = 24
    do_expand: bool = True


class ElasticBuffer:
    def __init__(
        self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.most, self.hidden = group, num_max_tokens_per_rank, hidden
        self.rank, self.ranks = group.rank(), group.size()
        assert deterministic
        found = [torch.zeros(3, dtype=torch.int64) for _ in range(self.ranks)]
        mine = torch.tensor([num_max_tokens_per_rank, hidden, num_topk])
        dist.all_gather(found, mine, group=group)
        assert all(torch.equal(one, mine) for one in found), found  # the same on all ranks

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        num_experts: int | None = None, num_sms: int = 0, handle: EPHandle | None = None,
        do_expand: bool = False,
    ) -> tuple[Tensor, None, Tensor | None, EPHandle, None]:  # fmt: skip
        assert do_expand
        assert x.is_contiguous()
        assert x.shape[1] == self.hidden
        assert len(x) <= self.most
        assert topk_weights is None or (
            topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        )
        if handle is None:
            assert topk_idx is not None
            assert num_experts is not None
            assert topk_idx.dtype == topk_idx_t
            assert topk_idx.is_contiguous()
            assert len(topk_idx) == len(x)
            handle = self._handle(topk_idx, num_experts)
        else:
            assert topk_idx is None
            assert num_sms == handle.num_sms  # else the library asks for a number of experts
        rank, token, choice = handle.sources.T
        rows = self._everybody(x)[rank, token]
        weights = None
        if topk_weights is not None:
            weights = self._everybody(topk_weights)[rank, token, choice]
        return rows, None, weights, handle, None

    def _handle(self, index: Tensor, num_experts: int) -> EPHandle:
        every = self._everybody(index, fill=-1)
        each = num_experts // self.ranks
        sources, counts = [], []
        for expert in range(self.rank * each, (self.rank + 1) * each):
            here = (every == expert).nonzero()  # in order of ranks and their tokens
            sources.append(here)
            counts.append(len(here))
        return EPHandle(num_experts, index.clone(), counts, torch.cat(sources))

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        assert x.is_contiguous()
        assert len(x) == sum(handle.num_recv_tokens_per_expert_list)
        rank, token, choice = handle.sources.T
        tokens, choices = handle.topk_idx.shape
        total = x.new_zeros(self.ranks, self.most, self.hidden)
        total.index_put_((rank, token), x, accumulate=True)
        dist.all_reduce(total, group=self.group)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.shape == (len(x),)
            each = topk_weights.new_zeros(self.ranks, self.most, choices)
            each[rank, token, choice] = topk_weights
            dist.all_reduce(each, group=self.group)
            weights = each[self.rank, :tokens]
        return total[self.rank, :tokens], weights, None

    def _everybody(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """[ranks, T at most, ...] of all ranks."""
        padded = tensor.new_full((self.most, *tensor.shape[1:]), fill)
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(found, padded, group=self.group)
        return torch.stack(found)
