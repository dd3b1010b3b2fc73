"""Context: how long exchanges over cp ranks take where a sequence is split: of keys and values, and
of the states of recurrent layers.

    ring      every rank keeps its queries and hands its keys and values on, c - 1 times, each time
              during the attention to the shard it has (Liu et al. 2023). A causal sequence is dealt
              in 2c pieces, the k-th from the front and from the back to one rank, so that all steps
              are equally long; so one step hides what is sent behind 1/c of the rank's attention.
              Backward hands on keys and values again, with their gradients in 32 bits
    Ulysses   all-to-alls turn pieces of the sequence into pieces of the heads and back (Jacobs et
              al. 2023): queries, keys and values before, the output after; nothing hides them. It
              needs heads that divide over c x t; where there are fewer key and value heads than
              ranks, each is sent to several

    states    a state goes along a line of 2c pieces, 2 (c - 1) messages one after the other, and
              its gradient back; nothing hides them (`runtime.context_parallel.state`)

The faster of ring and Ulysses counts. Legend: c context ranks, t tensor ranks, r rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hocket.cost.collectives import ALL_TO_ALL, group, point_to_point
from hocket.cost.communication_table import FLOAT
from hocket.cost.constants import Platform
from hocket.cost.device import ATTENTION_BACKWARD
from hocket.cost.group_strides import stride
from hocket.cost.layout_batch import Layouts
from hocket.cost.terms import Core, Floats

MERGE_BYTES = 14.0
"""Moved per element of the output by a further step: its own part read, the sum of the parts so far
read and written in 32 bits, and rescaled."""

STEP_SECONDS = 20e-6
"""Of starting a step: kernels for two pieces of queries, and for sending and receiving."""

CONTENTION = 0.2
"""Of the shorter of computing and sending at once, what the two cost each other."""


@dataclasses.dataclass(frozen=True)
class ContextTimes:
    """Exposed seconds of a block and microbatch, [r]; `ulysses`: where all-to-alls were faster."""

    forward: Floats
    backward: Floats
    ulysses: np.ndarray


def context_times(
    cores: Sequence[Core], at: Layouts, tokens: Floats, attention: Floats, platform: Platform
) -> ContextTimes:
    """The faster exchange.

    Args:
        tokens: of a microbatch on this rank, [r].
        attention: seconds of its attention forward, [r].
    """
    nothing = np.zeros_like(tokens)
    ring, ring_back, turned, turned_back = (nothing,) * 4
    for core in cores:
        share = attention / len(cores)
        forward, backward = _ring(core, at, tokens, share, platform)
        ring, ring_back = ring + forward, ring_back + backward
        both = _ulysses(core, at, tokens, platform)
        turned, turned_back = turned + both, turned_back + both
    better = (turned + turned_back < ring + ring_back) & (at.cp > 1)
    return ContextTimes(
        np.where(at.cp > 1, np.where(better, turned, ring), 0.0),
        np.where(at.cp > 1, np.where(better, turned_back, ring_back), 0.0),
        better,
    )


def _ring(
    core: Core, at: Layouts, tokens: Floats, attention: Floats, platform: Platform
) -> tuple[Floats, Floats]:
    machine, constants = platform.machine, platform.constants
    ranks = np.maximum(at.cp, 1.0)
    width = core.kv_heads * (core.head_dim + core.value_dim) / np.minimum(at.tp, core.kv_heads)
    output = core.heads * core.value_dim / at.tp
    merge = MERGE_BYTES * tokens * output / (machine.bandwidth * constants.memory_rate)

    def steps(talk: Floats, compute: Floats) -> Floats:
        shown = np.maximum(talk - compute, 0.0) + CONTENTION * np.minimum(talk, compute)
        return (ranks - 1) * (shown + STEP_SECONDS)

    size = tokens * width
    element = constants.element_bytes
    forward = steps(_hop(element * size, at, platform), attention / ranks) + (ranks - 1) * merge
    back = _hop((element + FLOAT) * size, at, platform)
    backward = steps(back, ATTENTION_BACKWARD * attention / ranks)
    return forward, backward


def _hop(size: Floats, at: Layouts, platform: Platform) -> Floats:
    """Seconds of one message to the next context rank, while all send."""
    machine, ranks = platform.machine, np.maximum(at.cp, 1.0)
    local = np.clip(machine.domain // at.tp, 1, ranks)
    # A ring leaves each node once; the rings of a node share its network cards.
    rate = machine.network * np.minimum(local, machine.per_node) / machine.per_node
    rate = rate * platform.constants.network
    within = point_to_point(size, np.minimum(at.tp, machine.domain - 1), platform)
    return np.where(ranks * at.tp > machine.domain, size / rate + 20e-6, within)


def state_times(
    inputs: Floats, state: Floats, at: Layouts, rows: Floats, platform: Platform
) -> Floats:
    """Seconds in which recurrent layers of a block hand on what they hand on, forward or backward.

    Args:
        inputs, state: elements of a row (`spec.model_shape.Handed`).
        rows: of a microbatch.
    """
    ahead = _hop(platform.constants.element_bytes * rows * inputs, at, platform)
    line = _hop(FLOAT * rows * state, at, platform) + STEP_SECONDS
    found = 2 * (ahead + STEP_SECONDS) + np.where(state > 0, 2 * (at.cp - 1) * line, 0.0)
    return np.where((at.cp > 1) & (inputs > 0), found, 0.0)


def _ulysses(core: Core, at: Layouts, tokens: Floats, platform: Platform) -> Floats:
    queries = core.heads * core.head_dim / at.tp
    outputs = core.heads * core.value_dim / at.tp
    heads = np.maximum(np.maximum(core.kv_heads / at.tp, 1.0), at.cp)  # each at least once a rank
    keys = heads * (core.head_dim + core.value_dim)
    apart, element = stride("cp", at), platform.constants.element_bytes
    time = group(ALL_TO_ALL, element * tokens * (queries + keys), at.cp, apart, platform)
    time = time + group(ALL_TO_ALL, element * tokens * outputs, at.cp, apart, platform)
    time = time * platform.constants.contention
    return np.where(core.heads % (at.cp * at.tp) == 0, time, np.inf)
