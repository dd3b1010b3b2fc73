"""Shapes of the catalogue's models, traced once and shipped: planning needs no torch.

The files are written by `python -m benchmarks.make_shapes`; a test traces some of them again.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from hocket.spec.errors import ModelError, unknown
from hocket.spec.model_shape import ModelShape


@functools.cache
def shape_names() -> tuple[str, ...]:
    """Every model whose shape is shipped."""
    folder = resources.files("hocket.catalogue") / "data" / "shapes"
    return tuple(sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".json")))


@functools.cache
def shape(name: str) -> ModelShape:
    """The shape of a model of the catalogue.

    Raises:
        ModelError: the catalogue has no such name; the nearest one is suggested.
    """
    if name not in shape_names():
        message, hint = unknown("model", name, shape_names())
        raise ModelError(message, hint=hint)
    file = resources.files("hocket.catalogue") / "data" / "shapes" / f"{name}.json"
    return ModelShape.from_json(json.loads(file.read_text()))
