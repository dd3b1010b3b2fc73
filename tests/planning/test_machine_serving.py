"""Serving on a measured machine: what a step costs, what fits, what load it carries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_rates import Rates
from hocket.cost.measured_serving import ROW_CALLS, STEP_CALLS, MeasuredServing
from hocket.cost.serving_replica import ServingReplica
from hocket.planning import enumeration
from hocket.planning import machine_serving as planning
from hocket.planning.machine_forecast import MeasuredMachine
from hocket.planning.machine_serving import EngineSizes, MeasuredSteps
from hocket.planning.measured_servers import MeasuredServers
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.measured import (
    Curve,
    Dispatch,
    Host,
    LatencyFit,
    MachineMeasurements,
    MeasuredKernel,
    MeasuredMatmul,
    MeasuredStream,
    Sharing,
)
from hocket.spec.model_shape import (
    Attention,
    BlockShape,
    MatrixProduct,
    MemoryBound,
    ModelShape,
    Weight,
)
from hocket.spec.service import Service
from hocket.spec.serving import num_replicas, replica_layout
from hocket.spec.serving_forecast import Decode, Prefill, ServingForecast

FLOPS, BYTES = 1e10, 1e10
"""Of the machine, each second: every product and every stream run at exactly these."""

H, INNER, V, LAYERS = 64, 128, 256, 4


def machine(
    cores: int = 2, memory: int = 10**9, latency: float = 1e-4, call: float = 1e-6
) -> MeasuredMachine:
    sizes = (8, 64, 512)
    measured = MachineMeasurements(
        device="cpu",
        date="2026-11-20",
        torch="2",
        hocket="0",
        host=Host(name="box", cpu="cpu", cores=cores, memory=memory),
        products=tuple(
            MeasuredMatmul(
                dtype="fp32", form=form, m=m, n=64, k=64, seconds=2 * m * 64 * 64 / FLOPS
            )
            for form in ("nt", "nn")
            for m in sizes
        ),
        streams=tuple(
            MeasuredStream(operation="add", bytes=size, seconds=size / BYTES) for size in (1, 10**9)
        ),
        dispatch=tuple(
            Dispatch(operation=name, forward=call, recorded=2 * call, backward=call)
            for name in ("add", "view", "module", "linear")
        ),
        kernels=(
            MeasuredKernel(
                name="attention", dtype="fp32", shape=(1, 4, 64, 16), forward=1e-4, backward=1
            ),
        ),
        sharing=(Sharing(ranks=2, product=1.0, stream=1.0, dispatch=1.0),),
        curves=tuple(
            Curve(
                backend="shm", operation=name, ranks=2, world=2, sizes=(64, 10**6),
                seconds=(latency, latency + 10**6 / BYTES),
                lines=(LatencyFit(bytes=10**9, latency=latency, rate=BYTES),),
            )
            for name in ("all-reduce", "all-gather", "send")
        ),
    )  # fmt: skip
    return MeasuredMachine(measured=measured, backend="shm", name="box")


def shape() -> ModelShape:
    def product(name: str, n: int, k: int, split: str, source: str) -> MatrixProduct:
        return MatrixProduct(name=name, n=n, k=k, split=split, input=source)

    def weight(name: str, elements: int, split: str, units: int = 1) -> Weight:
        return Weight(name=f"{name}.weight", elements=elements, split=split, units=units)

    products = (
        product("q", H, H, "column", "a"),
        product("k", H // 2, H, "column", "a"),
        product("v", H // 2, H, "column", "a"),
        product("o", H, H, "row", "b"),
        product("gate", INNER, H, "column", "c"),
        product("up", INNER, H, "column", "c"),
        product("down", H, INNER, "row", "d"),
    )
    heads = {"q": 4, "k": 2, "v": 2, "o": 4}
    layer = BlockShape(
        kind="block",
        products=products,
        attention=(
            Attention(name="attention", heads=4, kv_heads=2, head_dim=16, value_dim=16),
        ),
        unfused=(MemoryBound(name="ops", forward=1000, backward=0, split="outside", kernels=10,
                             view="eager"),),
        weights=tuple(
            weight(p.name, p.n * p.k, p.split, heads.get(p.name, INNER)) for p in products
        ),
    )  # fmt: skip
    return ModelShape(
        name="model",
        hidden=H,
        vocab=V,
        heads=4,
        kv_heads=2,
        layers=("block",) * LAYERS,
        blocks={
            "block": layer,
            "embedding": BlockShape(kind="embedding", weights=(weight("e", V * H, "vocab", V),)),
            "head": BlockShape(
                kind="head",
                products=(product("lm", V, H, "vocab", "n"),),
                weights=(weight("lm", V * H, "vocab", V),),
            ),
        },
    )


def prices(
    layout: str, *, where: MeasuredMachine | None = None, slowdown: float = 1.0
) -> MeasuredServing:
    where = where or machine()
    replica = ServingReplica(shape=shape(), layout=Layout.parse(layout))
    return MeasuredServing(replica, Rates(where.measured), MeasuredLinks(where.measured), slowdown)


CALL = 4e-6
"""Of a kernel that serves."""


def kernels() -> MeasuredMachine:
    """The machine with the kernels that serve: reading a byte of a weight takes ten times as long
    as on `machine`, and so much longer for every row; a sum takes a tenth."""
    found = machine()

    def kernel(name: str, *shape: int, seconds: float) -> MeasuredKernel:
        return MeasuredKernel(name=name, dtype="fp32", shape=shape, forward=seconds, backward=0)

    rows = [
        kernel("rows", rows, 64, 64, count, seconds=CALL + 10 * rows * 4 * 64 * 64 / BYTES)
        for rows in (1, 64)
        for count in (1, 4096)
    ]
    others = [
        kernel("decode", 8, 4, 2, 64, 16, LAYERS, seconds=1e-3),
        kernel("chunk", 4, 2, 64, 16, seconds=2e-3),
        kernel("call", 16, seconds=CALL),
    ]
    measured = found.measured
    fast = tuple(
        dataclasses.replace(
            c, operation="sum", sizes=(64, 4096), seconds=tuple(s / 10 for s in c.seconds)
        )
        for c in measured.curves
        if c.operation == "all-reduce"
    )
    return dataclasses.replace(
        found,
        measured=dataclasses.replace(
            measured,
            kernels=(*measured.kernels, *rows, *others),
            curves=(*measured.curves, *fast),
        ),
    )


def test_a_step_is_estimated_by_the_kernels_that_serve() -> None:
    one = prices("dp1", where=kernels())
    layer = 4 * (H * H * 2 + 2 * H * H // 2 + 3 * H * INNER)
    read = 10 * (LAYERS * layer + 4 * V * H) / BYTES
    plain = prices("dp1", where=machine())
    attended, around = LAYERS * 1e-3, (STEP_CALLS + 8 * ROW_CALLS) * 1e-6
    assert one.decode_seconds(8, 64) == pytest.approx(8 * read + attended + around, rel=0.05)
    # Between measured numbers of rows, straight in doublings; of more than 64, torch's products.
    assert one.decode_seconds(8, 64) > 10 * plain.decode_seconds(8, 64) / 2
    half = one.decode_seconds(8, 32) - one.decode_seconds(8, 64)
    assert half == pytest.approx(-attended / 2)
    assert one.prefill_seconds(64, chunk=64) > one.decode_seconds(1, 1) + LAYERS * 2e-3 * 0.9
    assert one.prefill_seconds(128, chunk=128) < 2 * one.prefill_seconds(64, chunk=64)
    # Those by weights in bf16 were not measured.
    half_precision = ServingReplica(shape=shape(), layout=Layout(), dtype="bf16")
    rates, links = Rates(kernels().measured, "bf16"), MeasuredLinks(machine().measured)
    assert MeasuredServing(half_precision, rates, links).decode_seconds(8, 64) < 8 * read


def test_weights_in_bf16_are_estimated_under_a_computation_in_fp32() -> None:
    where = kernels().measured
    halves = [
        dataclasses.replace(k, name="half", dtype="bf16", forward=CALL + (k.forward - CALL) / 4)
        for k in where.kernels
        if k.name == "rows"
    ]
    where = dataclasses.replace(where, kernels=(*where.kernels, *halves))
    links = MeasuredLinks(where)

    def priced(dtype: str) -> MeasuredServing:
        one = ServingReplica(shape=shape(), layout=Layout(), dtype=dtype)
        return MeasuredServing(one, Rates(where, dtype), links)

    full, half = priced("fp32"), priced("bf16")
    assert half.replica.weight_bytes(0) == full.replica.weight_bytes(0) / 2
    assert half.replica.cache_bytes(0) == full.replica.cache_bytes(0)
    assert half.replica.step_bytes(0, 64, 4) == full.replica.step_bytes(0, 64, 4)
    layer = 4 * (H * H * 2 + 2 * H * H // 2 + 3 * H * INNER)
    read = 10 * (LAYERS * layer + 4 * V * H) / BYTES
    less = full.decode_seconds(8, 64) - half.decode_seconds(8, 64)
    assert less == pytest.approx(8 * read * 3 / 4, rel=0.05)
    on_cuda = dataclasses.replace(half.replica, cpu=False)
    assert on_cuda.cache_bytes(0) == full.replica.cache_bytes(0) / 2
    block = shape().blocks["block"]
    products = tuple(dataclasses.replace(p, groups=4) for p in block.products)
    experts = dataclasses.replace(block, products=products)
    mixed = dataclasses.replace(shape(), blocks={**shape().blocks, "block": experts})
    assert not dataclasses.replace(half.replica, shape=mixed).half


def test_products_of_few_rows_lie_between_those_that_were_measured() -> None:
    rates = Rates(kernels().measured)
    one, all_ = 64 * 64 * 4, 4096 * 64 * 64 * 4
    for rows in (1, 8, 64):
        expected = pytest.approx(CALL + 10 * rows * one / BYTES)
        assert rates.rows(rows, one, one) == expected
        assert rates.rows(rows, one, all_ / 100) == expected
    assert rates.rows(128, one, one) == rates.rows(64, one, one)
    assert Rates(machine().measured).rows(1, one, one) is None


def test_tensor_ranks_that_serve_sum_by_their_kernel() -> None:
    links = MeasuredLinks(kernels().measured)
    slow, fast = links.all_reduce("tp", 4096, 2), links.sum("tp", 4096, 2)
    assert slow is not None
    assert fast is not None
    assert fast.give + fast.wait + fast.take < 0.2 * (slow.give + slow.wait + slow.take)
    assert links.sum("tp", 4097, 2) == links.all_reduce("tp", 4097, 2), "more than it takes"
    assert links.sum("tp", 64, 1) is None
    assert MeasuredLinks(machine().measured).sum("tp", 64, 2) == links.all_reduce("tp", 64, 2)


def test_layers_like_llamas_have_less_between_their_products() -> None:
    plain = shape()
    rows = [("norm", 64.0, 1, "outside"), ("second norm", 64.0, 1, "outside"),
            ("attention", 96.0, 2, "inside"), ("add", 192.0, 2, "outside"),
            ("mlp", 144.0, 1, "inside")]  # fmt: skip
    bound = tuple(
        MemoryBound(name=name, forward=forward, backward=0, split=split, kernels=kernels)
        for name, forward, kernels, split in rows
    )
    many = dataclasses.replace(plain.blocks["block"].unfused[0], kernels=1000)
    block = dataclasses.replace(plain.blocks["block"], memory_bound=bound, unfused=(many,))
    same = dataclasses.replace(plain, blocks={**plain.blocks, "block": block})
    # One norm more (Qwen 3's heads), and the engine leaves the layer to its own code.
    other = dataclasses.replace(block, memory_bound=(*bound, bound[0]))
    unlike = dataclasses.replace(plain, blocks={**plain.blocks, "block": other})

    def seconds(which: ModelShape) -> float:
        where = kernels().measured
        replica = ServingReplica(shape=which, layout=Layout())
        return MeasuredServing(replica, Rates(where), MeasuredLinks(where)).decode_seconds(1, 64)

    assert seconds(unlike) - seconds(same) > LAYERS * 700 * 1e-6


SIZES = EngineSizes(batch_tokens=64, rows=16, longest=128)


def memory_of(
    replica: ServingReplica, where: MeasuredMachine, sizes: EngineSizes
) -> tuple[list[dict[str, int]], int]:
    stages = replica.stage_bytes(sizes.batch_tokens, sizes.rows)
    room = where.room(replica.layout.world_size)
    return planning.rank_memory(stages, sizes, room, replica.layout)


def test_bytes_are_counted_exactly() -> None:
    layer = H * H * 2 + 2 * H * H // 2 + 3 * H * INNER
    one = ServingReplica(shape=shape(), layout=Layout())
    assert one.weight_bytes(0) == 4 * (LAYERS * layer + 2 * V * H)
    assert one.cache_bytes(0) == 4 * LAYERS * 2 * (16 + 16)
    half = ServingReplica(shape=shape(), layout=Layout(tp=2))
    assert half.weight_bytes(0) == one.weight_bytes(0) // 2
    assert half.cache_bytes(0) == one.cache_bytes(0) // 2
    four = ServingReplica(shape=shape(), layout=Layout(tp=4))  # two ranks hold each key/value head
    assert four.cache_bytes(0) == one.cache_bytes(0) // 2
    stages = ServingReplica(shape=shape(), layout=Layout(pp=2))
    assert sum(stages.weight_bytes(s) for s in range(2)) == one.weight_bytes(0)
    assert sum(stages.cache_bytes(s) for s in range(2)) == one.cache_bytes(0)


def test_experts_are_counted_on_the_ranks_that_hold_them() -> None:
    """8 stacked experts in place of the feed-forward block, of which a token takes 2."""
    one = shape()
    experts = tuple(
        MatrixProduct(name=f"mlp.experts.{name}", n=n, k=k, split=split, input=source, groups=8,
                      count=2)
        for name, n, k, split, source in (
            ("gate_up", 2 * INNER, H, "column", "c"), ("down", H, INNER, "row", "d"),
        )
    )  # fmt: skip
    stacked = tuple(
        Weight(name=p.name, elements=8 * p.n * p.k, split=p.split, units=INNER) for p in experts
    )
    block = one.blocks["block"]
    mixed = dataclasses.replace(
        block, products=block.products[:4] + experts, weights=block.weights[:4] + stacked
    )
    given = dataclasses.replace(one, blocks={**one.blocks, "block": mixed}, experts=8)
    attention, expert = 3 * H * H, 3 * H * INNER
    held = {
        "dp1": (LAYERS * (attention + 8 * expert), 2 * V * H, 1),
        "dp2.ep2": (LAYERS * (attention + 4 * expert), 2 * V * H, 2),
        "tp2.ep2.etp1": (LAYERS * (attention // 2 + 4 * expert), V * H, 2),
        "dp2.tp2.ep2": (LAYERS * (attention // 2 + 2 * expert), V * H, 4),
        "dp2.tp2.ep4.etp1": (LAYERS * (attention // 2 + 2 * expert), V * H, 4),
    }
    for text, (layers, ends, ranks) in held.items():
        layout = replica_layout(Layout.parse(text))
        assert layout.world_size == ranks
        replica = ServingReplica(shape=given, layout=layout)
        assert replica.weight_bytes(0) == 4 * (layers + ends), text
        rows, _ = memory_of(replica, machine(), SIZES)
        assert [row["weights"] for row in rows] == [replica.weight_bytes(0)] * ranks
    # Counts, tokens there and tokens back in each layer; with even routing as many rows as before.
    slow, quick = (machine(latency=latency).measured for latency in (0.01, 1e-4))
    replica = ServingReplica(shape=given, layout=Layout.parse("dp2.ep2"))
    seconds = [
        float(MeasuredServing(replica, Rates(one), MeasuredLinks(one)).step_seconds(0, 0, 16, 64))
        for one in (slow, quick)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(LAYERS * 3 * 0.01, rel=0.1)
    # Two data ranks are one replica, with steps, rows and a cache each.
    found = MeasuredServers(given, machine()).replica(Layout.parse("dp2.ep2"), SIZES)
    assert (found.data_ranks, found.cache_tokens) == (2, 2 * 2 * SIZES.rows * SIZES.longest)


def test_data_ranks_of_a_replica_share_its_load() -> None:
    fast = machine(latency=1e-9)
    one, two = prices("dp1", where=fast), prices("dp2", where=fast)

    def same(seconds: float) -> object:
        return pytest.approx(seconds, rel=1e-3)  # the plan is sent

    assert float(two.step_seconds(0, 0, 16, 64)) == same(float(one.step_seconds(0, 0, 8, 64)))
    assert two.decode_seconds(16, 64) == same(one.decode_seconds(8, 64))
    # A prompt alone, and its tokens, are one rank's.
    assert two.prefill_seconds(64, chunk=32) == same(one.prefill_seconds(64, chunk=32))
    assert two.decode_seconds(1, 64) == same(one.decode_seconds(1, 64))


def test_replicas_hold_all_experts_and_no_more() -> None:
    for text, dp, count in (
        ("dp4", 1, 4), ("dp4.ep2", 2, 2), ("dp4.ep4", 4, 1), ("dp2.tp2.ep2.etp1", 1, 2),
        ("dp4.tp2.ep4.etp1", 2, 2), ("dp2.tp2.etp1", 1, 2), ("dp2.tp2.pp2.ep2", 2, 1),
    ):  # fmt: skip
        layout = Layout.parse(text)
        assert (replica_layout(layout).dp, num_replicas(layout)) == (dp, count), text


def test_a_step_costs_at_least_its_products_and_no_less_than_reading_them() -> None:
    one = prices("dp1")
    read = one.replica.weight_bytes(0) / BYTES - 4 * V * H / BYTES  # the embedding is looked up
    assert one.decode_seconds(1, 1) > read
    flops = 2 * (one.replica.weight_bytes(0) / 4 - V * H) * 64
    seconds = one.decode_seconds(64, 16)
    assert seconds > flops / FLOPS
    # What is not a product, a call or a stream is nothing: twice is generous.
    assert seconds < 2.5 * flops / FLOPS


def test_time_grows_with_what_is_computed_and_attended() -> None:
    for layout in ("dp1", "tp2", "pp2"):
        one = prices(layout)
        batches = [one.decode_seconds(b, 64) for b in (1, 2, 8, 32)]
        assert batches == sorted(batches)
        contexts = [one.decode_seconds(8, c) for c in (16, 64, 512, 4096)]
        assert contexts == sorted(contexts)
        assert contexts[-1] > contexts[0]
        prompts = [one.prefill_seconds(n, chunk=64) for n in (8, 16, 64, 128, 512)]
        assert prompts == sorted(prompts)


def test_splits_do_what_they_are_for() -> None:
    fast = machine(latency=1e-7, call=1e-8)  # nothing but what is computed takes time
    alone, split, staged = (prices(name, where=fast) for name in ("dp1", "tp2", "pp2"))
    # One request: tensor ranks share it, stages only take turns.
    assert split.decode_seconds(1, 4096) < 0.75 * alone.decode_seconds(1, 4096)
    assert staged.decode_seconds(1, 64) >= alone.decode_seconds(1, 64)
    # Many: both do nearly twice as much.
    assert split.decode_seconds(32, 256) < 0.7 * alone.decode_seconds(32, 256)
    assert staged.decode_seconds(32, 256) < 0.75 * alone.decode_seconds(32, 256)
    # A long prompt goes through the stages in several chunks at once.
    assert staged.prefill_seconds(512, chunk=64) < 0.8 * alone.prefill_seconds(512, chunk=64)
    slow = machine(latency=1e-2)
    assert prices("tp2", where=slow).decode_seconds(1, 64) > LAYERS * 2 * 5e-3


def test_ranks_that_share_cores_take_longer() -> None:
    one, two = prices("dp1"), prices("dp1", slowdown=2.0)
    assert two.decode_seconds(4, 64) == pytest.approx(2 * one.decode_seconds(4, 64))


def test_arrays_broadcast_and_an_empty_step_costs_nothing() -> None:
    one = prices("pp2")
    found = one.step_seconds(np.zeros((2, 1)), 0.0, np.array([0.0, 3.0]), 10.0)
    assert found.shape == (2, 2)
    assert found[0, 0] == 0.0
    assert found[0, 1] == found[1, 1] == pytest.approx(float(one.step_seconds(0, 0, 3, 10)))
    assert np.all(one.stage_seconds(8, 4, 3, 10) <= one.step_seconds(8, 4, 3, 10))


def test_capacity() -> None:
    replica = ServingReplica(shape=shape(), layout=Layout(tp=2))
    rows, tokens = memory_of(replica, machine(), SIZES)
    assert tokens == 2 * 16 * 128  # as much as is of use
    assert len(rows) == 2
    assert rows[0]["total"] == sum(rows[0][k] for k in ("weights", "step", "cache"))
    asked = dataclasses.replace(SIZES, cache=replica.cache_bytes(0) * 100)
    assert memory_of(replica, machine(), asked)[1] == 96  # whole blocks
    little = machine(memory=2 * (replica.weight_bytes(0) + replica.step_bytes(0, 64, 16)) + 64)
    assert memory_of(replica, little, SIZES)[1] == 0


def test_a_forecast_holds_together() -> None:
    found = planning.server_forecast(MeasuredServers(shape(), machine()), Layout(dp=2), SIZES)
    assert ServingForecast.from_json(found.to_json()) == found
    rates = [load.rate for load in found.loads]
    assert rates == sorted(rates)
    tpot = [load.tpot_p90 for load in found.loads]
    assert tpot[-1] > tpot[0], "a fuller replica answers later"
    assert all(load.ttft_p50 <= load.ttft_p90 <= load.ttft_p99 for load in found.loads)
    assert found.tokens_per_second > found.loads[-1].tokens_per_second
    least = max(found.decode, key=lambda row: row.batch / row.seconds)
    assert found.tokens_per_second < least.batch / least.seconds, "prompts take their time too"
    counts = [need.replicas for need in found.needs]
    assert counts == sorted(counts, key=lambda n: n or 0)
    assert counts[:2] == [1, 2]
    for need in found.needs:
        assert need.within_goals is None or need.within_goals >= (need.replicas or 0) - 1


def test_goals_need_more_replicas() -> None:
    one = prices("dp1")
    usual = planning.usual(128)
    _, needs, most = planning.under_load(one, SIZES, usual, 2048)
    alone = one.decode_seconds(1, usual.context)
    strict = dataclasses.replace(usual, tpot_ms=1.5e3 * alone)
    _, strictly, same = planning.under_load(one, SIZES, strict, 2048)
    assert same == most
    for easy, hard in zip(needs, strictly, strict=True):
        assert hard.replicas == easy.replicas
        assert hard.within_goals is None or hard.within_goals > (easy.within_goals or 0)
    impossible = dataclasses.replace(usual, tpot_ms=0.1e3 * alone)
    _, none, _ = planning.under_load(one, SIZES, impossible, 2048)
    assert {need.within_goals for need in none} == {None}


def test_the_choice_is_the_best_that_fits() -> None:
    layouts = enumeration.meshes(shape(), 2)
    assert {one.axes_text() for one in layouts} == {"dp1", "dp2", "tp2", "pp2"}
    found = planning.choose_server(MeasuredServers(shape(), machine()), SIZES, layouts)
    assert found.layout == "dp2", "replicas say nothing to each other"
    assert [one.chosen for one in found.alternatives] == [True, False, False, False]
    best = max(found.alternatives, key=lambda one: one.tokens_per_second)
    assert best.layout == "dp2"
    # Where two copies do not fit, the model is split.
    whole = ServingReplica(shape=shape(), layout=Layout())
    need = whole.weight_bytes(0) + whole.step_bytes(0, 64, 16)
    tight = machine(memory=round(1.6 * need))
    small = dataclasses.replace(SIZES, tokens=0, cache=128 * whole.cache_bytes(0))
    found = planning.choose_server(
        MeasuredServers(shape(), tight), dataclasses.replace(small, cache=0), layouts
    )
    assert found.layout != "dp2"
    with pytest.raises(OptionError, match="fits in no layout"):
        planning.choose_server(MeasuredServers(shape(), machine(memory=1000)), SIZES, layouts)


def test_measured_steps_are_prices_too() -> None:
    steps = MeasuredSteps(
        [
            Decode(batch=1, context=9, seconds=0.01, count=9),
            Decode(batch=9, context=9, seconds=0.05, count=3),
        ],
        [Prefill(tokens=10, seconds=0.02, count=1), Prefill(tokens=30, seconds=0.04, count=1)],
    )
    assert steps.step_seconds(0, 0, 5, 1) == pytest.approx(0.03)
    assert steps.step_seconds(0, 0, 17, 1) == pytest.approx(0.09)
    assert steps.step_seconds(20, 0, 0, 1) == pytest.approx(0.03)
    assert steps.step_seconds(20, 0, 1, 1) == pytest.approx(0.01 + 0.02), "fixed costs once"
    assert steps.step_seconds(0, 0, 0, 1) == 0.0
    noisy = MeasuredSteps([Decode(batch=b, context=9, seconds=0.02 / b) for b in (1, 2)], [])
    assert noisy.step_seconds(0, 0, 64, 1) == pytest.approx(0.015), "more is never quicker"
    loads, needs, most = planning.under_load(
        steps, SIZES, Service(prompt_len=16, output_len=16), 2048
    )
    assert loads
    assert needs
    assert most > 0
    with pytest.raises(OptionError, match="no decode step"):
        MeasuredSteps([], [])
