"""What ranks run in the tests of context parallelism: attention of a shard, against plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather, all_reduce
from hocket.runtime.context_parallel import Ring, Ulysses
from hocket.runtime.context_parallel.zigzag import gathered_order, positions
from hocket.runtime.mesh import Mesh
from hocket.spec.layout import Layout

METHODS = {"ring": Ring, "ulysses": Ulysses}


def reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None, lowest: Tensor,
) -> Tensor:  # fmt: skip
    """Attention written out, of whole sequences; `lowest` [B, S]."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(query.shape[2])
    seen = (place <= place[:, None]) & (place >= lowest[:, :, None])
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def attention(
    context: Any,
    *,
    method: str,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    length: int = 32,
    dtype: str = "float64",
    softcap: float | None = None,
    with_sinks: bool = False,
    window: int | None = None,
    documents: bool = False,
    scale: float | None = None,
) -> dict[str, float]:
    """The largest difference of the output and of each gradient, from whole sequences."""
    kind, rows = getattr(torch, dtype), 2
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(kind)

    query = random(rows, heads[0], length, sizes[0])
    key = random(rows, heads[1], length, sizes[0])
    value = random(rows, heads[1], length, sizes[1])
    grad = random(rows, heads[0], length, sizes[1])
    sinks = random(heads[0]) if with_sinks else None
    place = torch.arange(length)
    lowest = torch.zeros(rows, length, dtype=torch.int64)
    if documents:
        for row, starts in enumerate(((0, 5, 6, 19), (0, 27))):
            for start in starts:
                lowest[row, start:] = start
    if window is not None:
        lowest = torch.maximum(lowest, place - (window - 1))
    given = [t.clone().requires_grad_() for t in (query, key, value)]
    sink = None if sinks is None else sinks.clone().requires_grad_()
    factor = sizes[0] ** -0.5 if scale is None else scale
    wanted = reference(*given, factor, softcap, sink, lowest)
    wanted.backward(grad)

    mesh = Mesh(Layout(cp=context.world_size), context.rank)
    axis = mesh.axis("cp")
    mine = positions(length, axis.index, axis.size)
    own = [t[:, :, mine].clone().requires_grad_() for t in (query, key, value)]
    own_sink = None if sinks is None else sinks.clone().requires_grad_()
    found = METHODS[method](axis, mesh.recorder).attend(
        *own, scale=scale, softcap=softcap, sinks=own_sink,
        lowest=lowest[:, mine] if documents or window is not None else None,
    )  # fmt: skip
    assert found.dtype == kind
    found.backward(grad[:, :, mine])
    result = {"out": _far(found, wanted[:, :, mine])}
    for name, part, whole in zip(("query", "key", "value"), own, given, strict=True):
        assert part.grad is not None
        assert whole.grad is not None
        result[name] = _far(part.grad, whole.grad[:, :, mine])
    if own_sink is not None:
        assert sink is not None
        assert sink.grad is not None
        assert own_sink.grad is not None
        total = own_sink.grad.clone()
        all_reduce(total, axis, mesh.recorder)
        result["sinks"] = _far(total, sink.grad)
    order = gathered_order(length, axis.size, torch.device("cpu"))
    every = all_gather(mine, axis, mesh.recorder)[order]
    result["order"] = float((every != place).sum())
    sent = sum(r["bytes"] for r in mesh.recorder.collectives() if r["name"] == "all-to-all")
    result["bytes"] = float(sent)
    return result


def _far(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).abs().max())
