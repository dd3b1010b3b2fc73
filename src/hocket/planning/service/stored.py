"""How a server stores a model's weights: in the dtype it computes in, or quantized."""

from __future__ import annotations

import dataclasses

from hocket.spec.errors import OptionError, unknown
from hocket.spec.model_shape import ModelShape

NONE, MXFP4 = "none", "mxfp4"

QUANTIZATIONS = {
    NONE: ("", ""),
    "fp8": ("fp8", ""),
    "int8": ("int8", ""),
    "fp4": ("fp4", ""),
    "int4": ("int4", ""),
    MXFP4: ("", MXFP4),
}
"""By name: precision of all weights, and of experts where theirs is another (`cost.serving.
WEIGHT_BYTES`); empty: the dtype. int4 is that of AWQ and GPTQ, fp4 is NVFP4, mxfp4 that of gpt-oss,
of experts alone."""

OTHERS = ("int4", "fp8", NONE)
"""Those that a plan is compared with, by bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """How the weights of a served model are stored.

    Attributes:
        quantization: one of `QUANTIZATIONS`.
        dtype: of what is not quantized.
        published: whether the checkpoint itself is stored so.
    """

    quantization: str = NONE
    dtype: str = "bf16"
    published: bool = False

    @property
    def precision(self) -> str:
        """Of weights and products."""
        return QUANTIZATIONS[self.quantization][0] or self.dtype

    @property
    def expert_precision(self) -> str | None:
        """Of the experts' weights; None: as all others."""
        return QUANTIZATIONS[self.quantization][1] or None

    @property
    def title(self) -> str:
        """For a person: `fp8, as published`; `bf16, experts in mxfp4, as published`."""
        text = self.precision
        if self.expert_precision is not None:
            text += f", experts in {self.quantization}"
        return f"{text}, as published" if self.published and self.quantization != NONE else text


def stored_weights(
    shape: ModelShape, *, dtype: str, quantization: str | None, published: str
) -> StoredWeights:
    """The weights of a plan.

    Args:
        dtype: of what is not quantized, or fp8, which means `quantization="fp8"` as well.
        quantization: one of `QUANTIZATIONS`. None: as the checkpoint is published, where dtype
            leaves that open.
        published: the checkpoint's own.

    Raises:
        OptionError: an unknown quantization, one that contradicts the dtype, or mxfp4 of a model
            without experts.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        message, hint = unknown("quantization", quantization, QUANTIZATIONS)
        raise OptionError(f"--quantization: {message}", hint=hint)
    few = {precision for precision, _ in QUANTIZATIONS.values() if precision}
    if dtype in few:
        if quantization not in (None, dtype):
            raise OptionError(
                f"--dtype {dtype} quantizes the weights, and --quantization is {quantization}",
                hint=f"--quantization {dtype}, without --dtype",
            )
        quantization, dtype = dtype, "bf16"
    chosen = published or NONE if quantization is None else quantization
    if chosen == MXFP4 and not shape.experts:
        raise OptionError(
            f"--quantization mxfp4 is of experts, and {shape.name} has none",
            hint="--quantization fp4",
        )
    return StoredWeights(quantization=chosen, dtype=dtype, published=chosen == (published or NONE))
