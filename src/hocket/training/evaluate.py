"""Evaluation: the mean loss on held-out text, the same on every layout."""

from __future__ import annotations

import math

from hocket.runtime.parallelize import Parallel
from hocket.training.inputs import Inputs


def num_batches(inputs: Inputs, most: int) -> int:
    """Global batches that the held-out text fills (the last one in part), at most `most`; 0:
    all."""
    filled = -(-len(inputs.dataset) // inputs.order.global_batch)
    return min(most, filled) if most else filled


def perplexity(loss: float) -> float | None:
    """exp of a mean loss per token in nats; None where it is not a finite number."""
    try:
        value = math.exp(loss)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def held_out_loss(parallel: Parallel, inputs: Inputs, batches: int) -> float | None:
    """Mean loss per token (nats) over the first `batches` global batches of the held-out text.

    Without dropout. Every rank calls it. None where there is no held-out text.
    """
    total, tokens = 0.0, 0
    for batch in range(num_batches(inputs, batches)):
        losses, count = parallel.evaluate(inputs.held_out(batch))
        total += losses
        tokens += count
    return total / tokens if tokens else None
