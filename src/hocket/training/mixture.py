"""Mixture: several data sources, drawn from by weight, as a function of the global index alone.

    --data a:0.7 b:0.3   ->  cycles of 10 samples: 7 of a, 3 of b, in an order of their own

    global index i       cycle c = i div C, slot = permutation of (seed, c) at i mod C
    slot                 source s; sample c n_s + (slot - slots before s) of its own order

No table is kept and nothing is counted: any rank of any layout finds the source and the sample of
any index, so that a resume on other data ranks repeats and skips none. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hocket.spec.errors import DataError
from hocket.training.order import permuted

LONGEST = 10_000
"""Samples of a cycle at most: a weight below a ten-thousandth of all cannot be."""
_WEIGHT = re.compile(r"(?P<data>.+):(?P<weight>\d+(?:\.\d*)?|\.\d+)")
_CYCLE = -2
"""In the key of a cycle's permutation, where that of a source's epoch has a count."""

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class MixedSource:
    """One source of a mixture, as it is stored in `tokens.json`.

    Attributes:
        data: as `--data` names it, without its weight.
        slots: samples of it in each cycle. tokens, rows: of its part of the training file.
    """

    data: str
    slots: int
    tokens: int
    rows: int = 0


def unweighted(given: str | os.PathLike[str]) -> tuple[str, str]:
    """`PATH[:split][[:N]][:weight]` as (the text before the weight, the weight's text or empty).

    A last part that is a number is a weight, unless a file of the whole name exists.
    """
    text = os.fspath(given)
    match = None if Path(text).exists() else _WEIGHT.fullmatch(text)
    return (text, "") if match is None else (match["data"], match["weight"])


def weights_of(given: Sequence[str | os.PathLike[str]]) -> tuple[Fraction, ...]:
    """The weight of each source; empty where none has one.

    Raises:
        DataError: some have one and others do not, one is 0, or a source is named twice.
    """
    found = [unweighted(each) for each in given]
    if not any(weight for _, weight in found):
        return ()
    for text, weight in found:
        if not weight:
            raise DataError(
                f"data {text} has no weight, and others have one; a mixture names the weight of "
                "each source",
                hint="--data "
                + " ".join(shlex.quote(f"{text}:{weight or 1}") for text, weight in found),
            )
        if not Fraction(weight):
            raise DataError(
                f"data {text}:{weight}: the weight of a source must be above 0",
                hint=f"leave {text} out",
            )
    names = [text for text, _ in found]
    for text in names:
        if names.count(text) > 1:
            raise DataError(
                f"data {text} is named twice in a mixture", hint="one source with both weights"
            )
    return tuple(Fraction(weight) for _, weight in found)


def reject_weights(held_out: Sequence[str | os.PathLike[str]]) -> None:
    """Raise DataError for held-out data with weights: all of it is evaluated."""
    for given in held_out:
        text, weight = unweighted(given)
        if weight:
            raise DataError(
                f"eval_data {text} has the weight {weight}; held-out data is evaluated whole",
                hint=f"--eval-data {text}",
            )


def slots_of(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Samples of each source in a cycle: exact where the cycle is short enough, else by largest
    remainder (Hamilton's method). Raises DataError where a source would have none."""
    shares = [weight / sum(weights) for weight in weights]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST:
        return tuple(int(share * length) for share in shares)
    slots = [int(share * LONGEST) for share in shares]
    rest = sorted(range(len(shares)), key=lambda s: slots[s] - shares[s] * LONGEST)
    for source in rest[: LONGEST - sum(slots)]:
        slots[source] += 1
    if min(slots) == 0:
        least = float(min(shares))
        raise DataError(
            f"the smallest weight is {least:.2g} of the sum of all; it is at least 1 in {LONGEST:,}"
        )
    return tuple(slots)


class Mixture:
    """The source and the sample of any global index.

    Args:
        slots: samples of each source in a cycle.
        sizes: samples that each source has.
        seed: of all orders.
    """

    def __init__(self, slots: Sequence[int], sizes: Sequence[int], seed: int) -> None:
        assert len(slots) == len(sizes), (slots, sizes)
        self.slots, self.sizes, self.seed = tuple(slots), tuple(sizes), seed
        self._ends = np.cumsum(slots)
        self.cycle = int(self._ends[-1])

    def drawn(self, indices: npt.ArrayLike) -> tuple[Ids, Ids]:
        """(source, number of the draw from it: 0, 1, 2, ...) of some global indices."""
        index = np.asarray(indices, np.int64)
        cycles, place = np.divmod(index, self.cycle)
        slot = np.empty_like(place)
        for cycle in np.unique(cycles):
            here = cycles == cycle
            slot[here] = permuted(place[here], self.cycle, (self.seed, int(cycle), _CYCLE))
        source = np.searchsorted(self._ends, slot, side="right")
        counts = np.asarray(self.slots, np.int64)
        return source, cycles * counts[source] + slot - (self._ends - counts)[source]

    def samples(self, indices: npt.ArrayLike) -> tuple[Ids, Ids]:
        """(source, sample of that source) of some global indices; each of a source's epochs has an
        order of its own, which holds every sample once."""
        source, draw = self.drawn(indices)
        sample = np.empty_like(draw)
        for one in np.unique(source):
            size = self.sizes[one]
            epochs, position = np.divmod(draw, size)
            for epoch in np.unique(epochs[source == one]):
                here = (source == one) & (epochs == epoch)
                key = (self.seed, int(epoch), int(one))
                sample[here] = permuted(position[here], size, key)
        return source, sample

    def taken(self, samples: int) -> tuple[int, ...]:
        """Draws from each source among the first `samples` global indices."""
        cycles, rest = divmod(samples, self.cycle)
        source, _ = self.drawn(np.arange(cycles * self.cycle, samples))
        partial = np.bincount(source, minlength=len(self.slots)) if rest else [0] * len(self.slots)
        return tuple(cycles * n + int(k) for n, k in zip(self.slots, partial, strict=True))


def mixture_lines(sources: Sequence[MixedSource], sizes: Sequence[int], samples: int) -> str:
    """One line for each source: share, samples drawn in a run of so many, and epochs."""
    mixture = Mixture([one.slots for one in sources], sizes, seed=0)  # which moves few of them
    lines = []
    for one, size, taken in zip(sources, sizes, mixture.taken(samples), strict=True):
        lines.append(
            f"{one.data}: {one.slots / mixture.cycle:.2%} of the samples, {taken:,} of "
            f"{samples:,}; it has {size:,}, {taken / size:.2f} epochs"
        )
    return "\n".join(lines)
