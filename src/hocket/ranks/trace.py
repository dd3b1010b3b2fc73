"""Shapes of models: traced in a process that has torch, and kept in the user's cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunSpec

if TYPE_CHECKING:
    from hocket.launch import RankContext


def shape_here(spec: RunSpec) -> ModelShape:
    """The model's shape as it is trained, traced in this process. Raises ModelError."""
    from hocket.cost.adapters import adapted_shape
    from hocket.models.shape_cache import traced_size

    known = _kept(spec, None)
    if known.uneven:
        known = _kept(spec, traced_size(spec))
    return adapted_shape(known, spec)


def _kept(spec: RunSpec, size: tuple[int, int] | None) -> ModelShape:
    """The shape of a model that is traced at `size`, or as it was kept."""
    from hocket.models.shape_cache import read_shape, shape_file, write_shape
    from hocket.models.trace import trace

    file = shape_file(spec, size)
    known = read_shape(file)
    if known is None:
        known = trace(
            spec.config,
            name=os.path.basename(spec.model),
            dropout=spec.options.dropout,
            dtype="bf16" if spec.workload.dtype == "fp8" else spec.workload.dtype,
            frozen=spec.options.lora_rank is not None,
            size=size,
        )
        write_shape(file, known)
    return known


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """In one rank: trace the model and emit its shape, or why that cannot be done."""
    from hocket.models.trace import trace

    try:
        name = os.path.basename(payload["model"])
        found = trace(
            payload["config"],
            name=name,
            dropout=payload["dropout"],
            dtype=payload["dtype"],
            frozen=payload["frozen"],
            size=None if payload["size"] is None else tuple(payload["size"]),
        )
        context.emit({"event": "shape", "shape": found.to_json()})
    except HocketError as error:
        context.emit({"event": "shape", "error": error.message})
