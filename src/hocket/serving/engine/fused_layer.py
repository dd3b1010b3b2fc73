"""Whole decoder layers with less between their products, on a CPU in fp32.

    norm            kernel
    q k v           one product
    attention       one kernel: turned by position, stored, attended     (rows that decode)
    o               one product, added to what came in
    norm            kernel
    gate up         one product
    silu            kernel
    down            one product, added

That is what Llama's layers compute, and those of the families that were made after it. With few
rows a step's time is mostly that of the calls between its products: sixty of them a layer in the
family's own code. Where rows decode, one call may do all of it (`whole_layer`). A layer is replaced
only if it gives the same numbers as that code, and hands the same queries, keys and values to its
attention. Tensor ranks try it together: all ways have as many sums between them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.native.kernels import CpuKernels, kernels_take
from hocket.runtime.native.sums import Sums
from hocket.runtime.tensor_parallel.layers import RowParallelLinear
from hocket.serving.engine import attention
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_cpu import CpuAttention
from hocket.serving.engine.fused import Gated, Norm, hooked, swap
from hocket.serving.engine.gemm_select import ChosenLinear, SelectedGemm, exactly
from hocket.serving.engine.projections import Merged, MergedLinear
from hocket.serving.engine.whole_layer import WholeLayer

_ENDS = (nn.Linear, ChosenLinear, RowParallelLinear)
_CLOSE = 2e-5
"""Differences over the root mean square of a layer's result, in which sums of thousands of products
were added in two orders: 3e-6 with 4096 inputs and 14336 between."""


@dataclasses.dataclass
class _Parts:
    """What a layer is made of.

    Attributes:
        qkv, gate_up: merged products.
        heads: query heads, key/value heads, size of a head.
        options: what its attention asks for.
        out, down: products that are added to the residual at once, or weights [in, out] of such;
            None: the module's own way is taken, since it has a bias or is split.
        whole: all of it for rows that decode; None: a product of it is torch's.
    """

    kernels: CpuKernels
    qkv: Merged
    gate_up: Merged
    heads: tuple[int, int, int]
    options: Options
    out: SelectedGemm | Tensor | None
    down: SelectedGemm | Tensor | None
    whole: WholeLayer | None = None


class _Layer(nn.Module):
    """A decoder layer (by class swap)."""

    input_layernorm: Norm
    post_attention_layernorm: Norm
    self_attn: Any
    mlp: Any
    parts: _Parts

    def forward(self, hidden_states: Tensor, *args: Any, **others: Any) -> Any:
        made = None if args else self._made(hidden_states, others.get("position_embeddings"))
        return super().forward(hidden_states, *args, **others) if made is None else made

    def _made(self, h: Tensor, positions: tuple[Tensor, Tensor] | None) -> Tensor | None:
        parts, step = self.parts, attention.active()
        tokens = h.shape[1] if h.dim() == 3 and h.shape[0] == 1 else 0
        if not tokens or not isinstance(step, CpuAttention) or positions is None:
            return None
        cos, sin = positions
        shape = (1, tokens, parts.heads[2])
        if cos.shape != shape or sin.shape != shape or not kernels_take(h, cos, sin):
            return None
        if not (cos.is_contiguous() and sin.is_contiguous()):
            return None
        if parts.whole is not None:
            found = step.whole_layer(parts.whole, h, positions)
            if found is not None:
                return found
        merged = parts.qkv.product(self.input_layernorm.forward(h), parts.qkv.bias)
        attended = step.attend_merged(merged[0], positions, parts.heads, parts.options)
        if attended is None:
            return None
        x = _added(h[0], attended, parts.out, self.self_attn.o_proj)
        y = self.post_attention_layernorm.forward(x.unsqueeze(0))
        gate, up = parts.gate_up.product(y, parts.gate_up.bias).split(parts.gate_up.sizes, -1)  # type: ignore[no-untyped-call]
        between = parts.kernels.silu_product(gate, up)[0]
        return _added(x, between, parts.down, self.mlp.down_proj).view(h.shape)


def _added(x: Tensor, y: Tensor, end: SelectedGemm | Tensor | None, module: nn.Module) -> Tensor:
    """`x` [T, H] and what a product makes of `y`."""
    if isinstance(end, SelectedGemm):
        return end(y, x)
    if end is not None:
        return torch.addmm(x, y, end)
    return x + module(y.unsqueeze(0))[0]  # type: ignore[no-any-return]


@torch.inference_mode()
def fuse_layers(module: nn.Module, kernels: CpuKernels) -> int:
    """Replace the decoder layers of a module that can be, in place; how many were.

    Call after `fused.fuse`; collective over the tensor ranks, all of which must have kernels.
    """
    with exactly():
        return sum(_fuse_layer(child, kernels) for child in list(module.modules()))


def _fuse_layer(child: Any, kernels: CpuKernels) -> bool:
    self_attn, mlp = getattr(child, "self_attn", None), getattr(child, "mlp", None)
    norms: list[Any] = [
        getattr(child, f"{name}_layernorm", None) for name in ("input", "post_attention")
    ]
    if isinstance(child, _Layer) or not isinstance(mlp, Gated) or hooked(child):
        return False
    if not all(isinstance(norm, Norm) for norm in norms) or len(child._modules) != 4:
        return False
    qkv = _merged(self_attn, ("q_proj", "k_proj", "v_proj"))
    gate_up = _merged(mlp, ("gate_proj", "up_proj"))
    size = getattr(self_attn, "head_dim", None)
    ends: list[Any] = [getattr(self_attn, "o_proj", None), mlp.down_proj]
    plain = all(type(one) in _ENDS and not hooked(one) for one in ends)
    if qkv is None or gate_up is None or not isinstance(size, int) or not plain:
        return False
    heads = (qkv.sizes[0] // size, qkv.sizes[1] // size, size)
    probe = _Probe(qkv.sizes)
    x = torch.randn(1, 3, qkv.weight.shape[1], generator=torch.Generator().manual_seed(0))
    angles = torch.rand(1, 3, size // 2, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 2)
    positions = (angles.cos(), angles.sin())
    try:
        with attention.attending(probe):
            expected = child(x, position_embeddings=positions)
    except Exception:  # whatever else has parts of these names
        return False
    if probe.options is None or probe.options.softcap or not isinstance(expected, Tensor):
        return False
    out, down = (_end(one) for one in ends)
    parts = _Parts(kernels, qkv, gate_up, heads, probe.options, out, down)
    parts.whole = _whole(parts, norms, ends)
    # What the probe makes of query, key and value, of the same made here.
    merged = qkv.product(norms[0].forward(x), qkv.bias).view(1, 3, -1, size).transpose(1, 2)
    query, key = merged[:, : heads[0]], merged[:, heads[0] : heads[0] + heads[1]]
    query, key = kernels.rotate(query, key, *positions)
    attended = probe.attend(child, query, key, merged[:, sum(heads[:2]) :], probe.options)
    h = _added(x[0], attended.reshape(3, -1), parts.out, ends[0])
    made = h + mlp(norms[1].forward(h.unsqueeze(0)))[0]
    if not _same(made.unsqueeze(0), expected):
        return False
    swap(child, _Layer)
    child.parts = parts
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two ways to compute a layer gave the same, but for the order of their sums."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one - other).abs().max() <= _CLOSE * other.square().mean().sqrt())


class _Probe:
    """Stands for attention: keeps what it is asked for, and mixes all that it is given."""

    def __init__(self, sizes: list[int]) -> None:
        self.group = sizes[0] // sizes[1]
        self.options: Options | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        self.options = options
        mixed = key.flip(2) + 0.5 * value.roll(1, 2)
        return (query + mixed.repeat_interleave(self.group, 1)).transpose(1, 2)


def _merged(parent: Any, names: tuple[str, ...]) -> Merged | None:
    """The merged product of some projections, where all of it is theirs, in this order."""
    parts: list[Any] = [getattr(parent, name, None) for name in names]
    if not all(isinstance(part, MergedLinear) and not hooked(part) for part in parts):
        return None
    found: Merged = parts[0].merged
    whole = [part.part for part in parts] == list(range(len(found.sizes)))
    return found if whole and all(part.merged is found for part in parts) else None


def _whole(parts: _Parts, norms: list[Any], ends: list[Any]) -> WholeLayer | None:
    """A layer's parts in one call; None where the kernel cannot do one of them."""
    split = [isinstance(one, RowParallelLinear) for one in ends]
    sums = getattr(ends[0], "summed", None)
    if any(split) and not (all(split) and isinstance(sums, Sums)):
        return None
    if any(one.bias is not None or getattr(one, "scatter", None) is not None for one in ends):
        return None
    merged, gate_up = parts.qkv, parts.gate_up
    out, down = (getattr(one, "held", None) for one in ends)
    products: Any = (merged.product, out, gate_up.product, down)
    halves = gate_up.sizes[0] == gate_up.sizes[1]
    if not halves or not all(isinstance(one, SelectedGemm) and one.kernels for one in products):
        return None
    return WholeLayer(
        parts.kernels,
        (norms[0], norms[1]),
        products,
        biases=(merged.bias, gate_up.bias),
        heads=parts.heads,
        options=parts.options,
        sums=sums,
    )


def _end(linear: Any) -> SelectedGemm | Tensor | None:
    if linear.bias is not None:
        return None
    if isinstance(linear, ChosenLinear):
        return linear.held
    return linear.weight.t() if type(linear) is nn.Linear else None
