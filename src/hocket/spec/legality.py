"""Legality: what a layout must divide, each rule once.

The runtime refuses by these rules (`jobs.validate`, and schedules and cuts where they are built),
and the planner enumerates by them (`planning`): a rule that is changed here is changed for both.
What of a layout the runtime lacks altogether is in `spec.capabilities`.

Every rule says True where the numbers fit. Those that take `Numbers` are written with operators
alone, and take arrays of whole numbers as well, of one layout each; they then return an array.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.spec.layout import Layout

Numbers = Any
"""An int, or an array of whole numbers (this room imports no numpy)."""

MOST_LAYERS = 10_000
"""Of a model. Layers are placed one by one: to plan 10,000 on 64 GPUs takes a CPU core 10 s, and
the time grows with their number."""

# --- the model over tp ------------------------------------------------------------------------


def units(count: int, tp: int) -> bool:
    """Things of which every rank holds as many: attention heads, features inside the MLP."""
    return count % tp == 0


def copied_units(count: int, tp: int) -> bool:
    """Things of which one may be held by several ranks, all by as many: key/value heads."""
    return count % tp == 0 or tp % count == 0


def attention(heads: int, kv_heads: int, tp: int) -> bool:
    """Both kinds of heads; 0 of either: there is no attention that would have to be divided."""
    return units(heads, tp) and copied_units(kv_heads, tp)


def rows(count: int, tp: int) -> bool:
    """Vocabulary rows: they may be uneven (ceil(count / tp) on the first ranks), but every rank
    must hold some."""
    return (tp - 1) * -(-count // tp) < count


# --- layers over stages -----------------------------------------------------------------------


def stages(layers: int, count: int) -> bool:
    """Pipeline stages (pp x virtual stages), of which each has a layer at least."""
    return count <= layers


def even_stages(layers: int, count: int) -> bool:
    """Stages of as many layers each."""
    return layers % count == 0


def light_ends(layers: int, count: int) -> bool:
    """Stages of as many layers each but for the first and the last, which have one fewer, be it
    none."""
    return count > 1 and (layers + 2) % count == 0


def recomputed(count: int, longest: int) -> bool:
    """The first layers of each stage that are run again, of the layers of the longest."""
    return count <= longest


def interleaved_rounds(microbatches: Numbers, pp: Numbers) -> Numbers:
    """Microbatches of the interleaved schedule: max(1, microbatches // pp) rounds, all equal."""
    return microbatches % (microbatches // pp + (microbatches < pp)) == 0


# --- batch, sequence, experts, state ----------------------------------------------------------


def batch(global_batch: Numbers, dp: Numbers) -> Numbers:
    """Sequences of a step over data ranks."""
    return global_batch % dp == 0


def microbatches(rank_batch: Numbers, count: Numbers) -> Numbers:
    """Sequences of one data rank over its microbatches."""
    return rank_batch % count == 0


MICROBATCH_TOKENS = 8192
"""Tokens of a microbatch up to which a rank without a pipeline takes them at once: matmuls of so
many rows fill a GPU, and more only cost memory."""


def usual_microbatches(rank_batch: int, pp: int, seq_len: int) -> int:
    """Microbatches where they are left open: without a pipeline the fewest of at most
    MICROBATCH_TOKENS, and in one the largest divisor of the rank's batch that is at most 2 x pp."""
    if pp > 1:
        fitting = (n for n in range(1, min(rank_batch, 2 * pp) + 1) if microbatches(rank_batch, n))
        return max(fitting, default=1)
    from hocket.spec.layout import divisors

    most = max(1, MICROBATCH_TOKENS // seq_len)
    return next((n for n in divisors(rank_batch) if rank_batch // n <= most), 1)


def context(seq_len: int, cp: int, width: int = 0) -> bool:
    """A sequence over context ranks: causal work is dealt in two halves, and a convolution along
    the sequence reads `width` earlier inputs, which come from one chunk alone."""
    return cp == 1 or (seq_len % (2 * cp) == 0 and seq_len // (2 * cp) >= width)


def slices(seq_len: int, cp: Numbers, tp: Numbers) -> Numbers:
    """A sequence under sequence parallelism: each of several tensor ranks holds a slice as long."""
    return (tp > 1) & (seq_len % (cp * tp) == 0)


def experts(count: int, ep: int) -> bool:
    """Experts over expert ranks; 1 of them divides a model without any, too."""
    return ep == 1 or (count > 0 and count % ep == 0)


def expert_ranks(dp: int, cp: int, ep: int, tp: int = 1, etp: int = 1) -> bool:
    """Experts are placed on the ranks of dp x cp x tp; where etp is tp, on those of dp x cp."""
    return (dp * cp * tp) % (ep * etp) == 0


def narrowed(layout: Layout, **degrees: Any) -> Layout:
    """A layout with other degrees of dp, cp or tp; its expert ranks and state shards are as many as
    still divide them. Replaced alone, a degree could leave a layout that cannot be."""
    dp, cp, tp = (degrees.get(axis, layout.degree(axis)) for axis in ("dp", "cp", "tp"))
    etp = None if layout.etp is None or tp == 1 else math.gcd(layout.etp, dp * cp * tp)
    ep = math.gcd(layout.ep, dp * cp * tp // (etp or tp))
    state = layout.shard and math.gcd(layout.shard, dp)
    return dataclasses.replace(layout, **degrees, ep=ep, etp=etp, shard=state)


def shard(dp: Numbers, count: Numbers, zero: Numbers) -> Numbers:
    """Data ranks that share one state, over all data ranks; without ZeRO each holds a whole one."""
    return (zero > 0) & (dp % count == 0)
