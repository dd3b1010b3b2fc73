"""Learning rate: linear warm-up, then decay: cosine (Loshchilov and Hutter 2017, without restarts),
linear, or none.

lr |    /~~~--.
   |   /       `-.
   |  /           `-__ min_lr
   +--+--------------+-> step
      warmup       steps
"""

from __future__ import annotations

import math

from hocket.spec.run import TrainOptions


def warmup_steps(options: TrainOptions) -> int:
    """Steps of warm-up: as asked, else a tenth of all, at most 100."""
    if options.warmup is not None:
        return options.warmup
    return min(100, options.steps // 10)


def learning_rate(step: int, options: TrainOptions) -> float:
    """The rate of `step` (0 is the first): `lr` once warm, `min_lr` at the last step.

    A `min_lr` above `lr` means a constant rate.
    """
    warmup = warmup_steps(options)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    decay = max(1, options.steps - 1 - warmup)
    share = min(1.0, (step - warmup) / decay)
    if options.lr_schedule == "constant":
        return options.lr
    if options.lr_schedule == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return options.lr - share * (options.lr - min(options.min_lr, options.lr))
