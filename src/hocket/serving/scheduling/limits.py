"""Limits: how much one replica's scheduler may hold at once, in blocks, rows and tokens."""

from __future__ import annotations

import dataclasses

from hocket.spec.errors import OptionError

LOOKAHEAD_DEPTH = 2
"""Plans in flight with lookahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one scheduler, and so of everything it keeps in memory.

    Attributes:
        num_blocks: blocks of the key/value cache.
        block_size: tokens of a block.
        max_num_seqs: requests that run at once; workers' rows are slots 0 .. max_num_seqs-1.
        max_num_batched_tokens: tokens that one plan computes.
        max_model_len: tokens of one request, prompt and answer.
        depth: plans in flight; at least the number of pipeline stages, so that none waits.
        plan_tokens: prompt tokens that take a stage as long as what a plan costs besides its own,
            since weights are read for each.
        max_queue: requests that wait, in addition to those for which a row is free, before more are
            refused.
        max_waiting_tokens: prompt tokens that wait before more are refused.
        max_logit_rows: positions of one plan for which every position's logits are made
            (`Row.logits` ALL), besides one for each row that is sampled.
        lookahead: a decoding sequence may be in two plans in flight, the second of which takes
            its token from the first on the device. With one stage and a depth of 2.
        prefix_cache: share the blocks of equal beginnings.
        num_snapshots: copies of recurrent states that are kept for the prefix cache. None: the
            model has no recurrent layers.
        vocab_size: token ids above are refused. None: not checked.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int = 1
    plan_tokens: int = 32
    max_queue: int = 256
    max_waiting_tokens: int = 1 << 20
    max_logit_rows: int = 64
    lookahead: bool = False
    prefix_cache: bool = True
    num_snapshots: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("max_queue", "num_snapshots") else 1
            if type(value) is int and not least <= value < 2**31:
                raise OptionError(
                    f"{field.name} is {value}; it must be from {least} to {2**31 - 1}"
                )

        if self.lookahead and self.depth != LOOKAHEAD_DEPTH:
            raise OptionError(
                f"depth is {self.depth}; with lookahead it is {LOOKAHEAD_DEPTH}: one plan is "
                "computed and one waits",
                hint=f"depth={LOOKAHEAD_DEPTH}",
            )

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)
