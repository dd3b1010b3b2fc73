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

from hocket.cost.communication_table import FLOAT, Step, Table
from hocket.cost.stage_communication import StageShare
from hocket.spec import recompute
from hocket.spec.layout import Layout
from hocket.spec.model_shape import Attention


def heads_are_split(core: Attention, cp: int, method: str) -> bool:
    """Whether the heads of one tensor rank are split over `cp` ranks (Ulysses)."""
    return method != "ring" and core.heads % cp == 0 and core.kv_heads % cp == 0


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


def add_attention(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    """Add what the attention of a stage communicates."""
    if layout.cp == 1:
        return
    number = step.num_microbatches
    # A core that is run again stops once it has what backward reads: before its outputs leave.
    outputs_again = number * ("core_attn" not in recompute.modules(layout.recompute))
    for cores, rounds in (
        (share.attentions, (number, number, number)),
        (share.attentions_constant, (number, number, 0)),
        (share.attentions_again, (number, outputs_again, 0)),
    ):
        for core in cores:
            _add_core(table, layout.cp, step, core, rounds)


def _add_core(
    table: Table, cp: int, step: Step, core: Attention, rounds: tuple[int, int, int]
) -> None:
    """Add one attention. `rounds`: how often its inputs, its outputs and its gradients travel."""
    inputs, outputs, backward = rounds
    e, both = step.element_bytes, core.kv_heads * (core.head_dim + core.value_dim)
    if heads_are_split(core, cp, step.context_parallel):
        there = step.tokens * (core.heads * core.head_dim + both) * e
        back = step.tokens * core.heads * core.value_dim * e
        table.add("all-to-all", "cp", "microbatch", inputs + backward, there)
        table.add("all-to-all", "cp", "microbatch", outputs + backward, back)
        return
    message = step.tokens * both
    for name in ("send", "receive"):
        table.add(name, "cp", "microbatch", (inputs + backward) * (cp - 1), message * e)
        table.add(name, "cp", "microbatch", backward * (cp - 1), message * max(e, FLOAT))
