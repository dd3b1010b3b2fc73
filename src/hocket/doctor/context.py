"""Context-parallel checks: attention in parts, and its ring of keys and values between GPUs.

Layouts with cp are rows of `multi_gpu`, the order of their collectives one of `rehearsed`.

Not executed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, row_of
from hocket.doctor.place import Place
from hocket.doctor.world import join, ranks, tell, timed

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext

_HERE = "hocket.doctor.context:"
LIMIT = 2e-2
"""Largest difference in bf16, relative to the largest entry."""
HIDDEN = 0.6
"""Share of the ring's communication that attention is to hide."""
COUNT = 2

_kernel = row_of("hocket.doctor.context", prefix="kernel-", group="kernels", seconds=0.3)
_row = row_of("hocket.doctor.context", group="multi-gpu", gpus=COUNT, timeout=240.0, slow=True)

CHECKS = (
    _kernel(
        "attention-parts-bf16", "causal attention of two halves of the keys, merged by their "
        "log-sum-exp, forward and backward, compared with attention to all keys", "attention_parts",
        f"differences of at most {LIMIT:g} of the largest entry", capability=(8, 0),
        rehearsals=(CPU, FAKE),
    ),
    *(
        _row(
            f"context-{name}", f"attention of 2 x 16,384 tokens over two GPUs, {what}: forward and "
            "backward, compared with one GPU; its seconds, those of the computation and of the "
            "communication alone", "ring_attention",
            f"differences of at most {LIMIT:g} of the largest "
            f"entry; {HIDDEN:.0%} or more of the ring's communication is hidden",
            arguments={"method": name}, capability=(8, 0), seconds=30.0,
        )
        for name, what in (
            ("ring", "keys and values in a ring"), ("ulysses", "heads exchanged for tokens"),
        )
    ),
)  # fmt: skip


def attention_parts(place: Place) -> CheckOutcome:
    """Both halves of the keys by the kernel of a ring's step, and PyTorch's attention."""
    import torch

    from hocket.runtime.context_parallel.attend import (
        Scores,
        WholeAttention,
        attend_backward,
        attend_part,
        merge_parts,
    )

    rows, heads, kv_heads, length, size = place.size((2, 16, 4, 2048, 128), (1, 4, 2, 32, 16))
    query, key, value = (
        place.draw(rows, count, length, size, dtype=torch.bfloat16, seed=seed, grad=True)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    grad = place.draw(rows, heads, length, size, dtype=torch.bfloat16, seed=3)
    scores, half = Scores(scale=size**-0.5), length // 2
    with torch.no_grad():
        # The second half of the queries sees the first half of the keys, all of them; each half
        # sees its own keys causally: the two kinds of a ring's steps.
        early, late = slice(None, half), slice(half, None)
        out, lse = attend_part(
            query[:, :, early], key[:, :, early], value[:, :, early], scores, None, True
        )
        own, own_lse = attend_part(
            query[:, :, late], key[:, :, late], value[:, :, late], scores, None, True
        )
        seeing = query[:, :, late]
        found, found_lse = attend_part(
            seeing, key[:, :, early], value[:, :, early], scores, None, False
        )
        merge_parts(own, own_lse, found, found_lse)
        whole_out, whole_lse = torch.cat([out, own], 2), torch.cat([lse, own_lse], 2)
        delta = (grad.float() * whole_out).sum(-1)
        whole = WholeAttention(grad, whole_out.to(grad.dtype), whole_lse, delta)
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]

        def add(queries: slice, keys: slice, causal: bool) -> None:
            of_queries = WholeAttention(
                *(x[:, :, queries] for x in (whole.grad, whole.out, whole.lse, whole.delta))
            )
            more = attend_backward(
                query[:, :, queries], key[:, :, keys].contiguous(), value[:, :, keys].contiguous(),
                of_queries, scores, None, causal,
            )  # fmt: skip
            for total, part, where in zip(gradients, more, (queries, keys, keys), strict=True):
                total[:, :, where] += part

        add(early, early, True)
        add(late, late, True)
        add(late, early, False)
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    expected = _whole(*wide)
    torch.autograd.backward(expected, grad.float())
    place.compare("output", whole_out, expected, LIMIT)
    for name, gradient, exact in zip(("query", "key", "value"), gradients, wide, strict=True):
        assert exact.grad is not None
        place.compare(f"gradient_{name}", gradient, exact.grad, LIMIT)
    return place.outcome()


def _whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention to all keys; heads are repeated, since no kernel in fp32 groups them."""
    import torch.nn.functional as F

    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True)


def ring_attention(place: Place, *, method: str) -> CheckOutcome:
    """Two ranks' attention to a whole sequence, and one rank's."""
    payload = {"method": method, "backend": place.size("nccl", "gloo")}
    found = ranks(place, _HERE + "attention_rank", COUNT, payload)
    for name in found[0]["errors"]:
        error = max(values["errors"][name] for values in found)
        place.values[f"{name}_relative_error"] = error
        if not error <= LIMIT:
            place.failures.append(f"{name} differs by {error:.2g} ({LIMIT:g})")
    step, compute, communicate = (
        max(values[name] for values in found) for name in ("step", "compute", "communicate")
    )
    place.values |= {
        "seconds": step, "computation_seconds": compute, "communication_seconds": communicate,
    }  # fmt: skip
    if method == "ring":
        place.at_least("hidden_share", (compute + communicate - step) / communicate, HIDDEN)
    return place.outcome()


def attention_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: its shards of queries, keys and values, and what the whole gives for them."""
    import torch

    from hocket.runtime.collectives import exchange
    from hocket.runtime.context_parallel.attend import Scores, attend_backward, attend_part
    from hocket.runtime.context_parallel.attend import WholeAttention as Whole
    from hocket.runtime.context_parallel.ring import Ring
    from hocket.runtime.context_parallel.split import token_indices
    from hocket.runtime.context_parallel.ulysses import ulysses
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    device = join(context, payload["backend"])
    mesh = Mesh(Layout(cp=COUNT), context.rank, device)
    context.position = mesh.position
    axis, recorder = mesh.axis("cp"), mesh.recorder
    cuda = device.type == "cuda"
    dtype = torch.bfloat16
    heads, kv_heads, length, size = (16, 8, 16384, 128) if cuda else (4, 2, 64, 16)
    rows = 2 if cuda else 1
    generator = torch.Generator().manual_seed(7)
    drawn = [
        torch.randn(rows, count, length, size, generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    mine = token_indices(length, axis.index, axis.size, device)
    own = [x[:, :, mine].contiguous() for x in drawn]
    leaves = [x.clone().requires_grad_() for x in own[:3]]
    scores = Scores(scale=size**-0.5)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor
        if payload["method"] == "ring":
            out = Ring.apply(query, key, value, None, scores, axis, recorder)  # type: ignore[no-untyped-call]
        else:
            out = ulysses(query, key, value, None, scores, axis, recorder)
        return out

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(forward(*leaves), own[3])

    out = forward(*leaves)
    torch.autograd.backward(out, own[3])
    whole = [x.float().requires_grad_() for x in drawn[:3]]
    expected = _whole(*whole)
    torch.autograd.backward(expected, drawn[3].float())
    pairs = {"output": (out, expected)}
    for name, leaf, exact in zip(("query", "key", "value"), leaves, whole, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        pairs[f"gradient_{name}"] = leaf.grad, exact.grad
    errors = {}
    for name, (found, exact) in pairs.items():
        there = exact.detach()[:, :, mine]
        error = (found.detach().float() - there).abs().max() / there.abs().max()
        errors[name] = float(error.nan_to_num(nan=float("inf")))
    del whole, expected, pairs

    half = length // axis.size // 2
    one = own[0][:, :, half:]
    keys, values = own[1:3]

    @torch.no_grad()
    def compute() -> None:  # as a step of the ring: its own block, then half a block
        for query, causal in ((own[0], True), (one, False)):
            out, lse = attend_part(query, keys, values, scores, None, causal)
            grad = own[3][:, :, -query.shape[2] :]
            delta = (grad.float() * out).sum(-1)
            attend_backward(
                query, keys, values, Whole(grad, out.to(dtype), lse, delta), scores, None, causal
            )

    held = torch.cat(own[1:3], -1)
    coming, wide = torch.empty_like(held), held.float()
    coming_wide = torch.empty_like(wide)

    def communicate() -> None:
        other = (axis.index + 1) % axis.size
        for sent, received in ((held, coming), (held, coming), (wide, coming_wide)):
            exchange(sent, received, axis, recorder, target=other, source=other).wait()

    seconds = {}
    for name, call in (("step", step), ("compute", compute), ("communicate", communicate)):
        call()
        seconds[name] = timed(call, 8 if cuda else 2, device)
    tell(context, errors=errors, **seconds)
