"""A frozen base in 4 bits: QLoRA (Dettmers et al. 2023, section 3).

    weight [out, in] in bf16    ->  two values of 4 bits in a byte, NF4      0.5 bytes an entry
                                    the largest of each block of 64, fp32    0.0625 bytes an entry

    forward    y  = x dequantize(W)'        the whole weight exists while it is multiplied,
    backward   dx = dy dequantize(W)        and is made again in backward

Blocks of 64 go along the inputs, and a shard of tp has whole blocks or is rejected: the shard of
the quantized weight is the quantized shard, so that a layout does not change the values. Rounding
and unpacking are bitsandbytes'. GPT-2's layers, whose weight is [in, out], are stored as [out, in].
Adapters, norms, embedding, head and stacked experts keep their precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.linear import block_linears, deferrable, is_transposed
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.stage import Stage
from hocket.spec.errors import LayoutError, ModelError, OptionError
from hocket.spec.imports import plain_bitsandbytes
from hocket.spec.install import install_line

BLOCK = 64
"""Entries that share a scale (section 3 of the paper)."""

Fill = Callable[[Iterable[str]], None]


@functools.cache
def load_library() -> Any:
    """The functions of bitsandbytes.

    It registers its CUDA operators if CUDA is there when it is imported, so a rehearsal calls this
    before it makes up a device.

    Raises:
        OptionError: bitsandbytes is not installed.
    """
    try:
        with plain_bitsandbytes():
            import bitsandbytes.functional as functions
    except ImportError as error:
        raise OptionError(
            f"bitsandbytes cannot be imported: {error}",
            hint=install_line("lora"),
        ) from None
    return functions


class _Frozen(torch.autograd.Function):
    """`x` [..., in] times a frozen weight [out, in], which is dequantized for each use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(packed)
        ctx.state = state
        y: Tensor = x @ load_library().dequantize_4bit(packed, state).to(x.dtype).t()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (packed,) = ctx.saved_tensors
        return grad @ load_library().dequantize_4bit(packed, ctx.state).to(grad.dtype), None, None


def quantize_base(parallel: Parallel, fills: Iterable[Fill] = ()) -> None:
    """Quantize the frozen linear layers of a rank's blocks, one after the other, in place.

    To be called after `lora.adapt`, before `Parallel.finish`.

    Args:
        fills: for each stage, what gives parameters of these names their values, so that never
            more than one of them is whole; empty: they have them.

    Raises:
        OptionError: bitsandbytes is not installed.
        LayoutError: a shard whose inputs are not whole blocks.
        ModelError: no linear layer inside the blocks.
    """
    load_library()
    require_whole_blocks(parallel)
    given = list(fills)
    for index, stage in enumerate(parallel.stages):
        for name, layer in _layers(parallel, stage):
            if given:
                given[index]([f"{name}.weight"])
            _quantize(layer)


def require_whole_blocks(parallel: Parallel) -> None:
    """Reject a rank's part of a model that cannot be quantized; values are not looked at.

    Raises:
        LayoutError, ModelError: as `quantize_base`.
    """
    layers = [found for stage in parallel.stages for found in _layers(parallel, stage)]
    for name, layer in layers:
        inputs = layer.weight.shape[0 if is_transposed(layer) else 1]
        if inputs % BLOCK:
            raise LayoutError(
                f"{name} has {inputs} inputs on this rank; --quantize-base stores blocks of "
                f"{BLOCK}, which must divide them",
                hint="a smaller tp, or leave --quantize-base out",
            )
    if not layers:
        raise ModelError(
            "the blocks of this model have no linear layer of their own, which is what "
            "--quantize-base stores in 4 bits",
            hint="leave --quantize-base out",
        )


def _layers(parallel: Parallel, stage: Stage) -> Iterator[tuple[str, Any]]:
    """The frozen linear layers of a stage's blocks, by name; adapters are none."""
    assert parallel.plan.stages is not None
    for name, layer in block_linears(stage.module, parallel.plan.stages.layers):
        if not layer.weight.requires_grad:
            yield name, layer


def _quantize(layer: Any) -> None:
    weight = layer.weight.detach()
    packed, state = load_library().quantize_4bit(
        weight.t().contiguous() if is_transposed(layer) else weight,
        blocksize=BLOCK, quant_type="nf4",
    )  # fmt: skip
    layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    layer.register_buffer("weight_scales", state.absmax, persistent=False)
    layer.__class__ = deferrable(type(layer))
    layer.product = functools.partial(_multiply, layer, state)


def _multiply(layer: Any, state: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The product of a layer, whatever `linear` makes of its packed weight."""
    y: Tensor = _Frozen.apply(x, layer.weight, state)  # type: ignore[no-untyped-call]
    return y
