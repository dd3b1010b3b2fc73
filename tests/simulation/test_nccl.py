"""NCCL simulated, against cases worked by hand."""

from __future__ import annotations

import random

import pytest

from hocket.simulation.nccl import EnqueuedOp, Group, Trace, simulate_nccl

PAIR: Group = ("pp", 0, 1)


def send(trace: Trace, group: Group, peer: int, numel: int = 4) -> EnqueuedOp:
    return trace.enqueue(EnqueuedOp("send", group, trace.rank, numel, "float32", peer))


def recv(trace: Trace, group: Group, peer: int, numel: int = 4) -> EnqueuedOp:
    return trace.enqueue(EnqueuedOp("recv", group, trace.rank, numel, "float32", peer))


def reduce(trace: Trace, group: Group, numel: int = 4, blocks: bool = True) -> EnqueuedOp:
    return trace.enqueue(
        EnqueuedOp("all-reduce", group, trace.rank, numel, "float32", blocks=blocks)
    )


def traces(count: int) -> list[Trace]:
    return [Trace(rank) for rank in range(count)]


@pytest.mark.parametrize("rule", ["eager", "lazy"])
def test_a_send_meets_its_receive(rule: str) -> None:
    a, b = traces(2)
    send(a, PAIR, 1)
    b.wait(recv(b, PAIR, 0))
    assert simulate_nccl([a, b], rule).ok


@pytest.mark.parametrize("rule", ["eager", "lazy"])
def test_two_sends_that_come_first_never_end(rule: str) -> None:
    a, b = traces(2)
    send(a, PAIR, 1)
    a.wait(recv(a, PAIR, 1))
    send(b, PAIR, 0)
    b.wait(recv(b, PAIR, 0))
    verdict = simulate_nccl([a, b], rule)
    assert not verdict.ends
    assert verdict.cycle == (0, 1)
    assert verdict.waiting[0].ranks == (1,)
    assert verdict.waiting[0].behind == 1
    assert verdict.picture().splitlines()[0] == (
        "rank 0 -- send to 1 of 4 float32 on pp --> rank 1"
    )


def exchanged(trace: Trace, group: Group, to: int, source: int) -> list[EnqueuedOp]:
    ops = [
        EnqueuedOp("send", group, trace.rank, 4, "float32", to),
        EnqueuedOp("recv", group, trace.rank, 4, "float32", source),
    ]
    trace.enqueue_batch(ops)
    return ops


@pytest.mark.parametrize("rule", ["eager", "lazy"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("batched", [True, False])
def test_a_ring_of_batches_ends_where_sends_alone_do_not(
    rule: str, size: int, batched: bool
) -> None:
    ring: Group = ("cp", *range(size))
    ranks = traces(size)
    for trace in ranks:
        after, before = (trace.rank + 1) % size, (trace.rank - 1) % size
        for _ in range(3):
            if batched:
                works = exchanged(trace, ring, after, before)
            else:
                works = [send(trace, ring, after), recv(trace, ring, before)]
            for work in works:
                trace.wait(work)
    verdict = simulate_nccl(ranks, rule)
    assert verdict.ends == batched
    assert bool(verdict.cycle) != batched


@pytest.mark.parametrize("rule", ["eager", "lazy"])
@pytest.mark.parametrize("seed", range(20))
def test_rings_among_collectives_end_whenever_ranks_wait(rule: str, seed: int) -> None:
    """Random programs of batches and collectives, each rank waiting at its own times; two of the
    operations in another order on one rank, and the ranks never end."""
    draw = random.Random(seed)
    size = draw.randint(2, 6)
    ring: Group = ("cp", *range(size))
    program = [draw.choice(["ring", "ring back", "reduce"]) for _ in range(12)]

    def run(swapped: bool) -> bool:
        ranks = traces(size)
        for trace in ranks:
            mine, pending = list(program), []
            if swapped and trace.rank == size - 1:
                first = mine.index("reduce")
                other = next(i for i in range(first + 1, 12) if mine[i] != "reduce")
                mine[first], mine[other] = mine[other], mine[first]
            for kind in mine:
                step = 1 if kind == "ring" else -1
                if kind == "reduce":
                    pending.append(reduce(trace, ring, blocks=draw.random() < 0.5))
                else:
                    ends = [(trace.rank + way * step) % size for way in (1, -1)]
                    pending += exchanged(trace, ring, *ends)
                while pending and draw.random() < 0.4:
                    trace.wait(pending.pop(0))
            for op in pending:
                trace.wait(op)
        return simulate_nccl(ranks, rule).ends

    assert run(swapped=False)
    tail = program[program.index("reduce") :] if "reduce" in program else []
    if any(kind != "reduce" for kind in tail):
        assert not run(swapped=True)


@pytest.mark.parametrize("rule", ["eager", "lazy"])
def test_a_batch_waits_for_all_its_parts(rule: str) -> None:
    """The batch of rank 1 receives from rank 0 alone; what rank 1 enqueues later stays behind."""
    ring: Group = ("cp", 0, 1, 2)
    a, b, c = traces(3)
    exchanged(a, ring, 1, 2)
    exchanged(b, ring, 2, 0)
    reduce(b, ring)
    verdict = simulate_nccl([a, b, c], rule)
    assert not verdict.ends
    b_waits = {row.rank: row for row in verdict.waiting}[1]
    assert b_waits.ranks == (2,)


def test_two_groups_let_opposite_sends_pass() -> None:
    a, b = traces(2)
    forward, backward = ("forward", 0, 1), ("backward", 0, 1)
    send(a, forward, 1)
    a.wait(recv(a, backward, 1))
    send(b, backward, 0)
    b.wait(recv(b, forward, 0))
    assert simulate_nccl([a, b], "eager").ends
    # Lazily, each host waits for the other to create another communicator.
    verdict = simulate_nccl([a, b], "lazy")
    assert not verdict.ends
    assert verdict.waiting[0].operation.startswith("creating the communicator of send to 1")


def test_a_receive_at_the_head_holds_up_the_collective_behind_it() -> None:
    a, b = traces(2)
    for trace in (a, b):  # both communicators exist before
        reduce(trace, PAIR)
    recv(a, PAIR, 1)
    send(b, PAIR, 0)
    recv(a, PAIR, 1)
    reduce(a, PAIR)
    reduce(b, PAIR)
    send(b, PAIR, 0)
    assert not simulate_nccl([a, b], "eager").ends  # one queue
    assert simulate_nccl([a, b], "lazy").ends  # the pair has a queue of its own


def test_a_rank_that_never_calls_is_named() -> None:
    ranks = traces(3)
    world: Group = ("world", 0, 1, 2)
    for trace in ranks[:2]:
        reduce(trace, world)
    verdict = simulate_nccl(ranks, "eager")
    assert [w.rank for w in verdict.waiting] == [0, 1]
    assert verdict.waiting[0].ranks == (2,)
    assert verdict.cycle == ()


def test_different_calls_of_one_collective_are_found() -> None:
    a, b = traces(2)
    reduce(a, PAIR, numel=4)
    reduce(b, PAIR, numel=5)
    verdict = simulate_nccl([a, b])
    assert verdict.ends
    assert not verdict.ok
    assert "4 float32" in verdict.mismatches[0]
    assert "5 float32" in verdict.mismatches[0]


def test_a_send_of_another_size_is_found() -> None:
    a, b = traces(2)
    send(a, PAIR, 1, numel=3)
    recv(b, PAIR, 0, numel=4)
    assert len(simulate_nccl([a, b]).mismatches) == 1


def test_an_asynchronous_collective_lets_the_compute_stream_continue() -> None:
    a, b = traces(2)
    other: Group = ("other", 0, 1)
    first = reduce(a, PAIR, blocks=False)
    reduce(a, other)
    a.wait(first)
    reduce(b, other)
    reduce(b, PAIR)
    assert simulate_nccl([a, b], "eager").ok


def test_a_mirrored_trace_is_that_of_its_own_groups() -> None:
    first = [Trace(0), Trace(1)]
    for trace in first:
        reduce(trace, PAIR)
        reduce(trace, ("dp", trace.rank, trace.rank + 2))
    send(first[0], PAIR, 1)
    recv(first[1], PAIR, 0)
    to = {0: 2, 1: 3}
    second = [
        Trace(to[t.rank], like=t, groups={op.group: moved(op.group) for op in t.ops}) for t in first
    ]
    for rule in ("eager", "lazy"):
        assert simulate_nccl([*first, *second], rule).ok
        assert [w.rank for w in simulate_nccl([*first, *second[:1], Trace(3)], rule).waiting] == [
            0,
            1,
            2,
        ]


def moved(group: Group) -> Group:
    """The group of the replica two ranks on; that of both replicas is its own."""
    return group if group[0] == "dp" else (group[0], *(r + 2 for r in group[1:]))


@pytest.mark.parametrize("seed", range(30))
def test_lines_that_restrict_one_global_order_end(seed: int) -> None:
    """Whatever order all operations are written in, if every rank keeps it the job ends; if one
    rank exchanges two that block and share a member, it does not."""
    draw = random.Random(seed)
    size = draw.randint(2, 6)
    ranks = traces(size)
    for number in range(draw.randint(1, 40)):
        members = sorted(draw.sample(range(size), draw.randint(2, size)))
        if draw.random() < 0.5:
            a, b = draw.sample(members, 2)
            group: Group = ("pp", *range(size))
            sent, received = send(ranks[a], group, b, number), recv(ranks[b], group, a, number)
            if draw.random() < 0.5:
                ranks[a].wait(sent)
            if draw.random() < 0.8:
                ranks[b].wait(received)
        else:
            for rank in members:
                reduce(ranks[rank], ("g", *members), number, blocks=draw.random() < 0.5)
    for rule in ("eager", "lazy"):
        verdict = simulate_nccl(ranks, rule)
        assert verdict.ok, verdict
