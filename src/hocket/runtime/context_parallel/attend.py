"""Attend: attention of some queries to some keys, with the log-sum-exp that parts are merged by.

    part       scores s = scale q k (soft-capped), out = softmax(s) v, lse = log sum exp s
    merge      lse = log(exp a + exp b), out = out_a exp(a - lse) + out_b exp(b - lse)
    backward   of a part, from the whole's out and lse: p = exp(s - lse), ds = p (do v - do out)

(Dao et al. 2022, FlashAttention, section 3 and appendix B; Liu et al. 2023, Ring Attention.) Fused
kernels that return the log-sum-exp take what has no mask, no soft cap, and heads of one size; the
rest is computed here, in tiles of keys. A row without an allowed key has lse = -inf and out = 0, in
a part as in the whole.

Legend: B rows, A query heads, K key/value heads, Q queries, N keys, D size of a key, E of a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TILE = 1 << 24
"""Scores that are there at once on the plain path, at most (one key at least)."""

Visible = Callable[[Tensor, Tensor], Tensor]
"""(places of queries [Q], places of keys [N]) to what is seen, [B or 1, 1, Q, N] boolean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores become weights.

    Attributes:
        scale: of q k.
        softcap: c of c tanh(s / c). None: none.
        visible: what queries see of keys, besides causality. None: all before them.
    """

    scale: float
    softcap: float | None = None
    visible: Visible | None = None


def attend_part(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Places | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """One part: query [B, A, Q, D], key [B, K, N, D], value [B, K, N, E] to out [B, A, Q, E] and
    lse [B, A, Q], both in fp32 (fp64 of fp64).

    Args:
        mask: the places of queries and keys, where `scores.visible` is to be asked. None: not.
        causal: Q equals N, and query i sees the keys to i.
    """
    if mask is None and (kernel := _kernel(query, key, value, scores)) is not None:
        key, value = _repeated(query, key, value)
        out, lse = kernel.forward(query, key, value, causal, scores.scale)
        return out.to(_wide(query)), lse.to(_wide(query))
    wide = _wide(query)
    rows, heads, length, _ = query.shape
    out = query.new_zeros(rows, heads, length, value.shape[-1], dtype=wide)
    lse = query.new_full((rows, heads, length), -math.inf, dtype=wide)
    for keys in _tiles(query, key):
        s, _ = _scores(query, key[:, :, keys], scores, mask, causal, keys)
        top = s.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        tile = _weighted(p, value[:, :, keys]) / total.clamp(min=torch.finfo(wide).tiny)
        merge_parts(out, lse, tile, (total.log() + top).squeeze(-1))
    return out, lse


def merge_parts(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add a part to what there is, in place."""
    both = torch.logaddexp(lse, other_lse)
    safe = torch.where(both == -math.inf, torch.zeros_like(both), both)
    out.mul_((lse - safe).exp().unsqueeze(-1)).add_(other * (other_lse - safe).exp().unsqueeze(-1))
    lse.copy_(both)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where in the whole sequence a part's queries [Q] and keys [N] are."""

    queries: Tensor
    keys: Tensor


@dataclasses.dataclass(frozen=True)
class WholeAttention:
    """What backward of every part needs of the whole.

    Attributes:
        grad: of the output, [B, A, Q, E], in the query's dtype. out: the output, the same.
        lse: [B, A, Q], of the keys and sinks. delta: [B, A, Q], the sum of grad * out.
    """

    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor

    def last(self, count: int) -> WholeAttention:
        """Of the last `count` queries."""
        return WholeAttention(
            self.grad[:, :, -count:], self.out[:, :, -count:], self.lse[:, :, -count:],
            self.delta[:, :, -count:],
        )  # fmt: skip


def attend_backward(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, whole: WholeAttention, scores: Scores,
    mask: Places | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients that come through one part, in fp32: of query, key and value."""
    groups = query.shape[1] // key.shape[1]
    if mask is None and (kernel := _kernel(query, key, value, scores)) is not None:
        more = _repeated(query, key, value)
        dq, dk, dv = kernel.backward(query, *more, whole, causal, scores.scale)
        wide = _wide(query)
        return dq.to(wide), _summed(dk.to(wide), groups), _summed(dv.to(wide), groups)
    wide = _wide(query)
    dq = torch.zeros_like(query, dtype=wide)
    dk, dv = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    lse = torch.where(whole.lse == -math.inf, torch.zeros_like(whole.lse), whole.lse)
    grad = whole.grad.to(wide)
    for keys in _tiles(query, key):
        k, v = key[:, :, keys], value[:, :, keys]
        s, slope = _scores(query, k, scores, mask, causal, keys)
        p = (s - lse.unsqueeze(-1)).exp()
        dv[:, :, keys] += _summed(p.transpose(-1, -2) @ grad, groups)
        ds = p * (_products(grad, v) - whole.delta.unsqueeze(-1))
        if slope is not None:
            ds = ds * slope
        ds = ds * scores.scale
        dq += _weighted(ds, k)
        dk[:, :, keys] += _summed(ds.transpose(-1, -2) @ query.to(wide), groups)
    return dq, dk, dv


# --- the plain path --------------------------------------------------------------------------


def _tiles(query: Tensor, key: Tensor) -> Iterator[slice]:
    rows, heads, length, _ = query.shape
    size = max(1, TILE // max(1, rows * heads * length))
    for start in range(0, key.shape[2], size):
        yield slice(start, min(start + size, key.shape[2]))


def _scores(  # noqa: PLR0917
    query: Tensor, key: Tensor, scores: Scores, mask: Places | None, causal: bool, keys: slice
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scores [B, A, Q, N of the tile], -inf where nothing is seen; and the soft cap's slope."""
    s = _products(query.to(_wide(query)), key) * scores.scale
    slope = None
    if scores.softcap is not None:
        bent = (s / scores.softcap).tanh()
        s, slope = bent * scores.softcap, 1 - bent * bent
    if causal:
        at = torch.arange(query.shape[2], device=query.device)
        hidden = at.unsqueeze(1) < torch.arange(keys.start, keys.stop, device=query.device)
        s = s.masked_fill(hidden, -math.inf)
    if mask is not None and scores.visible is not None:
        s = s.masked_fill(~scores.visible(mask.queries, mask.keys[keys]), -math.inf)
    return s, slope


def _products(query: Tensor, key: Tensor) -> Tensor:
    """[B, A, Q, D] and [B, K, N, D] to [B, A, Q, N], key heads shared by A / K query heads."""
    rows, heads, length, size = query.shape
    shared = query.reshape(rows, key.shape[1], -1, size) @ key.to(query.dtype).transpose(-1, -2)
    return shared.view(rows, heads, length, -1)


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """[B, A, Q, N] and [B, K, N, E] to [B, A, Q, E]."""
    rows, heads, length, count = weights.shape
    shared = weights.reshape(rows, value.shape[1], -1, count) @ value.to(weights.dtype)
    return shared.view(rows, heads, length, -1)


def _summed(grads: Tensor, groups: int) -> Tensor:
    """[B, A, N, D] to [B, K, N, D], the sum over the query heads that share a key head."""
    rows, _, count, size = grads.shape
    return grads if groups == 1 else grads.view(rows, -1, groups, count, size).sum(2)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


# --- fused kernels ---------------------------------------------------------------------------


class _Cpu:
    """PyTorch's flash attention on CPU cores."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(query, key, value, 0.0, causal, scale=scale)
        return out, lse

    @staticmethod
    def backward(  # noqa: PLR0917
        query: Tensor, key: Tensor, value: Tensor, whole: WholeAttention, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, Tensor, Tensor] = op(
            whole.grad.contiguous(), query, key, value, whole.out.contiguous(),
            whole.lse.contiguous(), 0.0, causal, scale=scale,
        )  # fmt: skip
        return grads


class _Cuda:
    """FlashAttention in PyTorch: half precision, heads of at most 256."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention
        found = op(query, key, value, 0.0, causal, False, scale=scale)
        return found[0], found[1][:, :, : query.shape[2]]

    @staticmethod
    def backward(  # noqa: PLR0917
        query: Tensor, key: Tensor, value: Tensor, whole: WholeAttention, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is 0
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        grads: tuple[Tensor, Tensor, Tensor] = op(
            whole.grad.contiguous(), query, key, value, whole.out.contiguous(),
            whole.lse.float().contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal,
            seed, unused, scale=scale,
        )  # fmt: skip
        return grads


def _kernel(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Any:
    """The fused kernel of a part without a mask; None: there is none."""
    if scores.softcap is not None or key.shape[-1] != value.shape[-1]:
        return None
    if query.device.type == "cpu":
        return _Cpu
    half = query.dtype in (torch.float16, torch.bfloat16)
    size = key.shape[-1]
    return _Cuda if query.is_cuda and half and size % 8 == 0 and size <= 256 else None
