"""Fit: whether a rank's memory suffices. One rule, for plans and for the validation.

fits     the expected peak without the allocator's slack, which it returns when memory runs
         out, is no more than a process can have: such runs were published
safe     the 95th percentile of the peak leaves `HEADROOM` of it free: what plans propose
tight    fits and is not safe: it is shown as such, and proposed by no search
host     what is offloaded takes no more than `HOST_SHARE` of the node's memory, and activations
         no more than their buffers may (`spec.capabilities.PINNED_SHARE`)
"""

from __future__ import annotations

import math
from typing import Any

from hocket.cost.memory import MemoryEstimate
from hocket.spec.capabilities import PINNED_SHARE
from hocket.spec.cluster import Node

HEADROOM = 0.05
"""Share of a GPU's memory that proposals leave free even at the 95th percentile: for evaluation,
checkpoints and fragmentation, which a step's peak does not hold."""

HOST_SHARE = 0.9
"""Share of a host's memory that what is offloaded may take; the rest is for the processes, their
data and the copies that a save makes."""

Numbers = Any
"""A float, or an array of one for each layout."""


def fits_memory(expected: MemoryEstimate, usable: Numbers) -> Numbers:
    """Whether the peak memory per rank fits `usable` bytes."""
    return expected.least <= usable


def proposable(usable: int) -> int:
    """Bytes that the 95th percentile of a proposed layout's peak may reach."""
    return int(usable * (1 - HEADROOM))


def fits_host(held: Numbers, pinned: Numbers, node: Node) -> Numbers:
    """Whether `held` bytes, `pinned` of them activations, fit the host's memory; of one that is not
    known, any do."""
    has = node.host_memory or math.inf
    return (held <= has * HOST_SHARE) & (pinned <= has * PINNED_SHARE)
