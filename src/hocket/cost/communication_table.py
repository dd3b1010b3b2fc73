"""Table: every collective of one step and when it is called; and the sizes of the step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.spec.plan import AFTER, BEFORE, OTHER

FIRST_BUCKET_BYTES = 1_000_000
FLOAT, INTEGER = 4, 8

Key = tuple[str, str, str]
"""(name, axis, phase)."""


class When(enum.StrEnum):
    """When a rank calls a collective: within every forward or backward, once a stage's gradients
    are there, at the end of a step, and then for the loss and for the gradients' norm."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    REDUCTION = enum.auto()
    END = enum.auto()
    LOSS = enum.auto()
    NORM = enum.auto()

    @property
    def often(self) -> bool:
        """Whether in every microbatch."""
        return self in (When.FORWARD, When.BACKWARD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one data rank, in numbers.

    Attributes:
        seq_len: S.
        microbatch_size: B, rows of one microbatch on one data rank.
        num_microbatches: of one data rank.
        hidden_size: H.
        element_bytes: e, of activations that travel and of parameters.
        gradient_bytes: of an element of a gradient.
        experts_per_token: k.
        expert_nodes: nodes to each of which a token is sent once; 0: a row is sent for each choice.
        experts_by_library: DeepEP moves the tokens; what is counted are those of this rank.
        counts_tokens: the number of valid tokens is summed over dp (not known beforehand).
        bucket_bytes: capacity of a gradient bucket; the first holds at most 1 MB.
        context_parallel: `ring`, `ulysses` or `auto`.
    """

    seq_len: int
    microbatch_size: int
    num_microbatches: int
    hidden_size: int
    element_bytes: int = 4
    gradient_bytes: int = 4
    experts_per_token: int = 0
    expert_nodes: int = 0
    experts_by_library: bool = False
    counts_tokens: bool = True
    bucket_bytes: float = 25_000_000
    context_parallel: str = "auto"

    @property
    def tokens(self) -> int:
        """T, tokens of one microbatch."""
        return self.microbatch_size * self.seq_len

    @property
    def hidden_bytes(self) -> int:
        """T H e, the message between stages and of a tensor-parallel all-reduce."""
        return self.tokens * self.hidden_size * self.element_bytes


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """Collectives of one kind, or messages, of one rank.

    Attributes:
        count: how many, in every forward or backward, or in a step. bytes: of each.
        at_most: bytes depend on what routers choose, and are the most there can be.
    """

    when: When
    name: str
    axis: str
    count: int
    bytes: int
    at_most: bool = False

    @property
    def phase(self) -> str:
        """In which the recorder counts it; what ZeRO-3 gathers in a microbatch is the step's."""
        of_state = self.axis in ("shard", "expert_data")
        return "microbatch" if self.when.often and not of_state else "step"


class Table:
    """What one rank calls in a step of `num_microbatches`, in order."""

    def __init__(self, num_microbatches: int = 1) -> None:
        self.num_microbatches = num_microbatches
        self.calls: list[CollectiveCall] = []

    def add(
        self, when: When, name: str, axis: str, count: int, nbytes: int, *, at_most: bool = False
    ) -> None:
        """`count` messages of `nbytes` each."""
        if count:
            self.calls.append(CollectiveCall(when, name, axis, count, nbytes, at_most))

    def list(self) -> list[dict[str, Any]]:
        """As the recorder counts a step: a row for each name, axis and phase, sorted."""
        rows: dict[Key, list[int]] = {}
        for call in self.calls:
            count = call.count * (self.num_microbatches if call.when.often else 1)
            row = rows.setdefault((call.name, call.axis, call.phase), [0, 0])
            row[0] += count
            row[1] += count * call.bytes
        at_most = {(c.name, c.axis, c.phase) for c in self.calls if c.at_most}
        return [
            {"name": key[0], "axis": key[1], "phase": key[2], "count": count, "bytes": nbytes}
            | ({"at_most": True} if key in at_most else {})
            for key, (count, nbytes) in sorted(rows.items())
        ]


def bucket_members(gradients: Sequence[int], capacity: float) -> list[list[int]]:
    """Indices of the gradients in each bucket, filled from the last parameter to the first.

    Backward reaches the last parameters first. The first bucket holds at most 1 MB, so that
    communication begins early; a parameter larger than a bucket has one of its own (after Li et
    al. 2020, section 3.2).
    """
    filled: list[list[int]] = []
    limit, held = min(FIRST_BUCKET_BYTES, capacity), 0
    for index in reversed(range(len(gradients))):
        if filled and held + gradients[index] <= limit:
            filled[-1].append(index)
            held += gradients[index]
        else:
            limit = capacity if filled else limit
            filled.append([index])
            held = gradients[index]
    return filled


def bucket_bytes(gradients: Sequence[int], capacity: float) -> list[int]:
    """Bytes of each of these buckets."""
    return [sum(gradients[i] for i in own) for own in bucket_members(gradients, capacity)]


def add_sharded(
    table: Table,
    step: Step,
    axis: str,
    ranks: int,
    *,
    zero: int,
    gradients: Sequence[tuple[int, bool]],
    values: Sequence[tuple[str, int, bool]],
) -> None:
    """Add what ZeRO does with one state: gradients reduced in shards, values gathered. Buckets have
    elements of a multiple of the ranks.

    Args:
        ranks: that share the state. gradients: of each bucket its bytes, and whether it is late.
        values: of each bucket its block, the bytes that gradients would have, and whether it holds
            two elements to a byte.
    """

    def elements(nbytes: int) -> int:
        return -(-nbytes // step.gradient_bytes // ranks) * ranks

    for nbytes, late in gradients:
        # With backward in halves a bucket is full once the weights' half has come for all of it.
        count = step.num_microbatches if zero > 1 and not late else 1
        size = elements(nbytes) * step.gradient_bytes
        table.add(When.REDUCTION, "reduce-scatter", axis, count, size)
    for block, nbytes, packed in values:
        size = elements(nbytes // 2) if packed else elements(nbytes) * step.element_bytes
        if zero < 3:
            table.add(When.END, "all-gather", axis, 1, size)
            continue
        again = int(block not in (BEFORE, AFTER, OTHER))  # others stay from forward to backward
        table.add(When.FORWARD, "all-gather", axis, 1, size)
        table.add(When.BACKWARD, "all-gather", axis, again, size)


def by_block(rows: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Bytes summed by their first column."""
    found: dict[Any, int] = {}
    for block, nbytes in rows:
        found[block] = found.get(block, 0) + nbytes
    return list(found.items())
