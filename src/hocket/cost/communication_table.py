"""Table: collectives of one step by name, axis and phase; and the sizes of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hocket.spec.plan import AFTER, BEFORE, OTHER

FIRST_BUCKET_BYTES = 1_000_000
FLOAT, INTEGER = 4, 8

Key = tuple[str, str, str]
"""(name, axis, phase)."""


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
        clips: the norm of the gradient is computed.
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
    clips: bool = True
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


class Table:
    """Counts and bytes by (name, axis, phase).

    Attributes:
        at_most: rows whose bytes depend on what routers choose, and are the most there can be.
    """

    def __init__(self) -> None:
        self.rows: dict[Key, list[int]] = {}
        self.at_most: set[Key] = set()

    def add(
        self, name: str, axis: str, phase: str, count: int, nbytes: int, *, at_most: bool = False
    ) -> None:
        """`count` messages of `nbytes` each."""
        if at_most:
            self.at_most.add((name, axis, phase))
        if count:
            row = self.rows.setdefault((name, axis, phase), [0, 0])
            row[0] += count
            row[1] += count * nbytes

    def list(self) -> list[dict[str, Any]]:
        return [
            {"name": key[0], "axis": key[1], "phase": key[2], "count": count, "bytes": nbytes}
            | ({"at_most": True} if key in self.at_most else {})
            for key, (count, nbytes) in sorted(self.rows.items())
        ]


def bucket_bytes(gradients: Sequence[int], capacity: float) -> list[int]:
    """Bytes of each gradient bucket: filled from the last parameter to the first.

    Backward reaches the last parameters first. The first bucket holds at most 1 MB, so that
    communication begins early; a parameter larger than a bucket has one of its own (after Li et
    al. 2020, section 3.2).
    """
    filled: list[int] = []
    limit = min(FIRST_BUCKET_BYTES, capacity)
    for nbytes in reversed(gradients):
        if filled and filled[-1] + nbytes <= limit:
            filled[-1] += nbytes
        else:
            limit = capacity if filled else limit
            filled.append(nbytes)
    return filled


def block_gathers(block: str, step: Step) -> int:
    """How often ZeRO-3 gathers a block in a step."""
    return (1 if block in (BEFORE, AFTER, OTHER) else 2) * step.num_microbatches
