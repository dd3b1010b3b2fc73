"""Communication: every collective of one training step of one rank, from the layout alone.

What the runtime records, the theory says beforehand, in the same convention: name, mesh axis,
phase, count, and bytes as the sum of message sizes on this rank (the whole tensor for all-reduce,
send and receive, the output for all-gather). The prices of a step on a probed machine
(`cost.measured_prices`) and the links of a layout (`planning.links`) are those of this list.

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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hocket.cost.communication_table import (
    FLOAT,
    INTEGER,
    CollectiveCall,
    Key,
    Step,
    Table,
    When,
    add_sharded,
    bucket_bytes,
    by_block,
)
from hocket.cost.context_communication import add_attention, add_states
from hocket.cost.expert_communication import add_experts
from hocket.cost.stage_communication import StageShare
from hocket.spec.layout import Layout
from hocket.spec.process_groups import data_axis


def communication(
    layout: Layout,
    rank: int,
    step: Step,
    shares: Iterable[StageShare],
    stage_ranks: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Rows of name, axis, phase, count and bytes of one step on one rank, sorted.

    Args:
        rank: global rank, 0 .. world_size - 1.
        shares: what this rank holds of each of its stages.
        stage_ranks: stage to pipeline rank. None: stage s lies on rank s mod pp.
    """
    place = list(stage_ranks or [s % layout.pp for s in range(layout.num_stages)])
    where = layout.coordinate(rank)
    held = list(shares)
    here = [stage for stage, owner in enumerate(place) if owner == where["pp"]]
    assert sorted(share.stage for share in held) == here, held
    table = Table(step.num_microbatches)
    for share in held:
        table.calls += stage_calls(
            layout, step, share, place, tp_index=where["tp"], cp_index=where["cp"]
        )
    table.calls += rank_calls(layout, step, held, place)
    return table.list()


def stage_calls(
    layout: Layout,
    step: Step,
    share: StageShare,
    place: Sequence[int],
    *,
    tp_index: int = 0,
    cp_index: int = 0,
) -> list[CollectiveCall]:
    """What a rank calls for one of its stages. `place`: stage to pipeline rank."""
    table = Table(step.num_microbatches)
    if layout.tp > 1:
        _tensor(table, step, share)
    if (
        layout.tp > 1 and share.split_loss
    ):  # of each token and rank, a log-sum-exp and a label's logit, in fp32
        table.add(When.FORWARD, "all-gather", "tp", 1, layout.tp * 2 * step.tokens * FLOAT)
    data = data_axis(layout)
    if share.router_sums and layout.data_degree > 1:
        table.add(When.FORWARD, "all-reduce", data, 1, share.router_sums * FLOAT)
    add_experts(table, layout, step, share, tp_index)
    add_attention(table, layout, step, share)
    add_states(table, layout, step, share, cp_index)
    _pipeline(table, step, share.stage, place, layout.tp if layout.sequence_parallel else 1)
    if layout.data_degree > 1:
        if layout.zero:
            _sharded(table, layout, step, share)
        else:
            for nbytes in bucket_bytes(share.gradient_bytes, step.bucket_bytes):
                table.add(When.REDUCTION, "all-reduce", data, 1, nbytes)
    return table.calls


def rank_calls(
    layout: Layout, step: Step, held: Sequence[StageShare], place: Sequence[int]
) -> list[CollectiveCall]:
    """What a rank calls once a step for all of its stages, of which it has the `held` shares."""
    table = Table(step.num_microbatches)
    ends = [share for share in held if share.stage in (0, len(place) - 1)]
    if ends and place[0] != place[-1]:
        for nbytes in held[0].tied_bytes or held[-1].tied_bytes:
            table.add(When.END, "all-reduce", "embedding", 1, nbytes)
    partial = (row for share in held if layout.tp > 1 for row in share.partial_bytes.items())
    for axis, nbytes in by_block(partial):
        table.add(When.END, "all-reduce", axis, 1, nbytes)
    if layout.data_degree > 1 and step.counts_tokens:
        table.add(When.END, "all-reduce", data_axis(layout), 1, INTEGER)
    if layout.world_size > 1:
        table.add(When.LOSS, "all-reduce", "world", 1, FLOAT)
    apart = any(share.experts for share in held) or (layout.zero and layout.data_degree > 1)
    if apart and layout.world_size > 1:
        table.add(When.NORM, "all-reduce", "world", 1, FLOAT)
    elif layout.tp * layout.cp * layout.pp > 1:
        table.add(When.NORM, "all-reduce", "model", 1, FLOAT)
    return table.calls


def _tensor(table: Table, step: Step, share: StageShare) -> None:
    """What split layers cost each microbatch."""
    e, forward = step.element_bytes, share.forward_sums
    backward = share.backward_sums + share.repeated_sums
    # Routing weights travel with a gradient of T x H: bytes, but no message of their own.
    wider = (share.wider + share.expert_weights) * step.tokens * e
    for when, count in ((When.FORWARD, forward), (When.BACKWARD, backward)):
        last = wider != 0 and when == (When.BACKWARD if backward else When.FORWARD)
        table.add(when, "all-reduce", "tp", count - last, step.hidden_bytes)
        table.add(when, "all-reduce", "tp", int(last), step.hidden_bytes + wider)
    for when, widths in (
        (When.FORWARD, share.forward_gathers),
        (When.BACKWARD, (*share.backward_gathers, *share.repeated_gathers)),
    ):
        for width in widths:
            table.add(when, "all-gather", "tp", 1, step.tokens * width * e)
    for when, widths in (
        (When.FORWARD, share.forward_scatters),
        (When.BACKWARD, (*share.backward_scatters, *share.repeated_scatters)),
    ):
        for width in widths:
            table.add(when, "reduce-scatter", "tp", 1, step.tokens * width * e)
    for when, counts in ((When.FORWARD, share.choices), (When.BACKWARD, share.repeated_choices)):
        for count in counts:
            table.add(when, "all-gather", "tp", 1, step.tokens * count * INTEGER)


def _sharded(table: Table, layout: Layout, step: Step, share: StageShare) -> None:
    """ZeRO: gradients reduced in shards, and values gathered; those that are reduced late have
    buckets of their own, and under ZeRO-3 each block has, frozen ones too."""
    ranks = (layout.shard or layout.dp) * layout.cp
    rows = list(zip(share.gradient_bytes, share.late, share.blocks or share.late, strict=True))
    buckets: list[tuple[tuple[Any, bool], int]] = []
    for late in (False, True):
        if layout.zero == 3:
            buckets += by_block(((b, late), n) for n, is_late, b in rows if is_late == late)
        else:
            sizes = [nbytes for nbytes, is_late, _ in rows if is_late == late]
            buckets += [(("", late), n) for n in bucket_bytes(sizes, step.bucket_bytes)]
    frozen = by_block(
        ((block, late, packed), nbytes) for block, nbytes, late, packed in share.frozen
    )
    if ranks > 1:
        gradients = [(nbytes, late) for (_, late), nbytes in buckets]
        values = [(block, nbytes, False) for (block, _), nbytes in buckets]
        if layout.zero == 3:
            values += [(block, nbytes, packed) for (block, _, packed), nbytes in frozen]
        add_sharded(
            table, step, "shard", ranks, zero=layout.zero, gradients=gradients, values=values
        )
    if ranks < layout.data_degree:
        for _, nbytes in buckets:
            elements = -(-nbytes // step.gradient_bytes // ranks)
            table.add(When.REDUCTION, "all-reduce", "replicas", 1, elements * step.gradient_bytes)


def _pipeline(table: Table, step: Step, stage: int, place: Sequence[int], slices: int) -> None:
    """Hidden states (one of their `slices`) forward and their gradients back, where the neighbour
    is another rank."""
    nbytes = step.hidden_bytes // slices
    for neighbour, ways in ((stage - 1, ("receive", "send")), (stage + 1, ("send", "receive"))):
        if 0 <= neighbour < len(place) and place[neighbour] != place[stage]:
            for when, name in zip((When.FORWARD, When.BACKWARD), ways, strict=True):
                table.add(when, name, "pp", 1, nbytes)


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
