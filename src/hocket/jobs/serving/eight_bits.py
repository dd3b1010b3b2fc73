"""Weights in 8 bits, before ranks start: which a model has, and where a check computes them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hocket.spec.capabilities import QUANTIZED
from hocket.spec.errors import ModelError, OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.run import TrainOptions

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource


def require_known(quantization: str) -> None:
    """Raise OptionError for a quantization that there is not."""
    if quantization not in QUANTIZED:
        message, hint = unknown("quantization", str(quantization), QUANTIZED)
        raise OptionError(message, hint=f"--quantization fp8; {hint}" if hint else None)


def emulated_on_cpu(quantization: str, options: TrainOptions) -> TrainOptions:
    """The options of a check of this quantization, whose matmuls a CPU emulates.

    Raises:
        OptionError: a quantization that there is not, or a check on GPUs.
    """
    require_known(quantization)
    if options.device == "cuda":
        raise OptionError(
            "--quantization is checked in fp32, and matmuls of GPUs in 8 bits give bf16",
            hint="--device cpu, and hocket doctor --gpu for the kernels",
        )
    return dataclasses.replace(options, device="cpu")


def require_eight_bits(
    launcher: Launcher, source: ModelSource, layout: Layout
) -> dict[str, list[list[int]]]:
    """What the ranks of a replica store in 8 bits (`ranks.eight_bits`).

    Raises:
        ModelError: they cannot, with the reason and a layout in which they can, if there is one.
    """
    heard: list[dict[str, Any]] = []
    payload = {
        "config": source.config, "layout": str(layout),
        "code": None if source.code is None else str(source.code),
    }  # fmt: skip
    launcher.run("hocket.ranks.eight_bits:main", 1, payload, heard.append, startup_timeout=600.0)
    (found,) = (event for event in heard if event["event"] == "eight_bits")
    if "rejected" in found:
        raise ModelError(f"{source.name}: {found['rejected']}", hint=found["hint"])
    columns: dict[str, list[list[int]]] = found["columns"]
    return columns
