"""Shapes of models that were traced, kept in the user's cache folder. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import hocket
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunSpec, write_text

FORMAT = 14
"""Of the shapes that are cached: one more whenever a trace finds something else."""


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
    from importlib.metadata import version

    versions = [hocket.__version__, *(version(name) for name in ("transformers", "torch"))]
    frozen = spec.options.lora_rank is not None
    key = json.dumps(
        [FORMAT, spec.config, spec.workload.dtype, spec.options.dropout, frozen, versions, size],
        sort_keys=True,
        default=str,
    )
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hocket" / "shapes" / name


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
