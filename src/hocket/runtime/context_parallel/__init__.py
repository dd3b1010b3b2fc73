"""Context parallelism: sequences split over ranks, and attention that sees all of them."""

from hocket.runtime.context_parallel.apply import ContextParallel, apply_context_parallel
from hocket.runtime.context_parallel.split import (
    context_parts,
    part_of,
    running,
    whole_rows,
    with_positions,
)

__all__ = [
    "ContextParallel",
    "apply_context_parallel",
    "part_of",
    "context_parts",
    "running",
    "whole_rows",
    "with_positions",
]
