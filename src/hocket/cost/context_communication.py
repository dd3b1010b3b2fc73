"""Context parallelism: what attention and recurrent layers of a stage communicate over cp.

    ring      keys and values go to the next rank n - 1 times in forward and n - 1 times in
              backward, and their gradients, in fp32 or wider, n - 1 times  (Liu et al. 2023)
    ulysses   1 all-to-all of queries, keys and values, 1 of the outputs; backward the same
                                                                      (Jacobs et al. 2023)
    states    a rank sends the state after its front chunk to the next rank, that after its back
              chunk to the one before, each once in forward and its gradient's way back once in
              backward; the last inputs of a convolution likewise
                                                       (`runtime.context_parallel.state`)

Ring or Ulysses, the runtime decides by the heads that a rank has; the same rule is here.

Legend: n ranks of cp, t tokens of a microbatch on this rank, A query and K key/value heads of a
tensor rank, D and E sizes of keys and values.
"""

from __future__ import annotations

import dataclasses

from hocket.cost.communication_table import FLOAT, Step, Table
from hocket.cost.stage_communication import StageShare
from hocket.spec import recompute
from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """Heads of one layer on one tensor rank.

    Attributes:
        queries, keys: A and K. key_size, value_size: D and E.
        method: `ring`, `ulysses` or `auto`.
    """

    queries: int
    keys: int
    key_size: int
    value_size: int
    method: str = "auto"

    def are_split(self, cp: int) -> bool:
        """Whether heads are split over `cp` ranks (Ulysses)."""
        return self.method != "ring" and self.queries % cp == 0 and self.keys % cp == 0


def add_states(table: Table, layout: Layout, step: Step, share: StageShare, index: int) -> None:
    """Add what the recurrent layers of a stage communicate on the rank of an `index` over cp: one
    message of each kind to each neighbour on the line, and as many in backward."""
    neighbours = (index > 0) + (index < layout.cp - 1)
    rows = step.microbatch_size
    for handed in (*share.handed, *share.handed, *share.handed_again):
        count = neighbours * step.num_microbatches
        for name in ("send", "receive"):
            table.add(name, "cp", "microbatch", count, rows * handed.inputs * step.element_bytes)
            if handed.state:
                table.add(name, "cp", "microbatch", count, rows * handed.state * FLOAT)


def add_attention(
    table: Table, layout: Layout, step: Step, share: StageShare, heads: AttentionHeads | None
) -> None:
    """Add what the attention of a stage communicates. `heads` None: not known, nothing."""
    cp, number, e = layout.cp, step.num_microbatches, step.element_bytes
    if cp == 1 or heads is None:
        return
    backward = number * share.attentions
    forward = backward + number * share.attentions_again
    both = heads.keys * (heads.key_size + heads.value_size)
    if heads.are_split(cp):
        there = step.tokens * (heads.queries * heads.key_size + both) * e
        back = step.tokens * heads.queries * heads.value_size * e
        table.add("all-to-all", "cp", "microbatch", forward + backward, there)
        # A core that is run again stops once it has what backward reads: before its outputs leave.
        whole = backward if "core_attn" in recompute.modules(layout.recompute) else forward
        table.add("all-to-all", "cp", "microbatch", whole + backward, back)
        return
    for name in ("send", "receive"):
        message = step.tokens * both
        table.add(name, "cp", "microbatch", (forward + backward) * (cp - 1), message * e)
        table.add(name, "cp", "microbatch", backward * (cp - 1), message * max(e, FLOAT))
