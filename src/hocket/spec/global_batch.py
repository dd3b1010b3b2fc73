"""The global batch of a training step where none is given: one rule for plans and for runs."""

from __future__ import annotations

from hocket.spec.run import Workload

EACH = 8
"""Sequences for each GPU."""

MOST_TOKENS = 4 << 20
"""Tokens of a step whose batch is chosen: about those of GPT-3 (Brown et al. 2020, table 2.1)."""


def default_global_batch(gpus: int, seq_len: int, unit: int = 1) -> int:
    """Sequences of a step where none are given.

    On CPU cores (0 `gpus`) those of `Workload`; on GPUs 8 each, or as many as there, whichever is
    more, halved while a step has more than `MOST_TOKENS`. Always a multiple of `unit`: the product
    of what is fixed of dp, microbatch and microbatches.
    """
    batch = least = Workload().global_batch
    if gpus:
        batch = EACH * gpus
        while batch < least:
            batch *= 2
        while batch % 2 == 0 and batch * seq_len > MOST_TOKENS:
            batch //= 2
    return -(-batch // unit) * unit
