"""Weights in 8-bit floats, for inference: half the bytes of bf16 to hold and to stream.

    W  [out, in]  ->  e4m3 [out, in], and for each output its largest entry / 448, fp32
    x  [T, in]    ->  e4m3 [T, in], and for each row its largest entry / 448, fp32, in every step
    y = x W'          multiplied in 8 bits, summed in fp32, times both scales, in bf16 (on a CPU,
                      where the check of a server computes it, in the dtype of x)

One scale a row and a column, as vLLM's online `fp8` has with dynamic activations (Micikevicius et
al. 2022, FP8 formats for deep learning, section 3.1, has one a tensor). Linear layers inside the
blocks are stored so, and stacked experts (`fp8_experts`); embedding, output head, norms and routers
keep their precision. A rank of tp scales its own shard, so that answers of two layouts differ by
their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.fp8_experts import can_be_stored, require_grouped, stacks_of, store_experts
from hocket.runtime.linear import block_linears, deferrable, is_transposed
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.stage import Stage
from hocket.runtime.triton.quantize_rows import output_dtype, quantize_rows
from hocket.spec.capabilities import MULTIPLE_OF_8_BITS as MULTIPLE
from hocket.spec.capabilities import NOT_QUANTIZED
from hocket.spec.errors import ModelError

Fill = Callable[[Iterable[str]], None]


class Fp8Product:
    """Multiplies rows with weights in 8 bits, as `runtime.linear.linear` takes a product.

    Attributes:
        scale: [1, out] fp32, of each output.
    """

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def __call__(self, x: Tensor, weight_t: Tensor) -> Tensor:
        """`x` [..., in] times `weight_t` [in, out], a view of one stored as [out, in]."""
        rows = torch.nn.functional.ScalingType.RowWise
        few, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        y: Tensor = torch.nn.functional.scaled_mm(
            few, weight_t, scale, rows, self.scale, rows, output_dtype=output_dtype(x)
        )
        return y.view(*x.shape[:-1], -1).to(x.dtype)


def store_in_fp8(parallel: Parallel, fills: Iterable[Fill] = ()) -> list[str]:
    """Store the linear layers and stacked experts of a rank's blocks in 8 bits, one weight after
    the other, in place; to be called before `Parallel.finish`.

    Args:
        fills: for each stage, what gives parameters of these names their values, so that never
            more than one of them is whole; empty: they have them.

    Returns:
        Names of the layers, and of the stacked weights.

    Raises:
        ModelError: there is none, or the model's own code multiplies its experts.
    """
    given, done = list(fills), []
    for index, name in weights_in_8_bits(parallel):
        parent, _, own = name.rpartition(".")
        if given:
            given[index]([name])
        module: Any = parallel.stages[index].module.get_submodule(parent)
        if module._parameters[own].ndim == 3:
            store_experts(module, [own])
            done.append(name)
        else:
            _store(module)
            done.append(parent)
    return done


def weights_in_8_bits(parallel: Parallel) -> list[tuple[int, str]]:
    """Number of a rank's stage and name of each weight that `store_in_fp8` stores in 8 bits.

    Raises:
        ModelError: as of `store_in_fp8`.
    """
    found = []
    for index, stage in enumerate(parallel.stages):
        found += [(index, f"{name}.weight") for name in _layers(parallel, stage)]
        for name, experts in _experts(parallel, stage):
            require_grouped(experts)
            found += [
                (index, f"{name}.{own}")
                for own in stacks_of(experts)
                if can_be_stored(experts._parameters[own])
            ]
    if not found:
        raise ModelError(
            "the blocks of this model have no linear layer whose sides are multiples of "
            f"{MULTIPLE} on this rank, which is what --quantization fp8 stores in 8 bits",
            hint="leave --quantization out",
        )
    return found


def product_of(layers: Iterable[Any]) -> Fp8Product | None:
    """The product of layers whose weights are stored one below the other; None: not in 8 bits."""
    products = [getattr(layer, "product", None) for layer in layers]
    own = [one.scale for one in products if isinstance(one, Fp8Product)]
    return Fp8Product(torch.cat(own, dim=1)) if own and len(own) == len(products) else None


def _layers(parallel: Parallel, stage: Stage) -> Iterator[str]:
    """Names of the linear layers of a stage's blocks that are stored in 8 bits."""
    if parallel.plan.stages is None:
        return
    for name, layer in block_linears(stage.module, parallel.plan.stages.layers):
        kept = name.rpartition(".")[2] in NOT_QUANTIZED
        if not kept and not any(size % MULTIPLE for size in layer.weight.shape):
            yield name


def _experts(parallel: Parallel, stage: Stage) -> Iterator[tuple[str, Any]]:
    """The modules of stacked experts in a stage's blocks, by name."""
    if parallel.plan.stages is None:
        return
    blocks = parallel.plan.stages.layers
    for name, child in list(stage.module.get_submodule(blocks).named_modules(prefix=blocks)):
        if "expert" in f"{name} {type(child).__name__}".lower() and stacks_of(child):
            yield name, child


@torch.no_grad()
def _store(layer: Any) -> None:
    weight, transposed = layer.weight.detach(), is_transposed(layer)
    few, scale = quantize_rows(weight.t().contiguous() if transposed else weight)
    # The matmul reads [out, in], by whatever name a layer has it.
    layer._parameters["weight"] = nn.Parameter(few.t() if transposed else few, requires_grad=False)
    layer.register_buffer("weight_scales", scale.t(), persistent=False)
    layer.__class__ = deferrable(type(layer))
    layer.product = Fp8Product(layer.weight_scales)
