"""Experts over ranks (ep, etp): what they add to a step's collectives.

Every row of a token travels to each of its k experts and back, and in backward its gradient does.
The sizes of the messages follow from the router, which no layout knows; but a rank brings exactly
t k rows, and gets as many back. That is what the recorder counts, and what is expected here. Of
them the experts of the rank itself keep some: with even routing 1 / ep. Where a token crosses the
network once for each node, bytes are the router's, and what is expected is the most.
"""

from __future__ import annotations

import math

from hocket.cost.communication_table import FLOAT, INTEGER, Step, Table, block_gathers, bucket_bytes
from hocket.cost.stage_communication import StageShare
from hocket.spec.layout import Layout


def add_experts(table: Table, layout: Layout, step: Step, share: StageShare, tp_index: int) -> None:
    """Add what the experts of a stage communicate on the tensor rank `tp_index`."""
    if not share.experts:
        return
    e, number, tp = step.element_bytes, step.num_microbatches, layout.tp
    whole = layout.etp is not None and tp > 1  # each expert is, and tensor ranks divide tokens
    sequence = layout.sequence_parallel
    each = -(-step.tokens // tp) if whole else step.tokens
    if layout.ep > 1 and step.expert_nodes > 1:
        _by_node(table, layout, step, share, each)
    elif layout.ep > 1:
        rows = step.tokens // tp + (tp_index < step.tokens % tp) if whole else step.tokens
        message, forward = rows * step.hidden_size * e, len(share.experts)
        if step.experts_by_library:  # which sums the rows of a token: nothing reads them again
            turns = 4 * forward + len(share.experts_again) + share.experts_whole
        else:
            message *= step.experts_per_token
            turns = 4 * forward + 2 * len(share.experts_again)
            for count in share.experts:  # none when a layer is recomputed
                table.add("all-to-all", "expert", "microbatch", number, count * INTEGER)
        table.add("all-to-all", "expert", "microbatch", number * turns, message)
    if whole and not sequence:
        gathered = tp * each * e
        outputs = len(share.experts) + share.experts_whole
        table.add("all-gather", "tp", "microbatch", number * outputs, gathered * step.hidden_size)
        width = step.hidden_size + step.experts_per_token
        table.add("all-gather", "tp", "microbatch", number * len(share.experts), gathered * width)
    _state(table, layout, step, share)


def _by_node(table: Table, layout: Layout, step: Step, share: StageShare, rows: int) -> None:
    """Dispatch in two levels, of at most `rows` tokens a rank. How many nodes a token goes to, and
    how many rows a node's ranks pass on, the router decides: these are the most there can be."""
    number, k, nodes = step.num_microbatches, step.experts_per_token, step.expert_nodes
    for count in share.experts:
        table.add("all-to-all", "expert_rail", "microbatch", number, (count + nodes) * INTEGER)
        table.add("all-to-all", "expert_node", "microbatch", number, count // nodes * INTEGER)
    forward, again = len(share.experts), len(share.experts_again)
    crossing, copies = rows * min(k, nodes), rows * nodes * k
    hidden = step.hidden_size * step.element_bytes
    for axis, times, nbytes in (
        ("expert_rail", forward + again, crossing * k * INTEGER),  # choices
        ("expert_rail", 2 * forward + again, crossing * k * max(FLOAT, step.element_bytes)),
        ("expert_rail", 4 * forward + again + share.experts_whole, crossing * hidden),
        ("expert_node", 4 * forward + 2 * again, copies * hidden),
    ):
        table.add("all-to-all", axis, "microbatch", number * times, nbytes, at_most=True)


def _state(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    """Gradients and values of experts, over the ranks that hold copies of them."""
    ranks, axis = layout.expert_copies, "expert_data"
    if ranks == 1:
        return
    sizes = [nbytes for _, nbytes in share.expert_gradients]
    if not layout.zero:
        for nbytes in bucket_bytes(sizes, step.bucket_bytes):
            table.add("all-reduce", axis, "step", 1, nbytes)
        return
    found = [(nbytes, 1) for nbytes in bucket_bytes(sizes, step.bucket_bytes)]
    if layout.zero == 3:
        found = _blocks(share.expert_gradients, step)
    for nbytes, times in found:
        elements = math.ceil(nbytes / step.gradient_bytes / ranks) * ranks
        count = step.num_microbatches if layout.zero > 1 else 1
        table.add("reduce-scatter", axis, "step", count, elements * step.gradient_bytes)
        table.add("all-gather", axis, "step", times, elements * step.element_bytes)
    for nbytes, times in _blocks(share.expert_frozen, step) if layout.zero == 3 else ():
        elements = math.ceil(nbytes / step.gradient_bytes / ranks) * ranks
        table.add("all-gather", axis, "step", times, elements * step.element_bytes)


def _blocks(rows: tuple[tuple[str, int], ...], step: Step) -> list[tuple[int, int]]:
    """(bytes, gathers in a step) of each block that ZeRO-3 gathers."""
    blocks: dict[str, int] = {}
    for block, nbytes in rows:
        blocks[block] = blocks.get(block, 0) + nbytes
    return [(nbytes, block_gathers(block, step)) for block, nbytes in blocks.items()]
