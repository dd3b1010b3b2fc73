"""Precision: bytes of a parameter and of an activation, by the precision that a step computes in.

    fp32, tf32               weight 4, gradient 4, two moments 8: 16 bytes a parameter
    bf16, fp16, fp8, fp4     weight 2, gradient 4 or 2, fp32 master weight and two moments 12: 18 or
                             16 bytes a parameter (Rajbhandari et al. 2020, section 3.1)

Training, its planner and the validation against published runs read these numbers here.
"""

from __future__ import annotations

import dataclasses

from hocket.spec.errors import OptionError, unknown

GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of a gradient by its type."""

QUANTIZED_BASES = {"nf4": 0.5 + 4 / 64}
"""What `--quantize-base` takes, and bytes of an entry: half a byte, and four for 64 entries."""

OPTIMIZERS = ("adamw", "adamw_8bit")
"""What `--optimizer` takes: AdamW with moments in fp32, or in 8 bits."""

MOMENT_BLOCK = 256
"""Values of an 8-bit moment that share a scale in fp32."""

SMALLEST_8BIT = 4096
"""Parameters of fewer elements keep moments in fp32."""

FULL_WIDTH = ("fp32", "tf32")
"""Precisions whose weights are stored in 32 bits, without a master copy. TF32 is a mode of matrix
products: it rounds their operands as they are read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter by what they hold, and of one element of an activation.

    Attributes:
        weight: as compute reads it. gradient: as it is accumulated and reduced.
        optimizer: Adam's two moments, and the master weight where there is one.
        element: of activations and of the messages that carry them.
    """

    weight: int
    gradient: int
    optimizer: float
    element: int

    @property
    def total(self) -> float:
        """Bytes of a parameter that no rank shares with another."""
        return self.weight + self.gradient + self.optimizer


def default_grad_dtype(precision: str) -> str:
    """The type of gradients where none is given: fp32; fp16 under fp16, whose training scales the
    loss instead (Micikevicius et al. 2018)."""
    return "fp16" if precision == "fp16" else "fp32"


def moment_bytes(optimizer: str) -> float:
    """Bytes of both moments of a parameter; in 8 bits with the scales of their blocks."""
    return 8 if optimizer == "adamw" else 2 * (1 + 4 / MOMENT_BLOCK)


def state_bytes(
    precision: str, grad_dtype: str | None = None, optimizer: str = "adamw"
) -> StateBytes:
    """Bytes of state and activations under mixed precision Adam.

    Args:
        precision: of matrix products, one of `spec.cluster.PRECISIONS`.
        grad_dtype: of gradients, one of `GRADIENT_BYTES`. None: `default_grad_dtype`.
        optimizer: one of `OPTIMIZERS`.

    Raises:
        OptionError: an unknown optimizer or gradient type, or 16-bit gradients of 32-bit weights.
    """
    kind = default_grad_dtype(precision) if grad_dtype is None else grad_dtype
    if kind not in GRADIENT_BYTES:
        message, hint = unknown("grad_dtype", kind, GRADIENT_BYTES)
        raise OptionError(message, hint=hint)
    if optimizer not in OPTIMIZERS:
        message, hint = unknown("optimizer", optimizer, OPTIMIZERS)
        raise OptionError(message, hint=hint)
    gradient, moments = GRADIENT_BYTES[kind], moment_bytes(optimizer)
    if precision in FULL_WIDTH:
        if gradient != 4:
            raise OptionError(
                f"grad_dtype is {kind} and the precision {precision}: gradients would lose what "
                "the parameters keep",
                hint="--grad-dtype fp32",
            )
        return StateBytes(weight=4, gradient=4, optimizer=moments, element=4)
    return StateBytes(weight=2, gradient=gradient, optimizer=4 + moments, element=2)
