"""Prices at points worked by hand, and the order that they must keep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hocket.catalogue import hardware
from hocket.catalogue.curves import curves
from hocket.catalogue.shapes import shape
from hocket.cost import collectives, compute
from hocket.cost.collectives import ALL_GATHER, ALL_REDUCE, group, inside
from hocket.cost.constants import GPU_FIELDS, Constants, Platform, constants, constants_file, stacks
from hocket.cost.layout_batch import Layouts
from hocket.cost.machine import ClusterNumbers, machine
from hocket.cost.memory import peak_memory
from hocket.cost.state import local_parameters
from hocket.cost.step import StepTimes, step_times
from hocket.cost.step_problem import StepProblem
from hocket.cost.terms import Terms, stack_terms, terms
from hocket.planning.decoder import decoder
from hocket.schedules.registry import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.run import Workload
from tests.support.columns import layout_columns

GPT = decoder(layers=96, hidden=12288, heads=96, vocab=51200, name="gpt3")


def one(value: float) -> np.ndarray:
    return np.array([float(value)])


def a100(nodes: int = 1, *, measured: bool = True) -> ClusterNumbers:
    found = hardware.cluster(f"{nodes}x8xA100-SXM-80")
    lines = curves(gpu="A100-SXM-80") if measured else ()
    return machine(found, "bf16", lines)


def price(layout: Layout, batch: int, nodes: int, model: Terms | None = None) -> StepTimes:
    return step_times(
        terms(GPT) if model is None else model,
        layout_columns([layout], batch),
        one(2048),
        a100(nodes),
        constants("A100-SXM-80", "megatron"),
    )


def test_a_product_of_one_wave() -> None:
    """108 SMs, each one tile of 256 x 128 with k = 4096."""
    k = dataclasses.replace(constants("A100-SXM-80", "megatron"), small_tile=0.5)
    time = compute.matmul_seconds(one(256 * 12), one(128 * 9), one(4096), Platform(a100(), k))
    rate = 312e12 * k.matrix_rate / 108
    assert time[0] == pytest.approx(2 * 256 * 128 * (4096 + k.inner_overhead) / rate)
    more = compute.matmul_seconds(one(256 * 12 + 1), one(128 * 9), one(4096), Platform(a100(), k))
    assert more[0] > 1.4 * time[0]  # one tile more is a second wave, or smaller tiles


def test_a_thin_product_is_bound_by_memory() -> None:
    k = constants("A100-SXM-80", "megatron")
    time = compute.matmul_seconds(one(1), one(12288), one(12288), Platform(a100(), k))
    moved = 2 * (12288 + 12288 * 12288 + 12288)
    assert time[0] >= moved / (2.039e12 * k.memory_rate) * 0.99


def test_collectives_read_the_measured_curve() -> None:
    curve = next(
        c
        for c in curves(gpu="A100-SXM-80", operation=ALL_REDUCE)
        if c.num_gpus == 8 and c.num_nodes == 1
    )
    size = curve.sizes[-3]
    time = inside(ALL_REDUCE, one(size), one(8), a100())
    assert time[0] == pytest.approx(curve.seconds[-3], rel=1e-6)


def test_collectives_over_the_network_share_the_cards() -> None:
    """Two nodes: a group of one GPU a node has an eighth of the cards, a whole node all."""
    k = dataclasses.replace(constants("A100-SXM-80", "megatron"), network=1.0, hop=0.0)
    cluster = Platform(a100(2), k)
    rate = cluster.machine.network[0]
    alone = group(ALL_GATHER, one(16e9), one(2), one(8), cluster)[0]
    assert alone == pytest.approx(8e9 / (rate / 8) + collectives.NETWORK_LATENCY)
    whole = group(ALL_GATHER, one(16e9), one(16), one(1), cluster)[0]
    wire = 15e9 / rate
    assert whole >= wire
    assert whole < alone


def test_without_measurements_links_give_the_time() -> None:
    plain = inside(ALL_REDUCE, one(8e9), one(8), a100(measured=False))[0]
    link = a100().link[0]
    latency, share = collectives.PROTOCOLS[1]
    assert plain == pytest.approx(3 * latency + 2 * 7 / 8 * 8e9 / (share * link))
    latency, share = collectives.PROTOCOLS[0]
    small = inside(ALL_REDUCE, one(8e3), one(8), a100(measured=False))[0]
    assert small == pytest.approx(3 * latency + 2 * 7 / 8 * 8e3 / (share * link))


def test_the_pipeline_is_its_closed_form() -> None:
    found = price(Layout(pp=8, tp=8, microbatches=16), 16, 8)
    stage = found.forward + found.inputs + found.weights + 2 * found.exchange
    fill = 8 * stage + found.head + found.embedding
    slowest = stage + np.maximum(found.head, found.embedding)
    assert found.pipeline[0] == pytest.approx((fill + 15 * slowest)[0])
    assert found.bubble[0] > 0


def test_every_exchange_waits_for_the_cpu() -> None:
    """Two starts of a kernel each, and interleaved stages exchange as often as there are."""

    def of(virtual: int, kernel_time: float) -> StepTimes:
        schedule = "interleaved" if virtual > 1 else "1f1b"
        layout = Layout(pp=8, tp=8, microbatches=16, virtual_stages=virtual, schedule=schedule)
        values = constants("A100-SXM-80", "megatron", kernel_time=kernel_time, skew=0.0)
        return step_times(terms(GPT), layout_columns([layout], 16), one(2048), a100(8), values)

    for virtual in (1, 3):
        none, some = of(virtual, 0.0), of(virtual, 1e-5)  # too little to slow the layers
        more = some.exchange - none.exchange
        assert more[0] == pytest.approx(2e-5)
        assert none.forward[0] == pytest.approx(some.forward[0], rel=1e-6)
        # Twice a microbatch and stage; the bubble's part grows with the stages as well.
        waited = 2 * more[0] * virtual * 16 + 2 * more[0] * 7
        assert some.pipeline[0] - none.pipeline[0] == pytest.approx(waited, rel=1e-3)
    assert price(Layout(tp=8, microbatches=16), 16, 1).exchange[0] == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-j-6b", "mixtral-8x7b", "deepseek-v3"])
def test_tensor_ranks_sum_what_the_list_of_collectives_has(name: str, recompute: str) -> None:
    """With the embedding's and the head's; a layer that hocket runs again stops before its last."""
    layout = Layout(tp=4, microbatches=1, recompute=recompute)
    k = constants("A100-SXM-80", "hocket")
    platform, model, at = Platform(a100(), k), terms(shape(name)), layout_columns([layout], 1)
    blocks = [*model.kinds, (one(1), model.embedding), (one(1), model.head)]
    exposed = sum(
        count * compute.block_times(block, model, at, one(2048), platform).exposed
        for count, block in blocks
    )
    job = StepProblem(
        shape=shape(name),
        layout=layout,
        workload=Workload(seq_len=2048, global_batch=1),
        schedule=build_schedule(layout, 1),
        element_bytes=2,
        cuda=True,
    )
    (sums,) = (
        row
        for row in job.communication([0])[0]
        if (row["name"], row["axis"], row["phase"]) == (ALL_REDUCE, "tp", "microbatch")
    )
    each = group(ALL_REDUCE, one(sums["bytes"] / sums["count"]), one(4), one(1), platform)
    assert exposed == pytest.approx(sums["count"] * each * k.contention * k.tensor_exposed)


def test_interleaving_and_zero_bubble_shorten_it() -> None:
    def of(name: str, virtual: int = 1) -> float:
        layout = Layout(pp=8, tp=8, microbatches=16, schedule=name, virtual_stages=virtual)
        return float(price(layout, 16, 8).step[0])

    assert of("zb-v", 2) < of("zero-bubble") < of("1f1b") == of("gpipe") < of("sequential")
    assert of("1f1b", 3) < of("1f1b")


def test_a_million_layouts_cost_one_block_for_each_kind() -> None:
    """What a block takes is worked out once for layouts that agree in what it depends on."""
    few = layout_columns([Layout(tp=t, dp=64 // t, microbatches=8) for t in (1, 2, 4, 8)], 512)
    many = few.take(np.arange(40000) % 4)
    counted: list[int] = []
    original = compute.matmul_seconds

    def counting(*arguments: object, **named: object) -> np.ndarray:
        counted.append(np.size(arguments[0]))  # type: ignore[arg-type]
        return original(*arguments, **named)  # type: ignore[arg-type]

    patch = pytest.MonkeyPatch()
    patch.setattr(compute, "matmul_seconds", counting)
    try:
        k = constants("A100-SXM-80", "megatron")
        found = step_times(terms(GPT), many, one(2048), a100(8), k)
    finally:
        patch.undo()
    assert len(found.step) == 40000
    assert max(counted) == 4
    alone = step_times(terms(GPT), few, one(2048), a100(8), constants("A100-SXM-80", "megatron"))
    np.testing.assert_allclose(found.step[:4], alone.step)


def test_stacked_rows_cost_what_they_cost_alone() -> None:
    small = decoder(layers=24, hidden=2048, heads=16, vocab=51200)
    layout = Layout(dp=8, microbatches=4)
    together = step_times(
        stack_terms([terms(GPT), terms(small)]),
        layout_columns([layout, layout], 64),
        one(2048),
        a100(),
        constants("A100-SXM-80", "megatron"),
    )
    for i, model in enumerate((GPT, small)):
        assert together.step[i] == pytest.approx(price(layout, 64, 1, terms(model)).step[0])


@pytest.mark.parametrize("stack_name", stacks())
def test_more_work_takes_longer(stack_name: str) -> None:
    k = constants("H100-SXM-80", stack_name)
    model = terms(decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True))
    base = Layout(dp=8, tp=2, zero=1, microbatches=4)

    def step(layout: Layout, batch: int = 64, seq: int = 4096) -> float:
        found = step_times(model, layout_columns([layout], batch), one(seq), a100(2), k)
        return float(found.step[0])

    assert step(base) < step(base, 128)
    assert step(base) < step(base, seq=8192)
    assert step(base) < step(dataclasses.replace(base, recompute="full"))
    assert step(base) < step(dataclasses.replace(base, dp=4))


def held(layout: Layout, batch: int, flash: int = 0, gradient: float = 4.0) -> float:
    k = dataclasses.replace(
        constants("A100-SXM-80", "megatron"), flash=flash, gradient_bytes=gradient
    )
    return float(
        peak_memory(terms(GPT), layout_columns([layout], batch), one(2048), k).allocated[0]
    )


def test_activations_are_korthikantis() -> None:
    """Section 4.1: s b h (34 + 5 a s / h) of a layer, one microbatch on one of 96 stages."""
    k = constants("A100-SXM-80", "megatron")
    layout = layout_columns([Layout(pp=96, microbatches=1)], 1)
    small = decoder(layers=96, hidden=12288, heads=96, vocab=8)
    found = peak_memory(terms(small), layout, one(2048), k)
    layer = 2048 * 12288 * (34 + 5 * 96 * 2048 / 12288)
    ends = 2048 * 4 * 12288  # the head's norm
    assert found.activations[0] == pytest.approx(layer + ends, rel=0.01)


def test_state_by_zero_stage() -> None:
    def parts(zero: int) -> tuple[float, float, float]:
        k = constants("A100-SXM-80", "megatron", gradient_bytes=4.0)
        layout = layout_columns([Layout(dp=64, zero=zero, microbatches=1, recompute="full")], 64)
        found = peak_memory(terms(GPT), layout, one(2048), k)
        return found.weights[0], found.gradients[0], found.optimizer[0]

    n = GPT.num_parameters
    layer = GPT.blocks["decoder"].num_parameters
    assert parts(0) == pytest.approx((2 * n, 4 * n, 12 * n), rel=1e-6)
    assert parts(1) == pytest.approx((2 * n, 4 * n, 12 * n / 64), rel=1e-6)
    assert parts(2)[1] == pytest.approx(4 * n / 64 + 4 * layer, rel=1e-6)
    assert parts(3)[0] == pytest.approx(2 * n / 64 + 4 * layer, rel=1e-6)


def test_memory_falls_with_what_saves_it() -> None:
    base = Layout(pp=8, tp=8, microbatches=16)
    plain = held(base, 16)
    assert held(base, 16, flash=1) < plain
    assert held(dataclasses.replace(base, sequence_parallel=True), 16) < plain
    selective = held(dataclasses.replace(base, recompute="selective"), 16)
    assert held(dataclasses.replace(base, recompute="full"), 16) < selective < plain
    assert held(dataclasses.replace(base, schedule="gpipe"), 16) > plain
    assert held(dataclasses.replace(base, virtual_stages=3), 16) > plain


def grouped(tokens: float, at: Layout) -> float:
    """Seconds of the forward products of one layer of Mixtral's, of so many tokens."""
    found = compute.block_times(
        terms(shape("mixtral-8x7b")).kinds[0][1],
        terms(shape("mixtral-8x7b")),
        layout_columns([at], at.dp),
        one(tokens),
        Platform(a100(), dataclasses.replace(constants("A100-SXM-80", "megatron"), kernel_time=0)),
    )
    return float((found.forward - found.exposed / 2)[0])


def test_experts_are_many_small_products() -> None:
    """Eight experts at 64 tokens each cost about their weights' reading: no less for fewer rows;
    expert ranks hold fewer experts, with as many rows in all."""
    alone = Layout(dp=8, microbatches=1)
    split = Layout(dp=8, ep=8, microbatches=1)
    weights = (
        2.0 * 3 * 8 * 4096 * 14336 / (2.039e12 * constants("A100-SXM-80", "megatron").memory_rate)
    )
    assert grouped(64, alone) > weights
    assert grouped(64, split) < 0.5 * grouped(64, alone)
    assert grouped(8192, split) == pytest.approx(grouped(8192, alone), rel=0.1)
    block = terms(shape("mixtral-8x7b")).kinds[0][1]
    at = layout_columns([Layout(dp=8, ep=8, tp=2, microbatches=1)], 8)
    assert local_parameters(block, at).expert[0] == 3 * 8 * 4096 * 14336 / 16


def test_constants_are_few_and_explained() -> None:
    fields = {f.name for f in dataclasses.fields(Constants)}
    for name in stacks():
        known = constants("A100-SXM-80", name)
        assert {f.name for f in dataclasses.fields(known)} == fields
    assert constants("H200-SXM-141", "megatron").matrix_rate == (
        constants("H100-SXM-80", "megatron").matrix_rate
    )


SWITCHES = {
    "flash", "scatter_gather", "sharded_calls", "per_layer_state", "overlap_gradients",
    "launch_norm", "whole_gradients", "fused_gradients", "merged_copies", "expert_outputs",
    "quantized_inputs", "selective_halves", "cast_bytes",
}  # fmt: skip
"""What a stack does, not how well: no number that a fit could move."""


def test_no_gpu_and_no_stack_has_more_than_six_numbers_of_its_own() -> None:
    """Beside switches, and numbers that say `nothing`: 0 or 1, or what the stack inherits."""
    data = constants_file()
    assert {len(gpu) for gpu in data["gpus"].values()} == {len(GPU_FIELDS)} == {6}
    time = ("kernel_time", "softmax", "network", "skew", "hop", "step_overhead")
    for name, stack_of in data["stacks"].items():
        base = data["stacks"].get(stack_of.get("based_on", ""), {})
        own = {
            field
            for field, value in stack_of.items()
            if field not in SWITCHES and isinstance(value, (int, float))
            if value not in {0, 1, base.get(field)} and value != stack_of.get("network")
        }
        pairs = [  # those of GPUs that take another's constants replace the GPU's, not the stack's
            pair
            for gpu, stack, pair in ((*key.split(), p) for key, p in data["pairs"].items())
            if stack == name and gpu in data["gpus"]
        ]
        own |= {field for pair in pairs for field in pair}
        named = {
            "memory_slack",
            "memory_overhead",
            "expert_passes",
            "expert_time",
            "sharded_network",
        }
        if not base:
            own -= named  # assumed alike for both roots
            assert own <= {*time, "network", "traffic", "overlap"}, name
        else:
            own |= {"network"} if "network" in stack_of else set()
        assert len(own) <= 6, (name, own)


def test_columns_follow_their_fields() -> None:
    found = layout_columns([Layout(dp=2, pp=4, tp=2, virtual_stages=2, microbatches=8, zero=1)], 64)
    assert isinstance(found, Layouts)
    assert (found.microbatch[0], found.microbatches[0], found.shard[0]) == (4, 8, 2)
    assert found.schedule[0] == 2  # interleaved
