"""Blocks: attention between some queries and some keys, with what it takes to add blocks up.

    lse = log sum exp(scores)      out = sum exp(scores - lse) v
    two blocks of the same queries:  lse = logaddexp(lse1, lse2)
                                     out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

(Milakov and Gimelshein 2018, arXiv:1805.02867; in blocks of a sequence Liu et al. 2023,
arXiv:2310.01889.) The backward of one block needs the whole out and lse of its queries only (Dao et
al. 2022, arXiv:2205.14135, algorithm 4). PyTorch's fused kernels return lse and take both; where
they do not take a block (windows, documents, soft caps, heads of unequal sizes), matrix products of
some queries at a time do it.

Legend: B rows, A query heads, K key/value heads, q queries, k keys, D and E sizes of keys and
values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

_QUERIES = 1024
"""Queries whose scores are held at once where no fused kernel takes a block."""

_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are made of queries and keys.

    Attributes:
        scale: of the products.
        softcap: bound of the scores, by a hyperbolic tangent. None: none.
    """

    scale: float
    softcap: float | None = None


Visible = Tensor | bool
"""What queries see: True: every key; False: keys up to their own place (q = k); or a mask
[B or 1, 1, q, k]."""


def forward(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, visible: Visible
) -> tuple[Tensor, Tensor]:
    """Attention of query [B, A, q, D] to key [B, K, k, D] and value [B, K, k, E].

    Returns:
        out [B, A, q, E] and lse [B, A, q], in fp32 or wider; 0 and -inf where a query sees no key.
    """
    key, value = _repeated(key, query), _repeated(value, query)
    if _fused(query, value, scores, visible):
        found = _FORWARD[_kernel(query)](query, key, value, not visible, scores.scale)
        return _wide(found[0]), _wide(found[1])
    outs, lses = [], []
    for start in range(0, query.shape[2], _QUERIES):
        rows = slice(start, min(start + _QUERIES, query.shape[2]))
        weight, lse = _weights(query[:, :, rows], key, scores, _rows(visible, rows, key), None)
        outs.append(weight @ _wide(value))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(  # noqa: PLR0917  the order of a kernel
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [B, A, q, D], [B, K, k, D], [B, K, k, E] of one block, in fp32 or wider.

    Args:
        grad: of the whole out [B, A, q, E].
        out, lse: of all blocks of these queries together.
    """
    heads = key.shape[1]
    key, value = _repeated(key, query), _repeated(value, query)
    if _fused(query, value, scores, visible):
        found = _BACKWARD[_kernel(query)](
            grad.to(query.dtype), query, key, value, out.to(query.dtype), lse.contiguous(),
            not visible, scores.scale,
        )  # fmt: skip
        dquery, dkey, dvalue = (_wide(each) for each in found)
    else:
        grad = _wide(grad)
        dkey = torch.zeros_like(key, dtype=grad.dtype)
        dvalue = torch.zeros_like(value, dtype=grad.dtype)
        parts = []
        for start in range(0, query.shape[2], _QUERIES):
            rows = slice(start, min(start + _QUERIES, query.shape[2]))
            some = query[:, :, rows]
            weight, _ = _weights(some, key, scores, _rows(visible, rows, key), lse[:, :, rows])
            dvalue += weight.mT @ grad[:, :, rows]
            delta = (grad[:, :, rows] * _wide(out[:, :, rows])).sum(-1, keepdim=True)
            dscore = weight * (grad[:, :, rows] @ _wide(value).mT - delta)
            if scores.softcap is not None:
                capped = torch.tanh(_products(some, key, scores) / scores.softcap)
                dscore = dscore * (1 - capped * capped)
            dscore = dscore * scores.scale
            parts.append(dscore @ _wide(key))
            dkey += dscore.mT @ _wide(some)
        dquery = torch.cat(parts, 2)
    return dquery, _summed(dkey, heads), _summed(dvalue, heads)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries as one: out [.., q, E] and lse [.., q]."""
    both = torch.logaddexp(lse, other_lse)
    safe = torch.where(both.isneginf(), torch.zeros_like(both), both)
    return (
        out * torch.exp(lse - safe).unsqueeze(-1)
        + other * torch.exp(other_lse - safe).unsqueeze(-1)
    ), both


def _weights(
    query: Tensor, key: Tensor, scores: Scores, visible: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) [B, A, q, k], and lse; None: that of these scores."""
    found = _products(query, key, scores)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if visible is not None:
        found = found.masked_fill(~visible, -torch.inf)
    if lse is None:
        lse = torch.logsumexp(found, -1)
    safe = torch.where(lse.isneginf(), torch.zeros_like(lse), lse)
    return torch.exp(found - safe.unsqueeze(-1)), lse


def _products(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    return (_wide(query) * scores.scale) @ _wide(key).mT


def _rows(visible: Visible, rows: slice, key: Tensor) -> Tensor | None:
    """The mask of some queries; None: they see every key."""
    if isinstance(visible, Tensor):
        return visible[:, :, rows]
    if visible:
        return None
    place = torch.arange(key.shape[2], device=key.device)
    return (place <= place[rows].unsqueeze(1)).view(1, 1, -1, key.shape[2])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """Key/value heads, each as often as query heads share it."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of each key/value head: the sum over the query heads that share it."""
    if grad.shape[1] == heads:
        return grad
    return grad.view(len(grad), heads, -1, *grad.shape[2:]).sum(2)


# --- fused kernels -----------------------------------------------------------------------------


def _fused(query: Tensor, value: Tensor, scores: Scores, visible: Visible) -> bool:
    return (
        isinstance(visible, bool)
        and scores.softcap is None
        and query.shape[-1] == value.shape[-1]
        and (not query.is_cuda or (query.dtype != torch.float64 and query.shape[-1] % 8 == 0))
    )


def _kernel(query: Tensor) -> str:
    """`cpu`, `flash` (half precision) or `efficient` (the rest of CUDA)."""
    if not query.is_cuda:
        return "cpu"
    half = query.dtype in _HALF and query.shape[-1] <= _WIDEST_FLASH
    return "flash" if half else "efficient"


_aten: Any = torch.ops.aten


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _backward_cpu(  # noqa: PLR0917
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> Any:  # fmt: skip
    # The operator reads dense rows, whatever the strides say.
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(t.contiguous() for t in (grad, q, k, v, out)), lse, 0.0, causal, scale=scale
    )


def _forward_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _backward_flash(  # noqa: PLR0917
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> Any:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64)  # of dropout, of which there is none
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed,
        scale=scale,
    )  # fmt: skip


def _forward_efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # it is padded to a multiple of 32


def _backward_efficient(  # noqa: PLR0917
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> Any:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
    return _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal,
        scale=scale,
    )[:3]  # fmt: skip


_FORWARD = {"cpu": _forward_cpu, "flash": _forward_flash, "efficient": _forward_efficient}
_BACKWARD = {"cpu": _backward_cpu, "flash": _backward_flash, "efficient": _backward_efficient}
