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

from hocket.cost.communication_table import FLOAT, Step, Table, When
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
    for when, sizes in (
        (When.FORWARD, share.handed),
        (When.BACKWARD, (*share.handed, *share.handed_again)),
    ):
        for handed in sizes:
            for name in ("send", "receive"):
                nbytes = rows * handed.inputs * step.element_bytes
                table.add(when, name, "cp", neighbours, nbytes)
                if handed.state:
                    table.add(when, name, "cp", neighbours, rows * handed.state * FLOAT)


def add_attention(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    if layout.cp == 1:
        return
    # A core that is run again stops once it has what backward reads: before its outputs leave.
    leaves_again = "core_attn" not in recompute.modules(layout.recompute)
    for cores, when, outputs, gradients in (
        (share.attentions, When.FORWARD, True, False),
        (share.attentions_constant, When.FORWARD, True, False),
        (share.attentions_again, When.BACKWARD, leaves_again, False),
        (share.attentions, When.BACKWARD, True, True),
    ):
        for core in cores:
            _add_core(table, layout.cp, step, core, when, outputs=outputs, gradients=gradients)


def _add_core(
    table: Table,
    cp: int,
    step: Step,
    core: Attention,
    when: When,
    *,
    outputs: bool,
    gradients: bool,
) -> None:
    """Add one way through one attention: its inputs, its `outputs`, and a ring's `gradients`."""
    e, both = step.element_bytes, core.kv_heads * (core.head_dim + core.value_dim)
    if heads_are_split(core, cp, step.context_parallel):
        there = step.tokens * (core.heads * core.head_dim + both) * e
        back = step.tokens * core.heads * core.value_dim * e
        table.add(when, "all-to-all", "cp", 1, there)
        table.add(when, "all-to-all", "cp", int(outputs), back)
        return
    message = step.tokens * both
    for name in ("send", "receive"):
        table.add(when, name, "cp", cp - 1, message * e)
        table.add(when, name, "cp", int(gradients) * (cp - 1), message * max(e, FLOAT))
