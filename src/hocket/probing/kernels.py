"""Kernels: attention, activations, norms and the embedding by PyTorch's own kernels, the loss by
the runtime's; each as a training step calls it.

A case is prepared outside of what is timed: it then finds in the nearest cache what the operation
before it has just written there, and no more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.probing.sizes import ProbeSizes
from hocket.runtime.mesh import Axis
from hocket.runtime.tensor_parallel import vocab_parallel_cross_entropy

ALONE = Axis("tp")


@dataclasses.dataclass(frozen=True)
class ProbedOperation:
    """An operation forward and backward: `prepare` gives what it is called with, and what its
    backward finds the gradients of; `prepared` bytes of that are new every time."""

    call: Callable[..., Tensor]
    prepare: Callable[[], Sequence[Tensor]]
    prepared: int = 0

    @classmethod
    def of(cls, call: Callable[..., Tensor], *inputs: Tensor) -> ProbedOperation:
        """One that is called with the same tensors every time."""
        return cls(call, lambda: inputs)


Make = Callable[[tuple[int, ...], str], Tensor]
"""A random tensor of a shape and a dtype."""


def kernel_cases(
    sizes: ProbeSizes, make: Make
) -> dict[tuple[str, tuple[int, ...]], ProbedOperation]:
    """By name and shape; see `spec.measured.MeasuredKernel` for the shapes."""
    dtype = sizes.dtypes[0]
    found: dict[tuple[str, tuple[int, ...]], ProbedOperation] = {}

    def leaf(*shape: int) -> Tensor:
        return make(shape, dtype).requires_grad_()

    for batch, heads, sequence, width in sizes.heads:
        # Heads of a token lie side by side, as the products before have written them.
        qkv = [leaf(batch, sequence, heads, width).transpose(1, 2) for _ in range(3)]
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        found["attention", (batch, heads, sequence, width)] = ProbedOperation.of(attend, *qkv)
    for tokens, width in sizes.widths:
        x, w = leaf(tokens, width), leaf(width)
        shape = tokens, width
        found["gelu", shape] = ProbedOperation.of(F.gelu, x)
        found["silu", shape] = ProbedOperation.of(F.silu, x)
        found["softmax", shape] = ProbedOperation.of(functools.partial(torch.softmax, dim=-1), x)
        found["rms-norm", shape] = ProbedOperation.of(functools.partial(_rms_norm, width), x, w)
        found["layer-norm", shape] = ProbedOperation.of(
            functools.partial(_layer_norm, width), x, w, leaf(width)
        )
    for tokens, vocabulary, hidden in sizes.vocabularies:
        logits = make((tokens, vocabulary), "fp32").requires_grad_()
        ids = torch.randint(vocabulary, (tokens,), device=logits.device)
        found["cross-entropy", (tokens, vocabulary)] = ProbedOperation(
            functools.partial(vocab_parallel_cross_entropy, labels=ids, axis=ALONE),
            functools.partial(_written, logits),
            logits.nbytes,
        )
        look = functools.partial(F.embedding, ids)
        found["embedding", (tokens, vocabulary, hidden)] = ProbedOperation.of(
            look, leaf(vocabulary, hidden)
        )
    return found


def _rms_norm(width: int, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (width,), weight)


def _layer_norm(width: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (width,), weight, bias)


def _written(logits: Tensor) -> tuple[Tensor]:
    """Logits that were just computed: the runtime's loss overwrites them."""
    return (logits * 1.0,)
