"""The search, the forecast, the explanation: what a plan answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.cost.constants import memory_quantiles
from hocket.planning import layouts as planning_layouts
from hocket.planning.explain import explain_layout
from hocket.planning.forecast import LayoutForecast
from hocket.planning.layouts import layout_at, row
from hocket.planning.plan import TrainingPlan, best_layouts, plan_one, smallest_cluster
from hocket.planning.problem import OWN, Problem
from hocket.planning.search import estimate_layouts, search_layouts, simulate_all
from hocket.planning.tools.emit import TOOLS, emit
from hocket.schedules.registry import build_schedule
from hocket.simulation import simulate
from hocket.spec import capabilities
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.prices import Prices

EIGHT = Problem(
    shape=shape("llama-3-8b"), cluster=cluster("2x8xH100-SXM"), seq_len=8192, global_batch=64
)
SEVENTY = Problem(
    shape=shape("llama-3-70b"), cluster=cluster("16x8xH100-SXM"), seq_len=8192, global_batch=512
)
WHOLE = dataclasses.replace(EIGHT, model_type="bloom")
"""As of a type whose sequences cannot be split."""
ROOMY = dataclasses.replace(SEVENTY, cluster=cluster("16x8xH200-SXM"))
"""Where memory does not decide."""


@pytest.fixture(scope="module")
def eight() -> TrainingPlan:
    return best_layouts(EIGHT)


@pytest.fixture(scope="module")
def long() -> TrainingPlan:
    """Of sequences so long that splitting them, which this one's type does not train under, would
    be faster."""
    return best_layouts(dataclasses.replace(WHOLE, seq_len=16384, global_batch=16))


@pytest.fixture(scope="module")
def seventy() -> TrainingPlan:
    return best_layouts(SEVENTY, everything=True)


def one(problem: Problem, text: str) -> LayoutForecast:
    return plan_one(problem, Layout.parse(text)).best


def test_the_best_is_best_and_fits(seventy: TrainingPlan) -> None:
    steps = [found.step_seconds.median for found in seventy.layouts]
    assert len(steps) == 10
    # Equal to four digits is equal: then the layout that asks for less comes first.
    assert all(one <= next * 1.001 for one, next in itertools.pairwise(steps))
    assert all(found.memory_high <= SEVENTY.usable for found in seventy.layouts)
    assert 0 < seventy.num_fitting < seventy.num_legal


def test_the_best_is_a_layout_that_people_use(seventy: TrainingPlan) -> None:
    """Llama 70B on 128 H100: published runs reach 40 to 55% of the dense rate."""
    best = seventy.best
    assert 0.35 < best.mfu.median < 0.6
    assert best.layout.tp <= 8
    assert best.num_gpus == 128


def test_no_layout_of_the_whole_space_is_faster_by_closed_forms() -> None:
    """What is simulated is chosen well: nothing that was left out is priced below the best."""
    problem = dataclasses.replace(EIGHT, seq_len=2048, global_batch=32)
    space = problem.legal(16)
    high = problem.high_memory(space)
    times = np.where(high <= problem.usable, problem.times(space).step, np.inf)
    found = search_layouts(problem)
    assert found.num_legal == len(space)
    assert found.num_fitting == int((high <= problem.usable).sum())
    assert times.min() in found.best.times.step


def test_by_default_only_what_runs_here_is_proposed(
    eight: TrainingPlan, long: TrainingPlan
) -> None:
    assert eight.best.layout.zero
    assert all(found.runs_here for found in (*eight.layouts, *long.layouts))
    best = long.layouts[0].step_seconds.median
    assert long.unsupported_layouts
    for better in long.unsupported_layouts:
        assert not better.runs_here
        assert better.step_seconds.median <= best * 1.0001
        assert all("models do not train under cp" in reason for reason in better.unsupported)


def test_everything_is_ranked_together_and_marked(seventy: TrainingPlan) -> None:
    whole = dataclasses.replace(SEVENTY, model_type=WHOLE.model_type)
    marks = [found.runs_here for found in best_layouts(whole, everything=True, top=400).layouts]
    assert True in marks
    assert False in marks
    assert seventy.unsupported_layouts == ()


@pytest.mark.parametrize(
    "text",
    [
        "dp4.pp4:schedule=zero-bubble,microbatches=16",
        "dp4.pp4:microbatches=8",
        "dp2.pp4.tp2:schedule=interleaved,microbatches=8,virtual_stages=4",
    ],
)
def test_the_pipeline_is_the_simulators(text: str) -> None:
    """The very timeline of `simulate`, from prices put together by hand."""
    layout = Layout.parse(text)
    priced = simulate_all(EIGHT, estimate_layouts(EIGHT, row(layout, EIGHT.shape, 8192, 64)))
    times = priced.times
    cut = EIGHT.cut(layout)
    per = len(EIGHT.shape.layers) / layout.pp
    last = layout.num_stages - 1

    def stage(each: float, s: int, share: float) -> float:
        ends = (s == 0) * times.embedding[0] + (s == last) * times.head[0]
        return float(each / per * cut[s] + share * ends)

    stages = range(layout.num_stages)
    kinds = {
        "F": tuple(stage(times.forward[0], s, 1 / 3) for s in stages),
        "I": tuple(stage(times.inputs[0], s, 1 / 3) for s in stages),
        "W": tuple(stage(times.weights[0], s, 1 / 3) for s in stages),
        "SEND_F": (float(times.exchange[0]),) * layout.num_stages,
        "SEND_B": (float(times.exchange[0]),) * layout.num_stages,
    }
    assert layout.microbatches is not None
    timeline = simulate(build_schedule(layout, layout.microbatches), Prices(seconds=kinds))
    assert priced.simulated[0]
    assert priced.pipeline[0] == pytest.approx(timeline.duration, rel=1e-9)
    best = one(EIGHT, text)
    assert best.step_seconds.median == pytest.approx(
        times.step[0] - times.pipeline[0] + timeline.duration
    )
    assert best.bubble == pytest.approx(timeline.bubble, abs=0.02)


@pytest.mark.parametrize(
    ("text", "count", "within"),
    [
        ("pp4.tp4:microbatches={m}", 64, 1e-4),
        ("pp4.tp4:schedule=zero-bubble,microbatches={m}", 63, 1e-4),
        ("pp4.tp4:schedule=interleaved,microbatches={m},virtual_stages=2", 64, 2e-3),
        ("pp8.tp2:schedule=interleaved,microbatches={m},virtual_stages=2", 64, 0.015),
        ("pp8.tp2:schedule=interleaved,microbatches={m},virtual_stages=2", 63, 0.015),
        ("pp4.tp4:schedule=zb-v,microbatches={m},virtual_stages=2", 64, 5e-3),
    ],
)
def test_a_long_schedule_is_as_long_as_if_it_were_played_whole(
    text: str, count: int, within: float
) -> None:
    problem = dataclasses.replace(EIGHT, global_batch=count)
    long = row(Layout.parse(text.format(m=count)), problem.shape, 8192, count)
    times = estimate_layouts(problem, long).times
    whole = layout_at(long, 0)
    found = problem.pipelines([whole], times)[0]
    from hocket.planning import problem as module

    before, module.SHORT = module.SHORT, 1000  # so long that all of it is simulated
    try:
        expected = problem.pipelines([whole], times)[0]
    finally:
        module.SHORT = before
    assert found == pytest.approx(expected, rel=within)


def test_parts_add_up_to_the_step(seventy: TrainingPlan, eight: TrainingPlan) -> None:
    for found in (*seventy.layouts, *eight.layouts, *eight.unsupported_layouts):
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds.median)
        assert sum(found.memory_by_kind.values()) == pytest.approx(found.memory, rel=1e-6)
        assert 0 <= found.bubble < 1
        assert 0 <= found.exposed < 1


def test_json_keys_are_snake_case_and_still_add_up(eight: TrainingPlan) -> None:
    def keys(value: object) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(key for item in value.values() for key in keys(item))]
        return [k for item in value for k in keys(item)] if isinstance(value, list) else []

    printed = json.loads(json.dumps(eight.to_json()))
    assert [key for key in keys(printed) if not re.fullmatch("[a-z][a-z0-9_]*", key)] == []
    first = printed["layouts"][0]
    assert sum(first["memory_by_kind"].values()) == pytest.approx(first["memory"], rel=1e-6)
    assert sum(first["parts"].values()) == pytest.approx(first["step_seconds"]["median"])


def test_ranges_are_ranges(eight: TrainingPlan) -> None:
    best = eight.best
    cost = best.dollars_per_billion_tokens
    assert cost is not None
    for values in (best.step_seconds, best.tokens_per_second_per_gpu, best.mfu, cost):
        assert values.low < values.median < values.high
    assert best.memory < best.memory_high


def test_money_and_speed_are_the_same_story(eight: TrainingPlan) -> None:
    best = eight.best
    price_per_hour = EIGHT.cluster.node.gpu.price
    assert price_per_hour is not None
    assert best.dollars_per_billion_tokens is not None
    seconds = 1e9 / (best.tokens_per_second_per_gpu.median * best.num_gpus)
    dollars = seconds / 3600 * price_per_hour * best.num_gpus
    assert best.dollars_per_billion_tokens.median == pytest.approx(dollars)


def test_utilisation_counts_six_operations_a_parameter_and_token() -> None:
    short = dataclasses.replace(EIGHT, seq_len=128)
    parameters = short.shape.num_parameters - 128256 * 4096  # a lookup computes nothing
    assert short.flops == pytest.approx(6 * parameters * short.tokens, rel=0.02)


def test_objectives_differ_as_they_say() -> None:
    problem = dataclasses.replace(EIGHT, seq_len=512, global_batch=16)
    fast, cheap, small = (
        best_layouts(problem, objective=name, everything=True).best
        for name in ("time", "tokens-per-dollar", "memory")
    )
    assert fast.step_seconds.median <= min(cheap.step_seconds.median, small.step_seconds.median)
    assert small.memory_high <= min(cheap.memory_high, fast.memory_high)
    costs = [found.dollars_per_billion_tokens for found in (fast, cheap, small)]
    assert all(cost is not None for cost in costs)
    assert min(costs, key=lambda cost: cost.median) == cheap.dollars_per_billion_tokens  # type: ignore[union-attr]
    assert cheap.num_gpus < fast.num_gpus


def test_what_differs_in_nothing_but_names_is_shown_once(seventy: TrainingPlan) -> None:
    seen = set()
    for found in seventy.layouts:
        same = dataclasses.replace(found.layout, dp=found.layout.dp * found.layout.cp, cp=1)
        key = str(same), f"{found.step_seconds.median:.4g}", f"{found.memory_high:.4g}"
        assert key not in seen
        seen.add(key)


def test_a_pinned_axis_keeps_its_value() -> None:
    found = best_layouts(SEVENTY, pins={"tp": 4, "recompute": "full"}, everything=True)
    assert {(f.layout.tp, f.layout.recompute) for f in found.layouts} == {(4, "full")}


def test_what_does_not_fit_is_said_with_what_is_missing_and_what_would_fit() -> None:
    problem = dataclasses.replace(SEVENTY, cluster=cluster("1x8xH100-SXM"))
    with pytest.raises(LayoutError, match="does not fit 1x8xH100-SXM-80") as caught:
        best_layouts(problem)
    assert "are missing" in caught.value.message
    assert "optimizer" in caught.value.message
    hint = caught.value.hint or ""
    assert "is the smallest that fits" in hint
    larger = dataclasses.replace(SEVENTY, cluster=cluster(hint.split()[1]))
    assert best_layouts(larger, everything=True).num_fitting > 0


def test_the_smallest_cluster_fits_and_one_node_less_does_not() -> None:
    found = smallest_cluster(SEVENTY)
    assert found is not None
    best_layouts(dataclasses.replace(SEVENTY, cluster=found))
    assert found.num_nodes > 1
    less = dataclasses.replace(found, num_nodes=found.num_nodes - 1)
    with pytest.raises(LayoutError, match="does not fit"):
        best_layouts(dataclasses.replace(SEVENTY, cluster=less))


def test_a_part_of_a_node_grows_to_the_node_before_there_are_more() -> None:
    one = dataclasses.replace(EIGHT, cluster=cluster("1xH100"), global_batch=8)
    found = smallest_cluster(one)
    assert found is not None
    assert found.num_nodes == 1
    assert 1 < found.num_gpus <= 8
    assert cluster(found.name) == found
    more = smallest_cluster(dataclasses.replace(one, shape=shape("llama-3-70b")))
    assert more is not None
    assert more.node.num_gpus == 8
    assert more.num_nodes > 1
    elsewhere = dataclasses.replace(one, cluster=cluster("1x2xH100@aws-p5"))
    grown = smallest_cluster(dataclasses.replace(elsewhere, shape=shape("llama-3-70b")))
    assert grown is not None
    assert cluster(grown.name) == grown


def test_fewer_of_the_others_are_simulated_next_to_what_runs_here() -> None:
    found = search_layouts(WHOLE, extra=5)
    assert (~found.best.here).sum() == 5
    assert found.best.here.sum() > 5
    whole = search_layouts(WHOLE)
    assert (~whole.best.here).sum() > 5
    first = int(np.flatnonzero(whole.best.here)[0])
    again = int(np.flatnonzero(found.best.here)[0])
    assert whole.best.seconds[first] == found.best.seconds[again]


def test_a_batch_that_leaves_gpus_idle_is_noted() -> None:
    tiny = Problem(
        shape=shape("tiny-llama"), cluster=cluster("7xA100-80"), seq_len=64, global_batch=4
    )
    found = best_layouts(tiny)
    assert found.best.num_gpus < 7
    assert "uses all 7 GPUs" in found.notes[0]


def test_one_layout_is_estimated_whether_it_fits_or_not() -> None:
    found = plan_one(EIGHT, Layout.parse("dp16"))
    assert not found.best.fits
    assert "does not fit" in found.notes[0]
    assert one(EIGHT, "dp2.pp2.tp4:microbatches=32").fits


def test_a_layouts_own_cut_is_estimated_and_kept() -> None:
    balanced = one(EIGHT, "pp4.tp4:microbatches=64")
    worse = one(EIGHT, "pp4.tp4:microbatches=64,pipeline_split=14-6-6-6")
    assert worse.layout.pipeline_split == (14, 6, 6, 6)
    assert worse.step_seconds.median > 1.3 * balanced.step_seconds.median
    assert worse.memory > balanced.memory
    with pytest.raises(LayoutError, match="places 33 layers, the model has 32"):
        one(EIGHT, "pp4.tp4:pipeline_split=9-8-8-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp2.tp8:recompute=full,recompute_layers=2", "full recomputation, or none"),
    ],
)
def test_a_layout_without_a_price(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        one(EIGHT, text)


def test_full_recompute_saves_nothing_where_weights_gradients_wait() -> None:
    """What is made again for the first half of backward is held until the second."""
    kept = one(EIGHT, "pp2.tp8:schedule=zero-bubble,microbatches=8")
    again = one(EIGHT, "pp2.tp8:schedule=zero-bubble,microbatches=8,recompute=full")
    assert again.memory >= kept.memory
    assert again.step_seconds.median > kept.step_seconds.median
    at_once = one(EIGHT, "pp2.tp8:microbatches=8,recompute=full")
    assert at_once.memory < kept.memory


def test_threads_are_estimated_as_processes_and_say_so() -> None:
    found = plan_one(EIGHT, Layout.parse("dp8:data_parallel=threads"))
    assert found.best.layout.data_parallel == "threads"
    assert found.best.step_seconds == one(EIGHT, "dp8").step_seconds
    assert "estimated as processes" in " ".join(found.notes)


@pytest.mark.parametrize("microbatches", [1, 3, 7, 21])
def test_one_gpu_waits_for_nobody(microbatches: int) -> None:
    alone = dataclasses.replace(
        EIGHT, shape=shape("tiny-llama"), cluster=cluster("1xH100"), seq_len=2, global_batch=21
    )
    found = one(alone, f"dp1:microbatches={microbatches}")
    assert 0 <= found.exposed < 1e-9
    assert min(found.parts.values()) >= 0.0


def test_a_gpu_without_a_price_is_ranked_by_its_hours() -> None:
    small = dataclasses.replace(EIGHT, shape=shape("gpt2"), seq_len=512)
    cards = dataclasses.replace(small, cluster=cluster("4xMI300X"))
    found = best_layouts(cards, objective="tokens-per-dollar", top=1)
    assert "No price was read for MI300X-192" in " ".join(found.notes)
    assert "No price" not in " ".join(best_layouts(cards, top=1).notes)


def test_constants_from_another_gpu_are_noted() -> None:
    small = dataclasses.replace(EIGHT, shape=shape("gpt2"), seq_len=512)
    cards = dataclasses.replace(small, cluster=cluster("4xRTX4090"))
    assert "with the constants of A100" in " ".join(best_layouts(cards, top=1).notes)
    assert best_layouts(small, top=1).notes == ()


def test_memory_must_fit_at_the_95th_percentile_of_the_validation() -> None:
    found = one(EIGHT, "dp8.tp2:zero=1")
    assert found.memory_high == pytest.approx(found.memory * memory_quantiles()[1], rel=1e-6)


def test_eight_bits_are_not_twice_as_fast() -> None:
    """Only products run in 8 bits, and they reach another share of the higher rate."""
    eight = dataclasses.replace(EIGHT, precision="fp8")
    ratio = (
        one(EIGHT, "dp16:zero=1").step_seconds.median
        / one(eight, "dp16:zero=1").step_seconds.median
    )
    assert eight.constants.flash_rate < EIGHT.constants.flash_rate
    assert 1.0 < ratio < 1.8


def test_a_layout_of_more_gpus_than_there_are() -> None:
    with pytest.raises(LayoutError, match="needs 32 GPUs; 2x8xH100-SXM-80 has 16"):
        plan_one(EIGHT, Layout.parse("dp32"))


def test_an_unknown_objective() -> None:
    with pytest.raises(OptionError, match="unknown objective 'speed'"):
        best_layouts(EIGHT, objective="speed")


def test_a_gpu_without_the_precision() -> None:
    with pytest.raises(OptionError, match="A100-SXM-80 has no matmuls in fp8"):
        dataclasses.replace(EIGHT, cluster=cluster("8xA100-80"), precision="fp8")


def test_a_plan_is_json(long: TrainingPlan) -> None:
    data = json.loads(json.dumps(long.to_json()))
    assert Layout.parse(data["layouts"][0]["layout"]) == long.best.layout
    assert data["layouts"][0]["runs_here"] is True
    assert data["unsupported_layouts"][0]["runs_here"] is False


# --- why ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def why() -> list[str]:
    return list(explain_layout(ROOMY, best_layouts(ROOMY).best, here=True))


def test_a_wider_tp_leaves_the_domain(why: list[str]) -> None:
    pins = {"pp": 8, "cp": 1, "recompute": "none", "schedule": "1f1b"}
    told = explain_layout(
        ROOMY, best_layouts(ROOMY, pins={"tp": 8, **pins}).best, pins=pins, here=True
    )
    (sentence,) = [s for s in told if s.startswith("tp16") and "leaves the NVLink domain" in s]
    slower = float(sentence.split(": +")[1].split("%")[0])
    assert slower > 10


def test_what_would_change_the_answer_is_estimated(why: list[str]) -> None:
    (sentence,) = [s for s in why if "PCIe instead of NVLink" in s]
    assert float(sentence.split("at +")[1].split("%")[0]) > 15
    assert any("memory" in s for s in why if s.startswith("With "))


def test_the_winner_comes_first(why: list[str]) -> None:
    best = best_layouts(ROOMY).best
    assert why[0].startswith(f"{best.layout} takes")
    assert "at the 95th percentile" in why[1]


def test_every_loser_loses(why: list[str]) -> None:
    for sentence in why[2:]:
        if "step time" in sentence:
            assert ": -" not in sentence, sentence


def test_what_runs_elsewhere_names_the_software_that_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layout that this hocket does not run (here: any over cp) comes with the tools that write
    its flags, and only those."""
    row = capabilities.Capability(field="cp", runs=(1,), instead="has no context parallelism")
    for module in (capabilities, planning_layouts):
        monkeypatch.setattr(module, "TABLE", (row, *capabilities.TABLE))
    problem = Problem(
        shape=shape("llama-3-8b"), cluster=cluster("4x8xH100-SXM"),
        seq_len=131072, global_batch=8,
    )  # fmt: skip
    found = best_layouts(problem, top=3)
    assert found.unsupported_layouts
    for one in found.unsupported_layouts:
        assert one.layout.cp > 1
        assert one.tools
        for name in TOOLS:
            if name in one.tools:
                assert emit(name, problem, one)
            else:
                with pytest.raises(LayoutError):
                    emit(name, problem, one)
    assert all(not one.tools for one in found.layouts)


def test_models_that_an_axis_cannot_split_are_not_proposed_under_it() -> None:
    """By the families that were checked: cp and ep of a type without them are other software's."""
    from hocket.catalogue.families import families

    without = next(
        name for name, one in families().items() if one.trains and "cp" not in one.trains
    )
    problem = Problem(
        shape=shape("llama-3-8b"), cluster=cluster("8xH100-SXM"), seq_len=131072, global_batch=8
    )
    assert any(one.layout.cp > 1 for one in best_layouts(problem, top=5).layouts)
    other = dataclasses.replace(problem, model_type=without)
    found = best_layouts(other, top=5)
    assert found.layouts
    assert all(one.layout.cp == 1 for one in found.layouts)
    for one in found.unsupported_layouts:
        assert one.layout.cp > 1
        assert any(f"{without} models do not train under cp" in text for text in one.unsupported)


def test_sequence_parallelism_is_proposed_to_the_types_that_train_under_it() -> None:
    """To others it is what other software may do."""
    pins = {"tp": 8, "microbatch": 1, "recompute": "none", "offload": "none"}
    problem = Problem(
        shape=shape("llama-3-70b"), cluster=cluster("8x8xH100-SXM"), seq_len=8192, global_batch=64
    )
    best = best_layouts(problem, pins=pins, top=1).best
    assert best.runs_here
    assert best.layout.sequence_parallel
    other = dataclasses.replace(problem, model_type="deepseek_v3")
    found = best_layouts(other, pins=pins, top=5)
    assert all(one.runs_here and not one.layout.sequence_parallel for one in found.layouts)
    assert found.unsupported_layouts
    for one in found.unsupported_layouts:
        assert any(
            "sequence_parallel is true: deepseek_v3 models do not train under" in text
            for text in one.unsupported
        )
    rows = other.legal(64, pins=pins, here=True)
    assert len(rows)
    assert not rows.sequence_parallel.any()
    assert problem.legal(64, pins=pins, here=True).sequence_parallel.any()


def test_uneven_experts_cost_time_and_memory_where_they_lie_over_ranks() -> None:
    even, uneven = (
        Problem(
            shape=shape("mixtral-8x7b"), cluster=cluster("8xH200-SXM"), seq_len=4096,
            global_batch=64, expert_imbalance=value,
        )
        for value in (1.0, 1.5)
    )  # fmt: skip
    for text, changes in (("dp8.ep8:zero=1,microbatches=8", True), ("tp8:microbatches=8", False)):
        one, other = (
            plan_one(problem, Layout.parse(text)).layouts[0] for problem in (even, uneven)
        )
        assert (other.step_seconds.median > 1.05 * one.step_seconds.median) == changes
        assert (other.memory > 1.01 * one.memory) == changes
        if changes:  # no more than half as much again, of everything
            assert other.step_seconds.median < 1.5 * one.step_seconds.median
    with pytest.raises(OptionError, match=r"expert_imbalance is 0\.5"):
        dataclasses.replace(even, expert_imbalance=0.5)


def test_fp8_is_planned_where_train_runs_it() -> None:
    asked = Problem(
        shape=shape("llama-3-8b"), cluster=cluster("8xH100"), seq_len=4096, global_batch=64,
        precision="fp8", stack=OWN,
    )  # fmt: skip
    found = best_layouts(asked, top=4)
    assert all(one.runs_here for one in found.layouts)
    # torchao computes both halves of a backward at once.
    assert {one.layout.schedule for one in found.layouts} <= {"1f1b", "interleaved"}
    halved = found.unsupported_layouts[0]
    assert halved.layout.schedule in ("zero-bubble", "zb-v")
    assert "defers weight gradients" in halved.unsupported[0]
