"""ServedCheck: answers of a server compared with plain transformers.

Log-probabilities are compared, because they are what a server returns: each is a logit less the
logarithm of the sum of the exponentials of the whole vocabulary. A difference counts as equal up to
`TOLERANCE` of the reference's largest logit, in fp32. Where that is exceeded, plain transformers is
run in fp64 as well, and up to twice its own distance from that counts as equal too, if it is no
more than `LARGEST_ROUNDING` of the largest logit: some architectures amplify the rounding of fp32.
Where a server computes in 8 bits, so does the reference, by the definition of the format. A sum
that differs in the last bit of fp32 may then be rounded to the next number of 8 bits, a sixteenth
away, and from there on the answer differs visibly: rarely in a small model, somewhere in each
answer of a large one. So the median over all positions is compared: up to `TOLERANCE`, or up to
twice the reference's own median when `NOISE` is added to what it rounds, if that is more; and no
position may be further off than the largest change that 8 bits themselves make.

A greedy token is equal if the reference gives no token a log-probability that is larger by more
than the tolerance of both.
"""

from __future__ import annotations

import dataclasses
import json
import math

TOLERANCE = 2e-5
"""Largest difference of a log-probability, relative to the reference's largest logit."""

LARGEST_ROUNDING = 1e-3
"""Largest distance of fp32 from fp64, relative to the largest logit, that is taken for rounding."""

NOISE = 2.0**-22
"""Of the largest entry of a row: two units of fp32, as sums in another order differ."""

COMPARISONS = (
    "prefill", "chunked prefill", "decode", "batching", "prefix reuse", "preemption", "restart",
    "generate",
)  # fmt: skip
"""Names of the comparisons, in the order of a report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedComparison:
    """One comparison of one server.

    Attributes:
        name: one of `COMPARISONS`.
        positions: positions whose log-probabilities were compared.
        tokens: generated tokens that were compared.
        difference: the largest difference of a log-probability, in nats.
        failure: the first position that differs, with both numbers; empty where equal.
        note: why less was compared than intended.
    """

    name: str
    positions: int = 0
    tokens: int = 0
    difference: float = 0.0
    failure: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedCheck:
    """All comparisons of one model at one layout.

    Attributes:
        layout: its text.
        scale: the reference's largest logit.
        rounding: the largest difference of a log-probability between plain transformers in fp32
            and in fp64; 0 where it was not needed. In 8 bits: the reference's own median.
        comparisons: in the order of `COMPARISONS`.
        eight_bits: the largest change of a log-probability that 8 bits make; 0: there are none.
        median: of the differences at all positions, where there are.
    """

    layout: str
    scale: float
    comparisons: tuple[ServedComparison, ...]
    rounding: float = 0.0
    eight_bits: float = 0.0
    median: float = 0.0

    @property
    def limit(self) -> float:
        """The largest difference that counts as equal, in nats."""
        return self.eight_bits or equal_limit(self.scale, self.rounding)

    @property
    def median_limit(self) -> float:
        """The largest median that counts as equal, in nats, where answers are of 8 bits."""
        return max(TOLERANCE * self.scale, 2 * self.rounding)

    @property
    def ok(self) -> bool:
        return bool(self.comparisons) and not self.failures

    @property
    def amplified(self) -> bool:
        """Whether these weights amplify the rounding of fp32 beyond what counts as equal, so that
        a difference may be a luckless draw of it."""
        return not self.eight_bits and 2 * self.rounding > TOLERANCE * self.scale

    @property
    def ratio(self) -> float | None:
        """The largest difference relative to `equal_limit`; None where one is not finite."""
        found = [one.difference / self.limit for one in self.comparisons if self.limit]
        return max(found) if found and all(map(math.isfinite, found)) else None

    @property
    def failures(self) -> tuple[str, ...]:
        """`comparison: first differing position`, of each comparison that is not equal."""
        found = tuple(f"{one.name}: {one.failure}" for one in self.comparisons if not one.ok)
        if self.eight_bits and not self.median <= self.median_limit:
            found += (
                f"all positions: the median difference of a log-probability is {self.median:.1e} "
                f"(allowed: {self.median_limit:.1e})",
            )
        return found

    def to_json(self) -> str:
        """One line; differences that are not finite are null."""
        data = dataclasses.asdict(self)
        for one in data["comparisons"]:
            if not math.isfinite(one["difference"]):
                one["difference"] = None
        return json.dumps({**data, "ok": self.ok, "limit": self.limit})

    @classmethod
    def from_json(cls, text: str) -> ServedCheck:
        """The inverse of `to_json`."""
        data = json.loads(text)
        rows = [
            {**one, "difference": math.inf if one["difference"] is None else one["difference"]}
            for one in data["comparisons"]
        ]
        return cls(
            layout=data["layout"],
            scale=data["scale"],
            rounding=data["rounding"],
            eight_bits=data["eight_bits"],
            median=data["median"],
            comparisons=tuple(ServedComparison(**row) for row in rows),
        )


def equal_limit(scale: float, rounding: float = 0.0) -> float:
    """The largest difference of a log-probability that counts as equal, in nats."""
    return max(TOLERANCE * scale, 2 * rounding if rounding <= LARGEST_ROUNDING * scale else 0.0)
