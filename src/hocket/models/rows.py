"""Rows that are one sequence each: what transformers finds out by looking at positions.

With values at hand it sees that positions only count up and leaves the causal mask to the kernel.
On fake tensors it cannot look, takes a row for several packed sequences, and builds a mask that a
real run never holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Within, positions are taken to count up from 0, without being looked at."""
    from transformers import masking_utils

    module: Any = masking_utils
    before = module.find_packed_sequence_indices
    module.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        module.find_packed_sequence_indices = before
