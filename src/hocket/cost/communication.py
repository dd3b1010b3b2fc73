"""Communication: every collective of one training step of one rank, from the layout alone.

What the runtime records, the theory says beforehand, in the same convention: name, mesh axis,
phase, count, and bytes as the sum of message sizes on this rank (the whole tensor for all-reduce,
send and receive, the output for all-gather).

    once a microbatch
        tp   all-reduce    2 forward and 2 backward a layer, each T H e   (Shoeybi et al. 2019, 3)
             all-reduce    and, where layers are run again in backward, all of their forward once
                           more, but that of a product with which a layer ends
             all-reduce    1 forward after the embedding, 1 backward before the output head
             all-gather    of two numbers a token and rank, for the loss
        tp, sequence parallel: instead of each all-reduce
             all-gather    1 and reduce-scatter 1, each T H e, which ring for ring is as many bytes
             all-gather    and 1 more for each block backward: its input, kept in slices
                           (Korthikanti et al. 2022, 4.2.2)
        pp   send, receive T H e to and from each neighbouring stage, forward and backward; of
             slices (sequence parallel) T H e / tp
        expert (ep) for each set of E experts, t tokens of a rank (T / tp where tensor ranks divide
             all-to-all    them), k experts of a token: of the counts E 8 forward, not when a
             layer is recomputed; of the tokens
             t k H e there and back, forward and backward (Lepikhin et al. 2021, GShard): counted by
             the tokens' own rank, whatever the router chose; 1/ep of them on average stay
        tp   all-gather    with etp below tp, of the experts' outputs and of gradients, T H e and
             T (H + k) e
    once a step
        dp   all-reduce    of all gradients, in buckets; of the number of valid tokens. With cp over
             `data`, which is dp x cp
        shard (ZeRO-1, 2)  instead: reduce-scatter of all gradients (ZeRO-2: each microbatch), and
             all-gather    of all parameters; replicas all-reduce of the shares (hybrid sharding)
        shard (ZeRO-3)     each microbatch: all-gather of every layer, forward and backward, and of
             what is no layer once; reduce-scatter of all gradients
        tp   all-reduce    of gradients that are partial sums (norms over heads, key/value copies)
        embedding all-reduce  of tied gradients, between first and last stage
        expert_data        of the experts what dp and shard have of all else (ep, etp)
        world all-reduce   of the loss; model: of the squared norm (world with ZeRO, ep or etp)

With cp a rank has S / cp tokens of each sequence; `cost.context_communication` has its attention
and what recurrent layers hand on.

Legend: B rows of a microbatch, S sequence, T = B S tokens, H hidden, V vocabulary, e bytes of an
element. Axes of one rank do not communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hocket.cost.communication_table import (
    FIRST_BUCKET_BYTES,
    FLOAT,
    INTEGER,
    Key,
    Step,
    Table,
    block_gathers,
    bucket_bytes,
)
from hocket.cost.context_communication import add_attention, add_states
from hocket.cost.expert_communication import add_experts
from hocket.cost.stage_communication import StageShare
from hocket.spec.layout import Layout

__all__ = [
    "FIRST_BUCKET_BYTES",
    "Step",
    "bucket_bytes",
    "communication",
    "differences",
    "frozen_buckets",
    "shared_buckets",
]


def communication(
    layout: Layout,
    rank: int,
    step: Step,
    shares: Iterable[StageShare],
    stage_ranks: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Rows of name, axis, phase, count and bytes of one step on one rank, sorted.

    Args:
        layout: the layout.
        rank: global rank, 0 .. world_size - 1.
        step: the sizes of the step.
        shares: what this rank holds of each of its stages.
        stage_ranks: stage to pipeline rank. None: stage s lies on rank s mod pp.
    """
    place = list(stage_ranks or [s % layout.pp for s in range(layout.num_stages)])
    here = layout.coordinate(rank)["pp"]
    held = list(shares)
    tp_index = layout.coordinate(rank)["tp"]
    assert sorted(s.stage for s in held) == [s for s, r in enumerate(place) if r == here], held
    table, data = Table(), "data" if layout.cp > 1 else "dp"
    partial: dict[str, int] = {}
    for share in held:
        if layout.tp > 1:
            _tensor(table, step, share)
            _loss(table, step, share, layout.tp)
            for axis, nbytes in share.partial_bytes.items():
                partial[axis] = partial.get(axis, 0) + nbytes
        if share.router_sums and layout.data_degree > 1:
            size = share.router_sums * FLOAT
            table.add("all-reduce", data, "microbatch", step.num_microbatches, size)
        add_experts(table, layout, step, share, tp_index)
        add_attention(table, layout, step, share)
        add_states(table, layout, step, share, layout.coordinate(rank)["cp"])
        _pipeline(table, step, share.stage, place, layout.tp if layout.sequence_parallel else 1)
        if layout.data_degree > 1:
            if layout.zero:
                _sharded(table, layout, step, share)
            else:
                for nbytes in bucket_bytes(share.gradient_bytes, step.bucket_bytes):
                    table.add("all-reduce", data, "step", 1, nbytes)
    for axis, nbytes in partial.items():  # of all stages of the rank in one
        table.add("all-reduce", axis, "step", 1, nbytes)
    if held and here in (place[0], place[-1]) and place[0] != place[-1]:
        for nbytes in held[0].tied_bytes or held[-1].tied_bytes:
            table.add("all-reduce", "embedding", "step", 1, nbytes)
    if layout.data_degree > 1 and step.counts_tokens:
        table.add("all-reduce", data, "step", 1, INTEGER)
    if layout.world_size > 1:
        table.add("all-reduce", "world", "step", 1, FLOAT)
    apart = any(share.experts for share in held) or (layout.zero and layout.data_degree > 1)
    if step.clips and apart and layout.world_size > 1:
        table.add("all-reduce", "world", "step", 1, FLOAT)
    elif layout.tp * layout.cp * layout.pp > 1 and step.clips:
        table.add("all-reduce", "model", "step", 1, FLOAT)
    return table.list()


def _tensor(table: Table, step: Step, share: StageShare) -> None:
    """What split layers cost each microbatch."""
    number, e = step.num_microbatches, step.element_bytes
    sums = share.forward_sums + share.backward_sums + share.repeated_sums
    table.add("all-reduce", "tp", "microbatch", number * sums, step.hidden_bytes)
    if share.wider:
        row = table.rows["all-reduce", "tp", "microbatch"]
        row[1] += number * share.wider * step.tokens * e
    if share.expert_weights:
        # They ride along with a gradient of T x H: bytes, but no message of their own.
        row = table.rows["all-reduce", "tp", "microbatch"]
        row[1] += number * share.expert_weights * step.tokens * e
    gathers = (*share.forward_gathers, *share.backward_gathers, *share.repeated_gathers)
    for width in gathers:
        table.add("all-gather", "tp", "microbatch", number, step.tokens * width * e)
    scatters = (*share.forward_scatters, *share.backward_scatters, *share.repeated_scatters)
    for width in scatters:
        table.add("reduce-scatter", "tp", "microbatch", number, step.tokens * width * e)
    for count in (*share.choices, *share.repeated_choices):
        table.add("all-gather", "tp", "microbatch", number, step.tokens * count * INTEGER)


def _sharded(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    """ZeRO: gradients reduced in shares, parameters gathered; bytes of whole buckets, whose number
    of elements is rounded up to a multiple of the ranks."""
    ranks = (layout.shard or layout.dp) * layout.cp
    for late, nbytes, gathers in shared_buckets(layout, step, share):
        elements = -(-nbytes // step.gradient_bytes // ranks) * ranks
        # With backward in two halves a bucket is full once the weights' half has come for all of
        # it.
        count = step.num_microbatches if layout.zero > 1 and not late else 1
        if ranks > 1:
            table.add("reduce-scatter", "shard", "step", count, elements * step.gradient_bytes)
            table.add("all-gather", "shard", "step", gathers, elements * step.element_bytes)
        if ranks < layout.data_degree:
            table.add("all-reduce", "replicas", "step", 1, elements // ranks * step.gradient_bytes)
    for nbytes, gathers in frozen_buckets(layout, step, share) if ranks > 1 else ():
        elements = -(-nbytes // step.gradient_bytes // ranks) * ranks
        table.add("all-gather", "shard", "step", gathers, elements * step.element_bytes)


def shared_buckets(
    layout: Layout, step: Step, share: StageShare
) -> Iterator[tuple[bool, int, int]]:
    """(reduced late, bytes of gradients, gathers of the values in a step) of each bucket."""
    for late in (False, True):
        rows = list(zip(share.gradient_bytes, share.late, strict=True))
        if layout.zero < 3:
            sizes = [nbytes for nbytes, is_late in rows if is_late == late]
            yield from ((late, nbytes, 1) for nbytes in bucket_bytes(sizes, step.bucket_bytes))
            continue
        blocks: dict[str, int] = {}
        for (nbytes, is_late), block in zip(rows, share.blocks, strict=True):
            if is_late == late:
                blocks[block] = blocks.get(block, 0) + nbytes
        for block, nbytes in blocks.items():
            yield late, nbytes, block_gathers(block, step)


def frozen_buckets(layout: Layout, step: Step, share: StageShare) -> Iterator[tuple[int, int]]:
    """(bytes that gradients would have, gathers of the values in a step) of each bucket of what is
    frozen: ZeRO-3 shares that out too."""
    if layout.zero < 3:
        return
    buckets: dict[tuple[str, bool], int] = {}
    for block, nbytes, late in share.frozen:
        buckets[block, late] = buckets.get((block, late), 0) + nbytes
    for (block, _), nbytes in buckets.items():
        yield nbytes, block_gathers(block, step)


def _loss(table: Table, step: Step, share: StageShare, tp: int) -> None:
    """The split loss: of each token and rank, a log-sum-exp and a label's logit, in fp32."""
    if share.split_loss:
        nbytes = tp * 2 * step.tokens * FLOAT
        table.add("all-gather", "tp", "microbatch", step.num_microbatches, nbytes)


def _pipeline(table: Table, step: Step, stage: int, place: Sequence[int], slices: int) -> None:
    """Hidden states (one of their `slices`) forward and their gradients back, where the neighbour
    is another rank."""
    nbytes = step.hidden_bytes // slices
    for neighbour in (stage - 1, stage + 1):
        if 0 <= neighbour < len(place) and place[neighbour] != place[stage]:
            for name in ("send", "receive"):
                table.add(name, "pp", "microbatch", step.num_microbatches, nbytes)


def differences(
    recorded: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Theory compared with the recording, row by row.

    Rows of the phase `other` (set-up, saves, evaluation) are no part of a step and left out.

    Returns:
        Rows of name, axis, phase, count, bytes, expected_count, expected_bytes and equal. Bytes of
        rows that are marked `at_most` equal theory where they are no more.
    """
    left = {_key(row): row for row in recorded if row["phase"] != "other"}
    right = {_key(row): row for row in expected}
    rows = []
    for key in sorted({*left, *right}):
        name, axis, phase = key
        measured, theory = (side.get(key, {"count": 0, "bytes": 0}) for side in (left, right))
        below = theory.get("at_most", False) and measured["bytes"] <= theory["bytes"]
        equal = measured["count"] == theory["count"] and (
            below or measured["bytes"] == theory["bytes"]
        )
        rows.append(
            {
                "name": name,
                "axis": axis,
                "phase": phase,
                "count": measured["count"],
                "bytes": measured["bytes"],
                "expected_count": theory["count"],
                "expected_bytes": theory["bytes"],
                "equal": equal,
            }
        )
    return rows


def _key(row: Mapping[str, Any]) -> Key:
    return row["name"], row["axis"], row["phase"]
