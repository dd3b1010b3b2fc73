"""A frozen base in 4 bits: QLoRA (Dettmers et al. 2023, section 3).

    weight [out, in] in bf16    ->  two values of 4 bits in a byte, NF4      0.5 bytes an entry
                                    the largest of each block of 64, fp32    0.0625 bytes an entry

    forward    y  = x dequantize(W)'        the whole weight exists while it is multiplied,
    backward   dx = dy dequantize(W)        and is made again in backward

Blocks of 64 go along the inputs, and a shard of tp has whole blocks or is rejected: the shard of
the quantized weight is the quantized shard, so that a layout does not change the values. Rounding
and unpacking are bitsandbytes'. Adapters, norms, embedding and head keep their precision.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.linear import DeferrableLinear
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.stage import Stage
from hocket.spec.errors import LayoutError, ModelError, OptionError

BLOCK = 64
"""Entries that share a scale (section 3 of the paper)."""

Fill = Callable[[Iterable[str]], None]


@functools.cache
def load_library() -> Any:
    """The functions of bitsandbytes.

    It registers its CUDA operators if CUDA is there when it is imported, so a rehearsal calls this
    before it makes up a device. Where the package `kernels` is installed, the import would download
    and run a kernel of the Hub on some CPUs; it is kept from that.

    Raises:
        OptionError: bitsandbytes is not installed.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    absent = sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    try:
        import bitsandbytes.functional as functions
    except ImportError as error:
        raise OptionError(
            f"a base in 4 bits needs bitsandbytes, which cannot be imported: {error}",
            hint="pip install 'hocket[lora]'",
        ) from None
    finally:
        if absent is None:
            del sys.modules["kernels"]
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
    given = list(fills)
    found = 0
    for index, stage in enumerate(parallel.stages):
        found += _quantize(parallel, stage, given[index] if given else None)
    if not found:
        raise ModelError(
            "the blocks of this model have no torch.nn.Linear, which is what --quantize-base "
            "stores in 4 bits",
            hint="leave --quantize-base out",
        )


def _quantize(parallel: Parallel, stage: Stage, fill: Fill | None) -> int:
    """One stage's layers; how many they are."""
    assert parallel.plan.stages is not None
    count = 0
    blocks = parallel.plan.stages.layers
    child: Any
    for name, child in stage.module.get_submodule(blocks).named_modules(prefix=blocks):
        if not isinstance(child, nn.Linear) or ".lora_" in name:
            continue
        weight = child._parameters.get("weight")
        if weight is None or weight.requires_grad:
            continue
        if weight.shape[1] % BLOCK:
            raise LayoutError(
                f"{name} has {weight.shape[1]} inputs on this rank; --quantize-base stores blocks "
                f"of {BLOCK}, which must divide them",
                hint="a smaller tp, or leave --quantize-base out",
            )
        if fill is not None:
            fill([f"{name}.weight"])
        packed, state = load_library().quantize_4bit(
            child.weight.detach(), blocksize=BLOCK, quant_type="nf4"
        )
        child._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        child.register_buffer("weight_scales", state.absmax, persistent=False)
        if type(child) is nn.Linear:
            child.__class__ = DeferrableLinear
        multiply: Any = functools.partial(_multiply, child, state)
        child.product = multiply
        count += 1
    return count


def _multiply(layer: Any, state: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The product of a layer, whatever `linear` makes of its packed weight."""
    y: Tensor = _Frozen.apply(x, layer.weight, state)  # type: ignore[no-untyped-call]
    return y
