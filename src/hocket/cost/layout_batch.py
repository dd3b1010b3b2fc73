"""Layouts as columns: one array per field, so that a million are estimated at once."""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.terms import BlockTerms, Floats, Terms
from hocket.spec.errors import OptionError, unknown
from hocket.spec.layout import OFFLOAD, Layout
from hocket.spec.recompute import BITS

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "sequential")
"""Schedules that have a price; the number in a column is the place in this list."""

NAMES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved": "interleaved",
    "zero-bubble": "zb-h1",
    "zb-v": "zb-v",
    "sequential": "sequential",
}
"""What `Layout.schedule` may name, to one of `SCHEDULES`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """Fields of spec.layout.Layout, each [r] floats (degrees are whole numbers).

    Attributes:
        etp: tensor ranks that divide one expert.
        microbatch: samples in a microbatch. microbatches: of one data rank and step.
        recompute: `spec.recompute.code` (0 none, 1 selective, 2 full).
        shard: data ranks that share one ZeRO state; dp where not said.
        schedule: place in SCHEDULES.
        lighter: 1 where the first and the last stage hold one layer fewer than the others.
        offload: place in spec.layout.OFFLOAD.
    """

    dp: Floats
    tp: Floats
    pp: Floats
    cp: Floats
    ep: Floats
    etp: Floats
    virtual: Floats
    microbatch: Floats
    microbatches: Floats
    zero: Floats
    shard: Floats
    recompute: Floats
    sequence_parallel: Floats
    schedule: Floats
    lighter: Floats
    offload: Floats

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def expert_tp(self) -> Floats:
        """Tensor ranks that divide one expert, [r]."""
        return self.etp

    @property
    def offloads_optimizer(self) -> np.ndarray:
        """[r] bool: the optimizer steps on the host, where its state is."""
        return self._offloads("optimizer") | self.offloads_params

    @property
    def offloads_params(self) -> np.ndarray:
        """[r] bool: shards of the parameters are in the host's memory too."""
        return self._offloads("params")

    @property
    def offloads_activations(self) -> np.ndarray:
        """[r] bool: what layers save for backward is in the host's memory until then."""
        return self._offloads("activations")

    def recomputes(self, kind: str) -> np.ndarray:
        """[r] bool: layers run again in backward (`full`), or modules of this kind."""
        found: np.ndarray = (self.recompute.astype(int) & BITS[kind]) != 0
        return found

    def recomputes_in(self, block: BlockTerms, kind: str) -> np.ndarray:
        """[r] bool: modules of this kind of a block are recomputed; activation functions, where
        they are not part of a feed-forward layer that is."""
        found = self.recomputes(kind)
        if kind == "activation" and block.has_feed_forward:
            found = found & ~self.recomputes("mlp")
        return found

    def _offloads(self, kind: str) -> np.ndarray:
        named = [number for number, text in enumerate(OFFLOAD) if kind in text.split("+")]
        return np.isin(self.offload, named)

    def take(self, index: np.ndarray) -> Layouts:
        """Some of the rows."""
        fields = dataclasses.fields(self)
        return Layouts(**{f.name: getattr(self, f.name)[index] for f in fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankLayers:
    """Layers that pipeline ranks hold, [r] each: the first, the last, and the rank with most.

    `early`: how many more the first rank's first stage has than its stages have on average.
    `bent`, `bent_inner`: under ZB-V (`bent_in_flight`), of the first rank, and of the inner one
    that has most.
    """

    first: Floats
    last: Floats
    most: Floats
    early: Floats
    bent: Floats
    bent_inner: Floats


def equal_layers(model: Terms, at: Layouts) -> RankLayers:
    """As many on every rank; one fewer at both ends where these are `lighter`."""
    most = (model.layers + 2.0 * at.lighter) / at.pp
    ends = most - at.lighter
    return RankLayers(
        first=ends,
        last=ends,
        most=most,
        early=np.zeros_like(at.pp),
        bent=bent_in_flight(ends / 2, ends / 2, at.pp, at.microbatches, np.zeros_like(at.pp)),
        bent_inner=bent_in_flight(most / 2, most / 2, at.pp, at.microbatches, at.pp - 1),
    )


def bent_in_flight(
    down: Floats, up: Floats, pp: Floats, microbatches: Floats, rank: Floats
) -> Floats:
    """Layers times microbatches that a rank holds activations of under ZB-V (Qi et al. 2024).

    The stage that a microbatch reaches on its way down has 2p - rank in flight, the one on its way
    up as many as ranks come before; fewer microbatches than that have one more on their way up.

    Args:
        down, up: layers of the rank's two stages.
    """
    first = np.minimum(2 * pp - rank, microbatches)
    second = np.minimum(rank + (microbatches < 2 * pp - rank), microbatches)
    found: Floats = down * first + up * second
    return found


def schedule_number(layout: Layout) -> int:
    """The place in `SCHEDULES` of a layout's schedule; 1F1B of several stages a rank interleaves.

    Raises:
        OptionError: a schedule that has no price, as one in a file.
    """
    name = layout.schedule
    if name not in NAMES:
        message, hint = unknown("schedule", name, NAMES)
        raise OptionError(f"only schedules with a name have a price; {message}", hint=hint)
    if name in ("1f1b", "interleaved"):
        name = "interleaved" if layout.pp > 1 and layout.virtual_stages > 1 else "1f1b"
    return SCHEDULES.index(NAMES[name])
