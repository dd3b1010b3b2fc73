"""Experts over ranks (ep, etp): what they add to a step's collectives.

Every row of a token travels to each of its k experts and back, and in backward its gradient does.
The sizes of the messages follow from the router, which no layout knows; but a rank brings exactly
t k rows, and gets as many back. That is what the recorder counts, and what is expected here. Of
them the experts of the rank itself keep some: with even routing 1 / ep. Where a token crosses the
network once for each node, bytes are the router's, and what is expected is the most.
"""

from __future__ import annotations

from hocket.cost.communication_table import (
    FLOAT,
    INTEGER,
    Step,
    Table,
    When,
    add_sharded,
    bucket_bytes,
    by_block,
)
from hocket.cost.stage_communication import StageShare
from hocket.spec.layout import Layout


def add_experts(table: Table, layout: Layout, step: Step, share: StageShare, tp_index: int) -> None:
    """Add what the experts of a stage communicate on the tensor rank `tp_index`."""
    if not share.experts:
        return
    e, tp, forward = step.element_bytes, layout.tp, len(share.experts)
    again, whole_again = len(share.experts_again), share.experts_whole
    whole = layout.etp is not None and tp > 1  # each expert is, and tensor ranks divide tokens
    each = -(-step.tokens // tp) if whole else step.tokens
    if layout.ep > 1 and step.expert_nodes > 1:
        _by_node(table, step, share, each)
    elif layout.ep > 1:
        rows = step.tokens // tp + (tp_index < step.tokens % tp) if whole else step.tokens
        message = rows * step.hidden_size * e
        turns = 2 * again
        if step.experts_by_library:  # which sums the rows of a token: nothing reads them again
            turns = again + whole_again
        else:
            message *= step.experts_per_token
            for count in share.experts:  # none when a layer is recomputed
                table.add(When.FORWARD, "all-to-all", "expert", 1, count * INTEGER)
        table.add(When.FORWARD, "all-to-all", "expert", 2 * forward, message)
        table.add(When.BACKWARD, "all-to-all", "expert", 2 * forward + turns, message)
    if whole and not layout.sequence_parallel:
        gathered = tp * each * e
        for when, count, width in (
            (When.FORWARD, forward, step.hidden_size),
            (When.BACKWARD, whole_again, step.hidden_size),
            (When.BACKWARD, forward, step.hidden_size + step.experts_per_token),
        ):
            table.add(when, "all-gather", "tp", count, gathered * width)
    _state(table, layout, step, share)


def _by_node(table: Table, step: Step, share: StageShare, rows: int) -> None:
    """Dispatch in two levels, of at most `rows` tokens a rank. How many nodes a token goes to, and
    how many rows a node's ranks pass on, the router decides: these are the most there can be."""
    k, nodes = step.experts_per_token, step.expert_nodes
    for count in share.experts:
        table.add(When.FORWARD, "all-to-all", "expert_rail", 1, (count + nodes) * INTEGER)
        table.add(When.FORWARD, "all-to-all", "expert_node", 1, count // nodes * INTEGER)
    forward, again = len(share.experts), len(share.experts_again)
    crossing, copies = rows * min(k, nodes), rows * nodes * k
    hidden = step.hidden_size * step.element_bytes
    for axis, early, late, nbytes in (
        ("expert_rail", forward, again, crossing * k * INTEGER),  # choices
        ("expert_rail", forward, forward + again, crossing * k * max(FLOAT, step.element_bytes)),
        ("expert_rail", 2 * forward, 2 * forward + again + share.experts_whole, crossing * hidden),
        ("expert_node", 2 * forward, 2 * forward + 2 * again, copies * hidden),
    ):
        for when, times in ((When.FORWARD, early), (When.BACKWARD, late)):
            table.add(when, "all-to-all", axis, times, nbytes, at_most=True)


def _state(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    """Gradients and values of experts, over the ranks that hold copies of them."""
    ranks, axis = layout.expert_copies, "expert_data"
    if ranks == 1:
        return
    buckets = bucket_bytes([nbytes for _, nbytes in share.expert_gradients], step.bucket_bytes)
    if not layout.zero:
        for nbytes in buckets:
            table.add(When.REDUCTION, "all-reduce", axis, 1, nbytes)
        return
    values = by_block(share.expert_gradients) if layout.zero == 3 else [("", n) for n in buckets]
    frozen = by_block(share.expert_frozen) if layout.zero == 3 else []
    gradients = [(nbytes, False) for _, nbytes in values]
    held = [(block, nbytes, False) for block, nbytes in values + frozen]
    add_sharded(table, step, axis, ranks, zero=layout.zero, gradients=gradients, values=held)
