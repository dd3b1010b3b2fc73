"""Shapes of models that were traced, kept in the user's cache folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path

from hocket.spec.files import write_text
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunSpec
from hocket.spec.user_cache import computed_file


def traced_size(spec: RunSpec) -> tuple[int, int]:
    """Rows of a microbatch and tokens of each, on one rank. Over context ranks a rank has two
    chunks of each sequence, and scans run over each by itself (`runtime.context_parallel.state`),
    padded to their blocks: as rows of half the tokens."""
    layout, workload = spec.layout, spec.workload
    rows = workload.global_batch // (layout.dp * (layout.microbatches or 1))
    chunks = 2 if layout.cp > 1 else 1
    return max(1, rows * chunks), max(1, workload.seq_len // (layout.cp * chunks))


def shape_file(spec: RunSpec, size: tuple[int, int] | None = None) -> Path:
    """Where the shape of a run's model is kept, by its configuration and what traces it; with
    `size`, where that is kept of a model whose shape depends on it."""
    frozen = spec.options.lora_rank is not None
    inputs = [spec.config, spec.workload.dtype, spec.options.dropout, frozen, size]
    return computed_file("shapes", inputs, "models", "spec")


def read_shape(file: Path) -> ModelShape | None:
    """The shape that a file holds; None where there is none of this version."""
    try:
        return ModelShape.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or of another version
        return None


def write_shape(file: Path, shape: ModelShape) -> None:
    """Keep a shape; a folder that cannot be written is passed over."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(shape.to_json()))
    except OSError:
        return  # a cache that cannot be written only costs the next run its second
