"""Conservation: bytes of all ranks are the model's, times the copies that a layout keeps."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from hocket.catalogue import hardware
from hocket.catalogue.shapes import shape
from hocket.cost import collectives, device, step
from hocket.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from hocket.cost.constants import Constants, constants
from hocket.cost.machine import machine
from hocket.cost.measured_prices import resident_bytes
from hocket.cost.memory import peak_memory
from hocket.cost.state import state_groups
from hocket.cost.step_problem import StepProblem
from hocket.cost.terms import terms
from hocket.schedules.registry import build_schedule
from hocket.spec import legality
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout, divisors
from hocket.spec.model_shape import ModelShape
from hocket.spec.precision import state_bytes
from hocket.spec.run import Workload
from tests.rotation import seed
from tests.support.columns import layout_columns

MODELS = ("llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "gpt2")


def parameters(model: ModelShape, names: Iterable[str] = ()) -> tuple[float, float]:
    """(experts, all others) of a whole model, a tied table once, or of some blocks."""
    expert = total = 0.0
    for name in names or (*model.layers, "embedding", *(() if model.tied else ("head",))):
        block = model.blocks[name]
        stacked = tuple(p.name for p in block.products if p.groups > 1)
        for w in block.weights:
            total += w.elements
            expert += w.elements * (
                w.split == "expert" or (bool(stacked) and w.name.startswith(stacked))
            )
    return expert, total - expert


def held(model: ModelShape, tp: int, names: Iterable[str] = ()) -> float:
    """Dense parameters of `tp` tensor ranks as full as the first: norms and routers are on every
    rank, each key/value head on as many ranks as there are ranks for one, and odd vocabularies are
    padded. `names`: of some blocks alone."""
    names = names or (*model.layers, "embedding", *(() if model.tied else ("head",)))
    stacked = {p.name for b in model.blocks.values() for p in b.products if p.groups > 1}
    total = 0.0
    for name in names:
        for w in model.blocks[name].weights:
            if w.split == "expert" or w.name.startswith(tuple(stacked) or ("-",)):
                continue
            copies = tp if w.split == "outside" else -(-w.units // tp) * tp / w.units
            total += w.elements * copies
    return total


def replicated(model: ModelShape) -> bool:
    """Whether tensor parallelism leaves its experts whole (gpt-oss)."""
    weights = [w for block in model.blocks.values() for w in block.weights]
    return model.experts > 0 and not any(w.split == "expert" for w in weights)


def layouts(model: ModelShape, count: int, *, pp: int = 1) -> list[Layout]:
    """Random ones; a third of those with experts slice these otherwise than all else (etp)."""
    draw = random.Random(seed())
    found: list[Layout] = []
    while len(found) < count:
        dp, tp, cp = (2 ** draw.randint(0, n) for n in (6, 4, 2))
        if not legality.attention(model.heads, model.kv_heads, tp):
            continue
        etp = draw.choice(divisors(tp)) if model.experts and draw.random() < 0.3 else tp
        ranks = dp * cp * tp // etp
        experts = [n for n in divisors(max(model.experts, 1)) if ranks % n == 0]
        zero = draw.choice((0, 1, 2, 3)) if dp > 1 else 0
        shard = draw.choice(divisors(dp)) if zero and draw.random() < 0.3 else None
        found.append(
            Layout(
                dp=dp,
                tp=tp,
                cp=cp,
                pp=pp,
                ep=draw.choice(experts),
                etp=etp,
                zero=zero,
                shard=shard,
                microbatches=2 * pp,
            )
        )
    return found


def known(**changes: Any) -> Constants:
    return constants("H100-SXM-80", "megatron-core", **changes)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_of_all_ranks_is_the_models_times_its_copies(name: str) -> None:
    model = shape(name)
    expert, dense = parameters(model)
    assert held(model, 1) == dense
    for layout in layouts(model, 25):
        at = layout_columns([layout], layout.dp * 2)
        found = peak_memory(terms(model), at, np.array([128.0]), known())
        world = layout.world_size
        # Counted here by hand, rank by rank: who holds the same, and how many of them share it.
        holders = layout.dp * layout.cp
        same = layout.expert_copies * (layout.expert_tp if replicated(model) else 1)
        near = (layout.shard or layout.dp) * layout.cp * layout.tp
        near = max(near // (layout.ep * layout.expert_tp), 1)
        shared = (layout.shard or layout.dp) * layout.cp, math.gcd(layout.expert_copies, near)
        shared = shared if layout.zero else (1, 1)
        everywhere = held(model, layout.tp)
        optimizer = 12 * (everywhere * holders / shared[0] + expert * same / shared[1])
        assert found.optimizer[0] * world == pytest.approx(optimizer, rel=1e-9), str(layout)
        whole = everywhere * holders + expert * same
        # Of what is sharded the largest layer is whole on every rank that shares it: of weights
        # while it runs and the next one is gathered, of gradients until they are reduced.
        kinds = dict.fromkeys(model.layers)
        largest = max(held(model, layout.tp, (name,)) for name in kinds) * holders * (shared[0] > 1)
        of_experts = max(parameters(model, (name,))[0] for name in kinds) * same * (shared[1] > 1)
        sharded = everywhere * holders / shared[0] + expert * same / shared[1]
        reduced = sharded + largest + of_experts if layout.zero > 1 else whole
        gathered = sharded + 2 * (largest + of_experts) if layout.zero > 2 else whole
        assert found.gradients[0] * world == pytest.approx(4 * reduced, rel=1e-9), str(layout)
        assert found.weights[0] * world == pytest.approx(2 * gathered, rel=1e-9), str(layout)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_of_all_ranks_of_a_run_is_the_models_times_its_copies(name: str) -> None:
    """Of every pipeline rank as runs, checks and rehearsals count it, a tied table at both ends."""
    model = shape(name)
    expert, _ = parameters(model)
    for pp in (1, 2, 4):
        for layout in layouts(model, 5, pp=pp):
            sliced = layout.etp if model.experts else None
            layout = dataclasses.replace(layout, etp=sliced, shard=None)
            work = Workload(seq_len=128, global_batch=layout.dp * 2 * pp, dtype="fp32")
            plan = build_schedule(layout, 2 * pp)
            job = StepProblem(shape=model, layout=layout, workload=work, schedule=plan)
            rows = [resident_bytes(job, index) for index in range(pp)]
            everywhere = held(model, layout.tp)
            if model.tied and pp > 1:
                table = model.blocks["head"].weights
                everywhere += sum(
                    w.elements * (layout.tp if w.split == "outside" else 1) for w in table
                )
            holders = layout.dp * layout.cp
            same = layout.expert_copies * (layout.expert_tp if replicated(model) else 1)
            for kind, width, divided in (
                ("parameters", 4, layout.zero == 3),
                ("gradients", 4, layout.zero > 0),
                ("optimizer", 8, layout.zero > 0),
            ):
                copies = (holders, layout.expert_copies) if divided else (1, 1)
                whole = everywhere * holders / copies[0] + expert * same / copies[1]
                bytes_of_all = sum(row[kind] for row in rows) * layout.world_size / pp
                # A shard is a whole number of elements, and each tensor counts its steps.
                assert bytes_of_all == pytest.approx(width * whole, rel=2e-3), (str(layout), kind)


@pytest.mark.parametrize("name", MODELS)
def test_no_rank_of_a_pipeline_holds_less_than_its_share(name: str) -> None:
    model = shape(name)
    total = sum(parameters(model))
    for pp in (2, 4):
        for layout in layouts(model, 10, pp=pp):
            at = layout_columns([layout], layout.dp * layout.microbatches)  # type: ignore[operator]
            found = peak_memory(terms(model), at, np.array([128.0]), known())
            # A copy at least lies on the ranks together, whichever is the peak rank.
            peak_rank = found.weights + found.gradients + found.optimizer
            assert peak_rank[0] * layout.world_size >= 18 * total * 0.999, str(layout)


def test_ranks_that_share_state_hold_the_same_parameters() -> None:
    """By lists of ranks: expert e is on the ranks whose coordinate of dp x cp is e modulo ep."""
    for layout in layouts(shape("qwen3-30b-a3b"), 60):
        if layout.etp is not None:
            continue  # tests/cost/test_group_strides.py
        dense, expert = (
            (int(one.ranks[0]), int(one.stride[0]), int(one.holders[0]))
            for one in state_groups(layout_columns([layout], layout.dp))
        )
        data = layout.dp * layout.cp
        for (ranks, stride, holders), ep in ((dense, 1), (expert, layout.ep)):
            group = range(0, holders * stride, stride)  # of rank 0
            assert holders % ranks == 0
            assert len(group) == data // ep
            assert all(rank % layout.tp == 0 for rank in group)
            assert all((rank // layout.tp) % ep == 0 for rank in group)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama-3-8b"])
def test_reduced_bytes_and_updates_are_conserved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every gradient each holder hands one copy to a reduction; of every parameter each copy of
    its state is updated once."""
    model = shape(name)
    expert, _ = parameters(model)
    calls: list[tuple[str, float, float]] = []
    original, tp = collectives.group, 1

    def counting(operation: str, size: Any, degree: Any, stride: Any, *rest: Any) -> Any:
        if float(np.ravel(stride)[0]) % tp == 0:  # others are of tensor ranks: activations
            calls.append((operation, float(np.ravel(size)[0]), float(np.ravel(degree)[0])))
        return original(operation, size, degree, stride, *rest)

    monkeypatch.setattr(step, "group", counting)
    k = known()
    numbers = machine(hardware.cluster("64x8xH100-SXM"))
    rate = 3350e9 * k.memory_rate
    for layout in layouts(model, 25):
        if layout.zero in (2, 3) or layout.dp == 1 or layout.etp is not None:
            continue
        calls.clear()
        tp = layout.tp
        at = layout_columns([layout], layout.dp * 2)
        found = step.step_times(terms(model), at, np.array([128.0]), numbers, k)
        world = layout.world_size
        holders, same = layout.dp * layout.cp, layout.dp * layout.cp // layout.ep
        everywhere = held(model, layout.tp)
        summed = ALL_REDUCE if layout.zero == 0 else REDUCE_SCATTER
        wanted = 4 * (everywhere * holders + expert * same)
        degrees = (
            {holders, same} if layout.zero == 0 else {int(g.ranks[0]) for g in state_groups(at)}
        )
        sizes = {(size, n) for op, size, n in calls if op == summed and n in degrees}
        assert sum(size for size, _ in sizes) * world == pytest.approx(wanted, rel=1e-6), layout
        if layout.zero:
            gathered = {(size, n) for op, size, n in calls if op == ALL_GATHER and n in degrees}
            assert sum(size for size, _ in gathered) * world == pytest.approx(wanted / 2, rel=1e-6)
        copies = [1, 1] if layout.zero == 0 else [int(g.ranks[0]) for g in state_groups(at)]
        updated = everywhere * holders / copies[0] + expert * same / copies[1]
        seconds = device.OPTIMIZER_BYTES * updated / rate
        assert found.optimizer[0] * world == pytest.approx(seconds, rel=1e-6), str(layout)


@pytest.mark.parametrize(
    ("precision", "grad_dtype", "wanted"),
    [("fp32", None, 16), ("tf32", None, 16), ("bf16", None, 18), ("bf16", "bf16", 16),
     ("fp8", None, 18), ("fp16", None, 16)],
)  # fmt: skip
def test_bytes_of_a_parameter(precision: str, grad_dtype: str | None, wanted: int) -> None:
    """fp32 has no master copy: weight, gradient and two moments (Kingma and Ba 2015)."""
    assert state_bytes(precision, grad_dtype).total == wanted
    model = shape("llama-3-8b")
    at = layout_columns([Layout(microbatches=1)], 1)
    k = known(precision=precision, grad_dtype=grad_dtype)
    found = peak_memory(terms(model), at, np.array([128.0]), k)
    total = found.weights + found.gradients + found.optimizer
    assert total[0] == pytest.approx(wanted * model.num_parameters, rel=1e-6)


def test_full_width_doubles_activations_and_messages() -> None:
    model, at = terms(shape("llama-3-8b")), layout_columns([Layout(tp=8, dp=2, microbatches=1)], 2)
    length, numbers = np.array([4096.0]), machine(hardware.cluster("2x8xH100-SXM"))
    wide, half = known(precision="fp32"), known()
    held = [peak_memory(model, at, length, k).activations[0] for k in (wide, half)]
    assert held[0] == pytest.approx(2 * held[1], rel=1e-6)
    alone = dataclasses.replace(wide, contention=1.0)
    again = dataclasses.replace(half, contention=1.0)
    talk = [step.step_times(model, at, length, numbers, k).tensor[0] for k in (alone, again)]
    assert 1.5 < talk[0] / talk[1] < 2.1


def test_gradients_cannot_be_narrower_than_full_width_weights() -> None:
    with pytest.raises(OptionError, match="would lose what the parameters keep"):
        state_bytes("fp32", "bf16")
    with pytest.raises(OptionError, match="grad_dtype"):
        state_bytes("bf16", "int8")
