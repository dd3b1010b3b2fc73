"""Context parallelism: sequences split over ranks, and attention that sees all of them."""

from hocket.runtime.context_parallel.apply import ContextParallel, apply_context_parallel
from hocket.runtime.context_parallel.split import (
    part_of,
    parts_of,
    running,
    whole_rows,
    with_positions,
)

__all__ = [
    "ContextParallel",
    "apply_context_parallel",
    "part_of",
    "parts_of",
    "running",
    "whole_rows",
    "with_positions",
]
