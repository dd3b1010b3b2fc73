"""Loads: what a replica gives under a number of requests at once, as a fixed point of its steps.

Requests follow each other without a pause (closed loop). In steady state b of them run; each step
gives each a token, and prompts of those that follow run in the same step:

    tokens of prompts   b x prompt / output a step on average, in chunks that steps have room for
    step                with a chunk (a share f of the steps) or without
    time per token      without + f (1 - own share) (with - without): a request's own prompt comes
                        before its first token
    tokens per second   b / (without + f (with - without))
    b                   no more than the cache holds, or the engine takes
    first token         waiting for a place, then for the prompts before it and its own

A run of so many requests at once ends (`whole_run`): its batch is full while some wait, and then
empties, slowly where the lengths of answers differ.

Requests of equal length that started together stay together: their chunk is as large as a step
allows. Where waiting prompts go before decoding (`waves`), all of them run first, half of which
each waits for before its first token and half of which after it. Where prompts need more than every
step has room for, they bound the rate: requests wait for theirs, and fewer than b decode.

Rows that share a model are solved at once, in columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hocket.cost.constants import Platform
from hocket.cost.machine import stack_machines
from hocket.cost.serving_constants import ServingConstants
from hocket.cost.serving_rank import StepLoad
from hocket.cost.serving_step import (
    ReplicaColumns,
    cache_bytes,
    sampler_seconds,
    step_parts,
    weight_bytes,
)
from hocket.cost.terms import Floats
from hocket.planning.serving_table import MLPERF_GOALS, DisaggregatedWorkers, ServingTableRow
from hocket.spec.model_shape import ModelShape

HALVINGS = 20
"""Of the range of loads in which the highest that keeps a goal is looked for."""

ROUNDS = 12
"""Of the fixed point of separated workers; it is damped and has settled long before."""

LONGEST = 9.0
"""Longest answer where lengths differ, over their mean: vLLM's benchmark takes from ShareGPT what
has at most 2,048 tokens with its prompt, of which answers have 200 and prompts 220 on average."""

INTERVALS = 60
"""Of the time in which the last batch of a run empties."""

BURST = 0.05
"""Of all prompts at once, the share that a request waits for on average as well: all of them start
together, and benchmarks run ten requests for each at once (half of the prompts, once in ten)."""

Constants = Callable[[Sequence[ServingTableRow]], ServingConstants]
"""Other constants than the rows' own, as columns (fitting)."""


@dataclasses.dataclass(frozen=True)
class LoadSolution:
    """Seconds and tokens/s of each row, [r]; `fits` is 0 where not one request does."""

    tpot: Floats
    ttft: Floats
    throughput: Floats
    batch: Floats
    fits: Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadColumns:
    """Rows of one model as columns [r]. `others`: bytes held besides weights and overhead.
    `sampled`: 1 where tokens are drawn with top-p and penalties by PyTorch."""

    shape: ModelShape
    replica: ReplicaColumns
    memory: Floats
    others: Floats
    load: Floats
    prompt: Floats
    output: Floats
    varied: Floats
    total: Floats
    goal: Floats
    median: Floats
    sampled: Floats

    def requests(self, length: Floats) -> Floats:
        """Requests of `length` tokens whose caches fit on a replica."""
        at, c = self.replica, self.replica.constants
        held = weight_bytes(self.shape, at) + c.overhead_bytes + self.others
        each = length * cache_bytes(self.shape, at, length)
        found: Floats = (c.usable * self.memory - held) / each
        return np.maximum(found, 0.0)

    def step(
        self, prompts: Floats, context: Floats, batch: Floats, cached: Floats | float
    ) -> Floats:
        """Seconds between two tokens of one request in such steps.

        A pipeline holds as many batches as stages, each a share of the sequences.
        """
        pp = self.replica.pp
        load = StepLoad(prompts / pp, context, batch / pp, np.asarray(cached, dtype=np.float64))
        parts = step_parts(self.shape, self.replica, load)
        drawn = self.sampled * sampler_seconds(self.shape, self.replica) * batch / pp
        return np.maximum(parts.step + drawn, pp * (parts.stage + drawn))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadGroup:
    """Rows of one model and one way of running: their places among all, and their columns.

    `prompts`: of the workers that run prompts, where they are separated.
    """

    kind: str
    places: tuple[int, ...]
    rows: tuple[ServingTableRow, ...]
    at: LoadColumns
    prompts: LoadColumns | None = None


def load_groups(rows: Sequence[ServingTableRow]) -> list[LoadGroup]:
    """Rows in groups that are solved at once."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault((row.model, _kind(row.mode)), []).append(i)
    result = []
    for (_, kind), places in found.items():
        chosen = tuple(rows[i] for i in places)
        apart = kind == "separated"
        result.append(
            LoadGroup(
                kind=kind,
                places=tuple(places),
                rows=chosen,
                at=load_columns(chosen, "decode" if apart else ""),
                prompts=load_columns(chosen, "prefill") if apart else None,
            )
        )
    return result


def answers(
    parts: Sequence[LoadGroup], number: int, change: Constants | None = None
) -> LoadSolution:
    """Answers of `number` rows in groups; `change` gives other constants."""
    names = [f.name for f in dataclasses.fields(LoadSolution)]
    found = {name: np.zeros(number) for name in names}
    for group in parts:
        at = group.at if change is None else _with(group.at, change(group.rows))
        if group.kind == "separated":
            assert group.prompts is not None
            first = group.prompts
            first = first if change is None else _with(first, change(group.rows))
            answer = separated(group.rows, first, at)
        else:
            answer = saturated(at) if group.kind == "continuous" else static(at)
        for name in names:
            found[name][list(group.places)] = getattr(answer, name)
    return LoadSolution(**found)


def load_columns(rows: Sequence[ServingTableRow], which: str = "") -> LoadColumns:
    """Rows of one model; `which`: the `prefill` or `decode` workers of separated ones."""
    prices = [_workers(r, which).prices if which else r.prices for r in rows]
    parts = [p.replica for p in prices]
    names = ("tp", "pp", "ep", "dp", "weight", "expert_weight", "cache", "flops")
    values: dict[str, Any] = {
        n: np.concatenate([getattr(p, n) for p in parts]) for n in (*names, "few_bits")
    }
    network = {
        n: np.array([float(getattr(p.platform.constants, n)) for p in parts])
        for n in ("network", "hop")
    }
    replica = ReplicaColumns(
        **values,
        platform=Platform(
            stack_machines([p.platform.machine for p in parts]),
            dataclasses.replace(parts[0].platform.constants, **network),
        ),
        constants=stack_constants([p.constants for p in parts]),
    )
    others = [p.overhead_bytes - p.replica.constants.overhead_bytes for p in prices]
    return LoadColumns(
        shape=prices[0].shape,
        replica=replica,
        memory=np.array([p.memory for p in prices]),
        others=np.array(others),
        load=np.array([r.load for r in rows]),
        prompt=np.array([r.prompt for r in rows]),
        output=np.array([r.output for r in rows]),
        varied=np.array([float(r.varied) for r in rows]),
        total=np.array([r.total for r in rows]),
        goal=np.array([r.goal for r in rows]),
        median=np.array([float(r.median) for r in rows]),
        sampled=np.array([float(r.sampled) for r in rows]),
    )


def stack_constants(parts: Sequence[ServingConstants]) -> ServingConstants:
    """Constants as columns."""
    names = [f.name for f in dataclasses.fields(ServingConstants)]
    return ServingConstants(**{n: np.array([float(getattr(p, n)) for p in parts]) for n in names})


def continuous(at: LoadColumns) -> LoadSolution:
    """Continuous batching: prompts and decoding share the engine."""
    c = at.replica.constants
    room = at.requests(at.prompt + c.reserved * at.output)
    # A measured mean of running sequences was bound by neither.
    most = np.where(at.median > 0, np.inf, np.minimum(room, c.max_sequences))
    closed = np.isfinite(at.load) & np.isinf(at.goal)
    running = np.maximum(np.minimum(at.load, most), 1.0)
    context = at.prompt + at.output / 2
    budget = c.max_num_batched_tokens * at.replica.dp
    # Prompts arrive b / output a step; beyond what steps take, requests wait for their prompt.
    decoding = np.minimum(running, budget * at.output / (at.prompt + at.output))
    demand = decoding * at.prompt / at.output
    together = np.where(closed & (at.varied == 0), running * at.prompt, at.prompt)
    chunk = np.minimum(np.maximum(together, demand), budget)
    share = np.minimum(demand / chunk, 1.0)
    seen = np.where(at.prompt > chunk, at.prompt, np.minimum(chunk, at.prompt) + 1) / 2
    none = np.zeros_like(demand)
    without = at.step(none, seen, decoding, context)
    mixed = at.step(chunk, seen, decoding, context)
    each = without + share * (mixed - without)
    # Those whose prompts share the only chunk wait for no other; else each waits for all but its
    # own.
    whole = (together <= budget) & (together > at.prompt)
    own = np.where(whole | (decoding <= 1), 1.0, 1.0 / decoding)
    tpot = without + share * (1 - own) * (mixed - without)
    alone = at.step(np.minimum(chunk, at.prompt), seen, none, context)
    chunks = np.ceil(at.prompt / np.maximum(chunk, 1.0))
    before = running * alone * chunks / 2  # half of all prompts, one after the other
    waves = (c.waves > 0) & closed & (at.varied == 0)
    tpot = np.where(waves, without + before / at.output, tpot)
    start = mixed * chunks + np.where(closed, BURST * 2 * before, 0.0)
    start = np.where(waves, before + alone, start)
    cycle = start + tpot * at.output
    queue = np.where(closed, np.maximum(at.load - running, 0.0) / running * cycle, 0.0)
    usual = np.where(share < 0.5, without, mixed)  # most steps are of one kind
    tpot = np.where(at.median > 0, usual, tpot)
    throughput = np.where(closed & waves, running * at.output / cycle, decoding / each)
    ends = np.isfinite(at.total)
    if ends.any():
        throughput = np.where(ends, whole_run(at, most, budget, throughput), throughput)
    return LoadSolution(
        tpot=tpot,
        ttft=c.prefill_time + queue + start,
        throughput=throughput,
        batch=decoding,
        fits=np.where(room >= 1.0, 1.0, 0.0),
    )


def whole_run(at: LoadColumns, most: Floats, budget: Floats, rate: Floats) -> Floats:
    """Output tokens/s of `at.total` requests that are sent at once, from then to the last token.

    Those that wait for a place leave at the steady `rate` of a full batch. Of the last batch all
    prompts run first; then it empties as answers end: all at once where they are equally long, else
    as exponentially distributed lengths do, the longest `LONGEST` times the mean.
    """
    total = np.where(np.isfinite(at.total), at.total, 1.0)
    last = np.minimum(total, np.maximum(most, 1.0))
    none = np.zeros_like(last)
    chunk = np.minimum(budget, last * at.prompt)
    seen = np.where(at.prompt > chunk, at.prompt, np.minimum(chunk, at.prompt) + 1) / 2
    seconds = (total - last) * at.output / rate
    seconds = seconds + last * at.prompt / chunk * at.step(chunk, seen, none, at.prompt)
    for moment in (np.arange(INTERVALS) + 0.5) * LONGEST / INTERVALS:  # in mean answers
        left = last * np.where(at.varied > 0, np.exp(-moment), 1.0)
        span = np.where(at.varied > 0, LONGEST, 1.0) / INTERVALS
        token = np.where(at.varied > 0, moment, moment / LONGEST) * at.output
        decoding = at.step(none, none, np.maximum(left, 1.0), at.prompt + token)
        seconds = seconds + span * at.output * decoding * -np.expm1(-left)
    found: Floats = total * at.output / seconds
    return found


def saturated(at: LoadColumns) -> LoadSolution:
    """Continuous batching with as many sequences as keep `goal`: a server whose rate was raised as
    far as its time per token allows has its batch full, and prompts in most of its steps."""
    answer = continuous(at)
    bound = np.isfinite(at.goal)
    if not bound.any():
        return answer
    low, high = np.ones_like(at.load), np.where(np.isfinite(at.load), at.load, answer.batch)
    for _ in range(HALVINGS):
        middle = np.sqrt(low * high)
        kept = continuous(dataclasses.replace(at, load=middle)).tpot <= at.goal
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    within = answer.tpot <= at.goal
    return continuous(dataclasses.replace(at, load=np.where(bound & ~within, low, at.load)))


def static(at: LoadColumns) -> LoadSolution:
    """One batch: all prompts first, then all decode to the end; more than fit run in turns."""
    c = at.replica.constants
    room = at.requests(at.prompt + c.reserved * at.output)
    batch = np.maximum(np.minimum(at.load, np.minimum(room, c.max_sequences)), 1.0)
    turns = at.load / batch
    tokens = batch * at.prompt
    chunks = np.maximum(np.ceil(tokens / c.max_num_batched_tokens), 1.0)
    none = np.zeros_like(batch)
    prefill = chunks * at.step(tokens / chunks, (at.prompt + 1) / 2, none, at.prompt)
    tpot = at.step(none, none, batch, at.prompt + at.output / 2)
    total = prefill + tpot * np.maximum(at.output - 1, 0.0)
    return LoadSolution(
        tpot=tpot,
        ttft=prefill + (turns - 1) / 2 * total,
        throughput=np.where(at.load == 1, 1 / tpot, batch * at.output / total),
        batch=batch,
        fits=np.where(at.requests(at.prompt + 1) >= 1.0, 1.0, 0.0),
    )


def separated(
    rows: Sequence[ServingTableRow], first: LoadColumns, then: LoadColumns
) -> LoadSolution:
    """Workers for prompts and others for decoding: their rates agree.

    Of all requests at once some wait for or run their prompt, the rest decode. Workers for prompts
    take a batch after the other; what they cannot give, decoding waits for.
    """
    c = then.replica.constants
    workers = np.array([float(_workers(r, "prefill").number) for r in rows])
    decoders = np.array([float(_workers(r, "decode").number) for r in rows])
    together = np.array([float(_workers(r, "prefill").batch) for r in rows])
    none = np.zeros_like(workers)
    batched = together * first.replica.dp
    own = first.step(first.prompt * batched, (first.prompt + 1) / 2, none, none)
    rate = workers * batched / own
    most = np.minimum(then.requests(then.prompt + then.output), c.max_sequences)
    limit = batch = np.minimum(then.load / decoders, np.maximum(most, 1.0))
    context = then.prompt + then.output / 2
    for _ in range(ROUNDS):
        tpot = then.step(none, none, batch, context)
        wanted = np.minimum(rate, batch * decoders / (tpot * then.output))
        busy = wanted * tpot * then.output / decoders
        left = (then.load - wanted * own) / decoders
        batch = 0.5 * batch + 0.5 * np.clip(np.minimum(busy, left), 1.0, limit)
    tpot = then.step(none, none, batch, context)
    throughput = batch * decoders / tpot
    waiting = np.maximum(then.load - batch * decoders, 0.0) * then.output / throughput
    return LoadSolution(
        tpot=tpot,
        ttft=np.maximum(waiting, own) + c.prefill_time,
        throughput=throughput,
        batch=batch,
        fits=np.where(most >= 1.0, 1.0, 0.0),
    )


def _with(at: LoadColumns, constants: ServingConstants) -> LoadColumns:
    return dataclasses.replace(at, replica=dataclasses.replace(at.replica, constants=constants))


def _workers(row: ServingTableRow, which: str) -> DisaggregatedWorkers:
    found = row.prefill if which == "prefill" else row.decode
    assert found is not None
    return found


def _kind(mode: str) -> str:
    if mode == "disagg":
        return "separated"
    return (
        "continuous"
        if mode in ("agg", "inflight_max_load", "steady_closed_loop", *MLPERF_GOALS)
        else "static"
    )
