"""What ranks run in the tests of attention over context ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.context_parallel import ContextParallel
from hocket.runtime.context_parallel.split import token_indices
from hocket.runtime.mesh import Mesh
from hocket.spec.layout import Layout

ROWS, LENGTH = 2, 24


def tensors(heads: int, key_heads: int, size: int, value: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, sinks and a gradient of whole sequences."""
    draw = torch.Generator().manual_seed(7)
    shapes = [(heads, size), (key_heads, size), (key_heads, value)]
    found = [torch.randn(ROWS, h, LENGTH, d, generator=draw, dtype=dtype) for h, d in shapes]
    found.append(torch.randn(heads, generator=draw, dtype=dtype))
    found.append(torch.randn(ROWS, heads, LENGTH, value, generator=draw, dtype=dtype))
    return found


def seen(kind: str) -> Tensor:
    """[B, 1, S, S], by a loop over all pairs."""
    found = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    for row in range(ROWS):
        for query in range(LENGTH):
            for key in range(query + 1):
                if kind == "window":
                    found[row, 0, query, key] = query - key < 5
                elif kind == "one":
                    found[row, 0, query, key] = query == key
                elif kind == "documents":
                    ends = [0, 7, 8, 20 + row, LENGTH]
                    document = [sum(end <= at for end in ends) for at in (query, key)]
                    found[row, 0, query, key] = document[0] == document[1]
                elif kind == "padding":  # on the left: the first queries see nothing
                    found[row, 0, query, key] = key >= 9 * row
                else:
                    found[row, 0, query, key] = True
    return found


def plain(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor,
    softcap: float | None, scale: float,
) -> Tensor:  # fmt: skip
    """Written out over the whole S x S; a query that sees nothing gives zeros."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scale * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1).nan_to_num(0.0) @ value


def gaps(context: Any, kind: str, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case the largest difference from plain torch: of the output and each gradient."""
    mesh = Mesh(Layout(cp=context.world_size), context.rank)
    axis = mesh.axis("cp")
    here = token_indices(LENGTH, axis.index, axis.size)
    found = []
    for case in cases:
        dtype = getattr(torch, case.get("dtype", "float32"))
        *given, grad = tensors(
            case.get("heads", 4), case.get("key_heads", 2), 8, case.get("value", 8), dtype
        )
        reference = torch.float32 if dtype == torch.bfloat16 else dtype
        sinks = case.get("sinks", False)
        whole = [t.to(reference, copy=True).requires_grad_() for t in given]
        mask = seen(case.get("mask", ""))
        softcap = case.get("softcap")
        expected = plain(*whole[:3], whole[3] if sinks else None, mask, softcap, 0.3)
        expected.backward(grad.to(reference))

        part = [t[:, :, here].clone().requires_grad_() for t in given[:3]]
        part.append(given[3].clone().requires_grad_())

        def visible(queries: Tensor, keys: Tensor, mask: Tensor = mask) -> Tensor:
            return mask[:, :, queries][..., keys]

        attention = ContextParallel(axis, mesh.recorder, kind)
        out = attention(
            *part[:3], scale=0.3, softcap=softcap, sinks=part[3] if sinks else None,
            visible=visible if case.get("mask") else None,
        )  # fmt: skip
        out.backward(grad[:, :, here])
        off = {"out": _gap(out, expected[:, :, here])}
        for name, mine, theirs in zip("qkv", part, whole, strict=False):
            off[name] = _gap(mine.grad, theirs.grad[:, :, here])
        if sinks:
            total = part[3].grad.clone()
            from hocket.runtime.collectives import all_reduce

            all_reduce(total, axis, mesh.recorder)
            off["sinks"] = _gap(total, whole[3].grad)
        found.append(off)
    return found


def _gap(mine: Tensor, theirs: Tensor) -> float:
    """Of the largest entry; of 1 where a gradient is nothing (softmax of one score)."""
    return float((mine - theirs).detach().abs().max() / theirs.detach().abs().max().clamp(min=0.1))


def sent(context: Any, kind: str) -> list[dict[str, Any]]:
    """What one attention forward and backward sends."""
    mesh = Mesh(Layout(cp=context.world_size), context.rank)
    axis = mesh.axis("cp")
    here = token_indices(LENGTH, axis.index, axis.size)
    *given, _, grad = tensors(4, 4, 8, 8, torch.float32)
    part = [t[:, :, here].clone().requires_grad_() for t in given]
    with mesh.recorder.in_phase("microbatch"):
        out = ContextParallel(axis, mesh.recorder, kind)(*part)
        out.backward(grad[:, :, here])
    return mesh.recorder.collectives()
