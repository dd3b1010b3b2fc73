"""Loads: what a replica gives under a number of requests at once, as a fixed point of its steps.

Requests of equal length follow each other without a pause (closed loop). In steady state b of them
run; each step gives each a token, and prompts of those that follow are run beside:

    tokens of prompts in a step   b x prompt / output on average, in chunks that steps have room for
    step                          with prompt (a share f of the steps) or without
    time per token                f t(with) + (1 - f) t(without)
    b                             no more than the cache holds, or the engine takes
    first token                   waiting for a place, then for the prompts before it and its own

Where prompts would need more than every step has room for, they bound the rate: requests wait for
their prompt, and fewer than b decode.

Everything is in columns: rows that share a model are solved at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hocket.cost.constants import Platform
from hocket.cost.machine import stack_machines
from hocket.cost.serving import activation_bytes
from hocket.cost.serving_constants import ServingConstants
from hocket.cost.serving_step import Load, Replica, cache_bytes, step_parts, weight_bytes
from hocket.cost.terms import Floats
from hocket.planning.serving_table import Row, Workers
from hocket.spec.model_shape import ModelShape

ROUNDS = 12
"""Of the fixed point of separated workers; it is damped and has settled long before."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Seconds and tokens/s of each row, [r]; `fits` is false where not one request does."""

    tpot: Floats
    ttft: Floats
    throughput: Floats
    batch: Floats
    fits: Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Rows of one model as columns [r]."""

    shape: ModelShape
    replica: Replica
    memory: Floats
    communicates: Floats
    load: Floats
    prompt: Floats
    output: Floats

    @property
    def capacity(self) -> Floats:
        """Cached tokens that fit on a replica."""
        c = self.replica.constants
        at = self.replica
        held = weight_bytes(self.shape, at) + c.overhead_bytes + self.communicates
        found: Floats = (c.usable * self.memory - held) / cache_bytes(self.shape, at)
        return found

    def step(self, prompts: Floats, context: Floats, batch: Floats, cached: Floats) -> Floats:
        """Seconds between two tokens of one request in such steps.

        A pipeline holds as many batches as stages, each a share of the sequences.
        """
        pp = self.replica.pp
        load = Load(prompts / pp, context, batch / pp, cached)
        parts = step_parts(self.shape, self.replica, load)
        return np.maximum(parts.step, pp * parts.stage)


def columns(rows: Sequence[Row], which: str = "") -> Columns:
    """Rows of one model; `which`: the `prefill` or `decode` workers of separated ones."""
    prices = [_workers(r, which).prices if which else r.prices for r in rows]
    parts = [p.replica for p in prices]
    names = ("tp", "pp", "ep", "attention_dp", "weight", "expert_weight", "cache", "flops")
    values: dict[str, Any] = {
        n: np.concatenate([getattr(p, n) for p in parts]) for n in (*names, "few_bits")
    }
    first = parts[0].platform.constants
    fields = [f.name for f in dataclasses.fields(ServingConstants)]
    collected = {n: np.array([float(getattr(p.constants, n)) for p in parts]) for n in fields}
    shape = prices[0].shape
    network = {
        n: np.array([float(getattr(p.platform.constants, n)) for p in parts])
        for n in ("network", "hop")
    }
    replica = Replica(
        **values,
        platform=Platform(
            stack_machines([p.platform.machine for p in parts]),
            dataclasses.replace(first, **network),
        ),
        constants=ServingConstants(**collected),
    )
    communicates = [
        activation_bytes(shape, p.max_batch_tokens, int(q.tp[0])) + (0.4e9 if p.gpus > 1 else 0.0)
        for p, q in zip(prices, parts, strict=True)
    ]
    return Columns(
        shape=shape,
        replica=replica,
        memory=np.array([p.memory for p in prices]),
        communicates=np.array(communicates),
        load=np.array([r.load for r in rows]),
        prompt=np.array([r.prompt for r in rows]),
        output=np.array([r.output for r in rows]),
    )


def _workers(row: Row, which: str) -> Workers:
    found = row.prefill if which == "prefill" else row.decode
    assert found is not None
    return found


def continuous(at: Columns) -> Answer:
    """Continuous batching: prompts and decoding share the steps."""
    c = at.replica.constants
    most = np.minimum(at.capacity / (at.prompt + c.reserved * at.output), c.max_sequences)
    room = np.maximum(np.minimum(at.load, most), 1.0)
    running = np.maximum(room, 1.0)
    context = at.prompt + at.output / 2
    budget = c.max_batch_tokens * at.replica.attention_dp
    # Prompts arrive b / output a step; beyond what steps take, requests wait for their prompt.
    decoding = np.minimum(running, budget * at.output / (at.prompt + at.output))
    demand = decoding * at.prompt / at.output
    chunk = np.clip(at.prompt, demand, budget)
    share = np.minimum(demand / chunk, 1.0)
    seen = (np.minimum(chunk, at.prompt) + 1) / 2
    seen = np.where(at.prompt > chunk, at.prompt / 2, seen)
    without = at.step(np.zeros_like(demand), seen, decoding, context)
    mixed = at.step(chunk, seen, decoding, context)
    tpot = share * mixed + (1 - share) * without
    cycle = tpot * at.output
    chunks = np.ceil(at.prompt / np.maximum(chunk, 1.0))
    own = at.step(np.minimum(chunk, at.prompt), seen, np.zeros_like(demand), context) * chunks
    waiting = np.where(np.isfinite(at.load), np.maximum(at.load - running, 0.0) / running, 0.0)
    queue = waiting * (cycle + own)
    burst = np.where(np.isfinite(at.load), c.burst * running * own, 0.0)
    ttft = c.prefill_time + queue + burst + mixed * chunks
    return Answer(
        tpot=tpot,
        ttft=ttft,
        throughput=decoding / tpot,
        batch=decoding,
        fits=np.where(most >= 1.0, 1.0, 0.0),
    )


def static(at: Columns) -> Answer:
    """One batch: all prompts first, then all decode to the end."""
    c = at.replica.constants
    batch = at.load
    tokens = batch * at.prompt
    chunks = np.maximum(np.ceil(tokens / c.max_batch_tokens), 1.0)
    zero = np.zeros_like(batch)
    prefill = chunks * at.step(tokens / chunks, (at.prompt + 1) / 2, zero, at.prompt)
    tpot = at.step(zero, zero, batch, at.prompt + at.output / 2)
    total = prefill + tpot * np.maximum(at.output - 1, 0.0)
    held = at.capacity >= at.prompt + 1
    return Answer(
        tpot=tpot,
        ttft=prefill + c.prefill_time,
        throughput=np.where(at.load == 1, 1 / tpot, batch * at.output / total),
        batch=batch,
        fits=np.where(held, 1.0, 0.0),
    )


def separated(rows: Sequence[Row]) -> Answer:
    """Workers for prompts and others for decoding: their rates agree.

    Of all requests at once some wait for or run their prompt, the rest decode. Workers for prompts
    take one after the other; what they cannot give, decoding waits for.
    """
    first, then = columns(rows, "prefill"), columns(rows, "decode")
    c = then.replica.constants
    workers = np.array([float(_workers(r, "prefill").number) for r in rows])
    decoders = np.array([float(_workers(r, "decode").number) for r in rows])
    together = np.array([float(_workers(r, "prefill").batch) for r in rows])
    zero = np.zeros_like(workers)
    tokens = first.prompt * together * first.replica.attention_dp
    own = first.step(tokens, (first.prompt + 1) / 2, zero, zero)
    rate = workers * together * first.replica.attention_dp / own
    most = np.minimum(then.capacity / (then.prompt + then.output), c.max_sequences)
    batch = np.minimum(then.load / decoders, np.maximum(most, 1.0))
    limit = batch
    context = then.prompt + then.output / 2
    for _ in range(ROUNDS):
        tpot = then.step(zero, zero, batch, context)
        wanted = np.minimum(rate, batch * decoders / (tpot * then.output))
        busy = wanted * tpot * then.output / decoders
        left = (then.load - wanted * own) / decoders
        batch = 0.5 * batch + 0.5 * np.clip(np.minimum(busy, left), 1.0, limit)
    tpot = then.step(zero, zero, batch, context)
    throughput = batch * decoders / tpot
    waiting = np.maximum(then.load - batch * decoders, 0.0) * then.output / throughput
    return Answer(
        tpot=tpot,
        ttft=np.maximum(waiting, own) + c.prefill_time,
        throughput=throughput,
        batch=batch,
        fits=np.where(most >= 1.0, 1.0, 0.0),
    )


Change = Callable[[Columns], Columns]


def solve(rows: Sequence[Row], change: Change | None = None) -> Answer:
    """Answers of rows of any models and modes, in their order; `change` gives other constants."""
    names = [f.name for f in dataclasses.fields(Answer)]
    found = {name: np.zeros(len(rows)) for name in names}
    groups: dict[tuple[str, str], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((row.model, _kind(row.mode)), []).append(i)
    for (_, kind), members in groups.items():
        chosen = [rows[i] for i in members]
        if kind == "separated":
            answer = separated(chosen)
        else:
            at = columns(chosen)
            at = at if change is None else change(at)
            answer = continuous(at) if kind == "continuous" else static(at)
        for name in names:
            found[name][members] = getattr(answer, name)
    return Answer(**found)


def _kind(mode: str) -> str:
    if mode == "disagg":
        return "separated"
    return "continuous" if mode in ("agg", "inflight_max_load") else "static"
