"""Forecasts on a made machine whose numbers are round, so that what comes out can be said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hocket.catalogue import shapes
from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_prices import step_prices
from hocket.cost.measured_rates import Rates, interpolated_seconds
from hocket.cost.measured_stage import Microbatch, stage_seconds
from hocket.planning.enumeration import candidate_layouts
from hocket.planning.machine_choice import (
    best_of,
    evaluate_layouts,
)
from hocket.planning.machine_forecast import (
    MeasuredMachine,
    machine_forecast,
    rates_of,
    step_problem,
)
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.links import Links as Wires
from hocket.spec.measured import (
    Curve,
    Dispatch,
    Host,
    MachineMeasurements,
    MeasuredKernel,
    MeasuredMatmul,
    MeasuredStream,
    Sharing,
    Update,
)
from hocket.spec.model_shape import ModelShape
from hocket.spec.process_groups import named_groups
from hocket.spec.run import Workload
from hocket.spec.timeline import Timeline

RATE = 1e10
"""Operations/s of every product."""

SHAPE = shapes.shape("tiny-llama")
WORK = Workload(seq_len=128, global_batch=8)


def chosen(
    machine: MeasuredMachine, layouts: list[Layout], *, shown: int = 12, **more: Any
) -> tuple[Forecast, Timeline]:
    """The fastest that fits, with what else was considered."""
    ranked = evaluate_layouts(SHAPE, WORK, machine, layouts, shown=shown, **more)
    return best_of(ranked, SHAPE, WORK, shown)


def measured(cores: int = 2, *, latency: float = 5e-5, rate: float = 2e9) -> MachineMeasurements:
    """A machine on which everything has one rate."""
    sizes = (256, 65536, 1 << 24)

    def curve(operation: str, ranks: int) -> Curve:
        turns = max(1.0, ranks / cores)
        seconds = tuple(turns * (latency + size / rate) for size in sizes)
        return Curve(
            backend="shm",
            operation=operation,
            ranks=ranks,
            world=ranks,
            sizes=sizes,
            seconds=seconds,
        )

    products = [
        MeasuredMatmul(dtype="fp32", form=form, m=m, n=n, k=k, seconds=2 * m * n * k / RATE)
        for form in ("nt", "nn", "tn")
        for m in (64, 1024)
        for n in (64, 1024)
        for k in (64, 1024)
    ]
    return MachineMeasurements(
        device="cpu",
        date="2026-01-01T00:00:00Z",
        torch="2",
        hocket="0",
        host=Host(name="made", cpu="made", cores=cores, memory=2**33),
        products=tuple(products),
        streams=tuple(
            MeasuredStream(operation="add", bytes=n, seconds=1e-6 + n / 1e10)
            for n in (4096, 1 << 24)
        ),
        dispatch=(
            Dispatch(operation="add", forward=1e-6, recorded=2e-6, backward=2e-6),
            Dispatch(operation="linear", forward=1e-6, recorded=2e-6, backward=2e-6),
            Dispatch(operation="module", forward=1e-6, recorded=1e-6, backward=0.0),
        ),
        kernels=(
            MeasuredKernel(
                name="attention", dtype="fp32", shape=(1, 4, 128, 32), forward=1e-3, backward=2e-3
            ),
            MeasuredKernel(
                name="cross-entropy", dtype="fp32", shape=(128, 4096), forward=1e-3, backward=1e-3
            ),
        ),
        updates=(Update(name="adamw", elements=10**6, tensors=40, seconds=1e-3),),
        sharing=(
            Sharing(ranks=2, product=1.0, stream=1.0, dispatch=1.0),
            Sharing(ranks=4, product=4 / cores, stream=4 / cores, dispatch=4 / cores),
        ),
        curves=tuple(
            curve(operation, ranks)
            for operation in ("all-reduce", "all-gather", "send")
            for ranks in (2, 4)
        ),
    )


MACHINE = MeasuredMachine(measured=measured())


def predicted(layout: str, machine: MeasuredMachine = MACHINE, work: Workload = WORK) -> Forecast:
    return machine_forecast(step_problem(SHAPE, Layout.parse(layout), work), machine)[0]


# --- rates ---------------------------------------------------------------------------------------


def test_a_measured_product_is_taken_as_it_is_and_others_by_their_neighbours() -> None:
    rates = Rates(measured())
    assert rates.product("nt", 64, 1024, 64) == pytest.approx(2 * 64 * 1024 * 64 / RATE)
    assert rates.product("tn", 100, 300, 70) == pytest.approx(2 * 100 * 300 * 70 / RATE)
    assert rates.product("nn", 0, 5, 5) == 0.0


def test_a_nearer_product_says_more() -> None:
    known = [
        MeasuredMatmul(dtype="fp32", form="nt", m=m, n=64, k=64, seconds=2 * m * 64 * 64 / rate)
        for m, rate in ((64, 1e9), (4096, 1e10))
    ]
    rates = Rates(dataclasses.replace(measured(), products=tuple(known)))
    near, far = (2 * m * 64 * 64 / rates.product("nt", m, 64, 64) for m in (128, 2048))
    assert 1e9 < near < 1.3e9
    assert 7e9 < far < 1e10


def test_an_unmeasured_type_is_said() -> None:
    assert "bf16 matmuls were not measured" in Rates(measured(), "bf16").notes[0]
    with pytest.raises(OptionError, match="no matmul"):
        Rates(dataclasses.replace(measured(), products=()))


def test_between_two_points_doublings_run_straight() -> None:
    points = [(1.0, 1.0), (4.0, 16.0)]
    assert interpolated_seconds(points, 2.0) == pytest.approx(4.0)
    assert interpolated_seconds(points, 0.5) == 1.0
    assert interpolated_seconds(points, 8.0) == 32.0


def test_a_kernel_grows_with_its_work() -> None:
    rates = Rates(measured())
    assert rates.kernel("attention", (1, 4, 128, 32)) == (1e-3, 2e-3)
    assert rates.kernel("attention", (2, 4, 256, 32)) == pytest.approx((8e-3, 16e-3))
    assert rates.kernel("never measured", (1,)) is None


# --- communication -------------------------------------------------------------------------------


def test_ranks_that_take_turns_have_a_share_of_the_measured_time() -> None:
    links = MeasuredLinks(measured(cores=2))
    two = links.collective("all-reduce", "dp", 65536, 2)
    four = links.collective("all-reduce", "dp", 65536, 4)
    assert two is not None
    assert four is not None
    # Alone on the machine the work is the same, and the turns come from the cores.
    assert four.give + four.take == pytest.approx(two.seconds)
    assert links.collective("all-reduce", "dp", 65536, 1) is None


def test_a_group_that_was_not_measured_is_scaled_and_said() -> None:
    links = MeasuredLinks(measured())
    eight = links.collective("all-reduce", "dp", 1 << 20, 8)
    four = links.collective("all-reduce", "dp", 1 << 20, 4)
    assert eight is not None
    assert four is not None
    assert eight.seconds > 1.5 * four.seconds
    assert "scaled from 4" in links.notes[0]


def test_links_that_are_emulated_are_waited_for() -> None:
    slow = Wires.parse("net100g:scale=5000")
    emulated = dataclasses.replace(MACHINE, wires=slow)
    nbytes = 128 * 8 * SHAPE.hidden * 2  # as bf16
    one = slow.seconds("all-reduce", nbytes, (0, 1), 2)
    plain, wired = predicted("tp2"), predicted("tp2", emulated)
    # Two sums each way of each layer, one after the embedding, one before the head.
    sums = 4 * len(SHAPE.layers) + 2
    assert wired.step_seconds - plain.step_seconds > 0.9 * sums * one
    assert wired.links["tp"] == "net100g"


def test_slow_links_turn_the_choice_away_from_tensor_parallelism() -> None:
    pair = [Layout.parse("tp2:microbatches=1"), Layout.parse("pp2:microbatches=8")]
    fast = MeasuredMachine(measured=measured(latency=1e-7, rate=1e12))
    slow = dataclasses.replace(fast, wires=Wires.parse("net100g:scale=20000"))
    assert chosen(fast, pair)[0].layout.startswith("tp2")
    assert chosen(slow, pair)[0].layout.startswith("pp2")


# --- the whole -----------------------------------------------------------------------------------


def test_one_process_takes_what_its_products_take_at_least() -> None:
    found = predicted("dp1:microbatches=1")
    products = sum(p.n * p.k for kind in SHAPE.layers for p in SHAPE.blocks[kind].products)
    products += sum(p.n * p.k for p in SHAPE.blocks["head"].products)
    least = 6.0 * products * WORK.seq_len * WORK.global_batch / RATE
    assert least < found.step_seconds < 2 * least
    assert found.bubble == pytest.approx(0.0)
    assert found.tokens_per_second == pytest.approx(1024 / found.step_seconds)
    assert found.exposed == {}


def test_more_ranks_than_cores_gain_nothing() -> None:
    two, four = predicted("dp2:microbatches=1"), predicted("dp4:microbatches=1")
    one = predicted("dp1:microbatches=1")
    assert two.step_seconds == pytest.approx(one.step_seconds / 2, rel=0.1)
    assert four.step_seconds > 0.98 * two.step_seconds
    roomy = MeasuredMachine(measured=measured(cores=4))
    assert predicted("dp4:microbatches=1", roomy).step_seconds < 0.6 * two.step_seconds


def test_memory_is_that_of_each_rank() -> None:
    whole, halves = predicted("dp1:microbatches=1"), predicted("pp2:microbatches=1")
    count = SHAPE.num_parameters
    assert whole.memory[0]["parameters"] == 4 * count
    assert whole.memory[0]["gradients"] == 4 * count
    assert 8 * count <= whole.memory[0]["optimizer"] < 8.01 * count
    assert sum(row["parameters"] for row in halves.memory) == 4 * count
    assert all(
        row["total"] == sum(value for kind, value in row.items() if kind != "total")
        for row in (*whole.memory, *halves.memory)
    )


def test_a_later_stage_holds_fewer_microbatches() -> None:
    one_f, gpipe = (predicted(f"pp2:microbatches=8,schedule={name}") for name in ("1f1b", "gpipe"))
    assert one_f.memory[0]["activations"] < 0.5 * gpipe.memory[0]["activations"]


def test_collectives_are_those_that_the_runtime_counts() -> None:
    rows = {(r["name"], r["axis"]): r for r in predicted("tp2:microbatches=2").collectives}
    sums = rows["all-reduce", "tp"]
    assert sums["count"] == 2 * 2 * (4 * len(SHAPE.layers) + 2)
    assert sums["bytes"] == sums["count"] * 512 * SHAPE.hidden * 4


@pytest.mark.parametrize(
    "text",
    [
        "dp2", "tp2", "dp2.pp2", "dp2:zero=1", "dp2:zero=3", "dp4:zero=2,shard=2", "cp2.tp2",
        "tp2:sequence_parallel=true,recompute=full", "pp2.tp2:microbatches=2", "dp2.ep2",
        "dp2.tp2.ep4.etp1:microbatches=2",
    ],
)  # fmt: skip
def test_a_step_has_the_seconds_of_every_collective_that_is_counted(text: str) -> None:
    """What a step is predicted from, name and axis by name and axis, is what the runtime counts."""
    layout = Layout.parse(text)
    job = step_problem(MIXTURE if layout.ep > 1 else SHAPE, layout, WORK)
    prices = step_prices(job, *rates_of(job, MACHINE))
    count, index = job.microbatches, layout.pp - 1
    stage, rank = prices.stages[index], prices.ranks[index]
    inside = (*stage.forward_collectives, *stage.backward_collectives)
    once = (*stage.reductions, *rank.sums, prices.loss, prices.norm)
    predicted: dict[tuple[str, str], list[int]] = {}
    for times, calls in ((count, inside), (1, once)):
        for one in calls:
            if one is not None:
                row = predicted.setdefault((one.name, one.axis), [0, 0])
                row[0] += times
                row[1] += times * one.bytes
    (counted,) = job.communication([layout.rank({"pp": index, "cp": layout.cp // 2})])
    expected: dict[tuple[str, str], list[int]] = {}
    for row in counted:
        if row["name"] != "receive" and row["axis"] != "pp":
            both = expected.setdefault((row["name"], row["axis"]), [0, 0])
            both[0] += row["count"]
            both[1] += row["bytes"]
    assert predicted == expected


def test_the_forecast_reads_back() -> None:
    best, _ = chosen(MACHINE, [Layout.parse("dp2"), Layout.parse("tp2")])
    assert Forecast.from_json(best.to_json()) == best
    assert Forecast.from_json(Forecast.none("dp2", "why not").to_json()).why == "why not"


# --- choosing ------------------------------------------------------------------------------------


def test_the_choice_is_the_fastest_that_fits() -> None:
    layouts = candidate_layouts(SHAPE, WORK, 4)
    best, timeline = chosen(MACHINE, layouts)
    assert best.alternatives[0].chosen
    assert best.alternatives[0].layout == best.layout
    seconds = [one.step_seconds for one in best.alternatives]
    assert seconds == sorted(seconds)
    assert timeline.num_ranks == Layout.parse(best.layout).world_size
    # Half of what the fastest takes: another one is chosen, and it fits.
    tight = dataclasses.replace(MACHINE, capacity=max(best.peak_bytes) // 2)
    other, _ = chosen(tight, layouts)
    assert max(other.peak_bytes) <= tight.capacity
    assert other.step_seconds >= best.step_seconds


def test_what_cannot_be_the_fastest_need_not_be_played() -> None:
    layouts = candidate_layouts(SHAPE, WORK, 4)
    few, _ = chosen(MACHINE, layouts, shown=1)
    every, _ = chosen(MACHINE, layouts, shown=len(layouts))
    assert len(every.alternatives) == len(layouts)
    assert few.layout == every.layout


def test_what_fits_nowhere_is_refused_with_the_least() -> None:
    tiny = dataclasses.replace(MACHINE, capacity=10**6)
    with pytest.raises(LayoutError, match=r"the least is .* MB a rank in"):
        chosen(tiny, candidate_layouts(SHAPE, WORK, 4))


def test_where_no_plain_layout_fits_memory_is_saved() -> None:
    layouts = candidate_layouts(SHAPE, WORK, 4)
    least, _ = min(
        evaluate_layouts(SHAPE, WORK, MACHINE, layouts, shown=len(layouts)),
        key=lambda pair: max(pair[0].peak_bytes),
    )
    tight = dataclasses.replace(MACHINE, capacity=round(0.98 * max(least.peak_bytes)))
    best, _ = chosen(
        tight, layouts, otherwise=lambda: candidate_layouts(SHAPE, WORK, 4, saving=True)
    )
    saving = Layout.parse(best.layout)
    assert saving.zero or saving.sequence_parallel or saving.recompute == "full"
    assert max(best.peak_bytes) <= tight.capacity
    assert any(not one.fits for one in best.alternatives)


def test_candidates_are_legal_for_model_and_batch() -> None:
    found = candidate_layouts(SHAPE, Workload(seq_len=128, global_batch=6), 4)
    assert {layout.world_size for layout in found} == {1, 2, 3, 4}
    for layout in found:
        assert SHAPE.heads % layout.tp == 0
        assert 6 % (layout.dp * (layout.microbatches or 1)) == 0


@pytest.mark.parametrize("text", ["pp3.tp4", "pp4.tp4", "pp2.tp8", "dp4:zero=2,shard=2"])
def test_a_step_with_every_group_that_a_layout_has_is_simulated(text: str) -> None:
    """Copied key/value heads and HSDP's replicas: groups that are neither an axis nor the world."""
    layout = dataclasses.replace(Layout.parse(text), microbatches=4)
    work = Workload(seq_len=128, global_batch=16)
    job = step_problem(shapes.shape("tiny-qwen3"), layout, work)
    found, timeline = machine_forecast(job, MACHINE)
    assert found.known
    derived = {"tp_copies2", "tp_copies4", "replicas"}
    axes = {event.axis for event in timeline.events} & derived
    assert axes, sorted({str(event.axis) for event in timeline.events})
    # Ranks of one group end a collective together, and no other rank of the world has to.
    for axis in axes:
        rows = named_groups(layout, str(axis))
        assert all(len(row) < layout.world_size for row in rows)
        for row in rows:
            ends = [
                sorted(e.end for e in timeline.events if e.axis == axis and e.rank == rank)
                for rank in row
            ]
            assert len({len(one) for one in ends}) == 1


def test_threads_are_not_predicted() -> None:
    with pytest.raises(LayoutError, match="one interpreter"):
        predicted("dp2:data_parallel=threads")


def test_messages_that_nobody_measured_are_not_free() -> None:
    alone = MeasuredMachine(measured=dataclasses.replace(measured(), curves=()))
    assert predicted("dp1", alone).step_seconds > 0
    for layout in ("tp2", "dp2", "pp2:microbatches=2"):
        with pytest.raises(OptionError, match="over shm was not measured"):
            predicted(layout, alone)


# --- context and expert parallelism -------------------------------------------------------------

MIXTURE = shapes.shape("tiny-mixtral")


def rows_of(text: str, shape: ModelShape = MIXTURE) -> dict[tuple[str, str], dict[str, Any]]:
    found, _ = machine_forecast(step_problem(shape, Layout.parse(text), WORK), MACHINE)
    return {(row["name"], row["axis"]): row for row in found.collectives}


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Of each layer and microbatch: the counts; the tokens there and back, and their gradients."""
    rows = rows_of("dp2.ep2:microbatches=2")
    sent = rows["all-to-all", "expert"]
    each = 2 * 2 * len(MIXTURE.layers)  # on two ranks, of two microbatches
    assert sent["count"] == 5 * each
    tokens = 8 // 2 // 2 * 128
    message = tokens * MIXTURE.experts_per_token * MIXTURE.hidden * 4
    assert sent["bytes"] == each * (4 * message + MIXTURE.experts * 8)
    # Experts have no copy: their gradients are not summed, all others' are.
    assert ("all-reduce", "expert_data") not in rows
    whole, split = (rows_of(text)["all-reduce", "dp"]["bytes"] for text in ("dp2", "dp2.ep2"))
    experts = sum(
        w.elements
        for kind in MIXTURE.layers
        for w in MIXTURE.blocks[kind].weights
        if ".experts." in w.name
    )
    assert whole - split == 2 * 4 * experts


def test_copies_of_experts_sum_their_gradients() -> None:
    rows = rows_of("dp4.ep2:microbatches=1")
    experts = sum(
        w.elements
        for kind in MIXTURE.layers
        for w in MIXTURE.blocks[kind].weights
        if ".experts." in w.name
    )
    assert rows["all-reduce", "expert_data"]["bytes"] == 4 * 4 * experts // 2


def test_sequences_over_ranks_exchange_heads_or_keys() -> None:
    core = SHAPE.blocks[SHAPE.layers[0]].attention[0]
    rows = rows_of("cp2:microbatches=1", SHAPE)
    tokens, layers = 8 * 128 // 2, len(SHAPE.layers)
    assert core.kv_heads % 2 == 0
    there = tokens * (core.heads + 2 * core.kv_heads) * core.head_dim * 4
    back = tokens * core.heads * core.head_dim * 4
    sent = rows["all-to-all", "cp"]
    assert sent["count"] == 2 * layers * 4
    assert sent["bytes"] == 2 * layers * 2 * (there + back)
    assert rows["all-reduce", "data"]["bytes"] == rows_of("dp2", SHAPE)["all-reduce", "dp"]["bytes"]


@pytest.mark.parametrize(
    ("text", "axis"), [("dp2.ep2", "expert"), ("cp2", "cp"), ("tp2.etp1.ep2", "expert")]
)
def test_exchanges_take_time(text: str, axis: str) -> None:
    """On links ten times slower the step is longer by what the exchanges take there."""
    layout = dataclasses.replace(Layout.parse(text), microbatches=1)
    slow = dataclasses.replace(MACHINE, measured=measured(rate=2e8))
    fast, late = (
        machine_forecast(step_problem(MIXTURE, layout, WORK), machine)[0]
        for machine in (MACHINE, slow)
    )
    assert late.exposed[axis] > 5 * fast.exposed[axis] > 0
    assert late.step_seconds > fast.step_seconds + 0.5 * (late.exposed[axis] - fast.exposed[axis])


def test_experts_over_ranks_compute_as_much() -> None:
    """Half of the experts for the tokens of two ranks: the matmuls of one rank's own tokens."""
    found = [
        stage_seconds(
            MIXTURE,
            MIXTURE.layers,
            Microbatch(batch=4, sequence=128, layout=Layout(dp=2, ep=ep)),
            rates,
        ).forward
        for rates in [Rates(measured(), "fp32")]
        for ep in (1, 2)
    ]
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_layouts_over_experts_and_sequences_are_considered() -> None:
    plain = {str(one) for one in candidate_layouts(MIXTURE, WORK, 4)}
    every = {str(one) for one in candidate_layouts(MIXTURE, WORK, 4, ("cp", "ep"))}
    assert plain < every
    for text in ("dp2.ep2", "cp2", "dp2.tp2.ep4.etp1", "dp2.cp2.ep4"):
        assert any(one.partition(":")[0] == text for one in every), text
    assert not any("ep" in one for one in map(str, candidate_layouts(SHAPE, WORK, 4, ("cp", "ep"))))
    layouts = [Layout.parse(text) for text in sorted(every)]
    evaluated = evaluate_layouts(MIXTURE, WORK, MACHINE, layouts, shown=len(layouts))
    assert len(evaluated) == len(every)
    # Where a rank cannot hold all experts, those over ranks are what fits.
    least = min((max(one.peak_bytes), one.layout) for one, _ in evaluated)
    assert "ep" in least[1] or "tp" in least[1]
