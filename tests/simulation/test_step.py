"""A whole step, simulated: cases whose times can be written down."""

from __future__ import annotations

import pytest

from hocket.schedules.registry import build_schedule
from hocket.simulation.processors import Cores
from hocket.simulation.step import PlayedStep, exposed, simulate_step
from hocket.spec.layout import Layout
from hocket.spec.schedule import Schedule
from hocket.spec.step_prices import Collective, RankStep, StageStep, StepPrices


def collective(name: str, axis: str, give: float, wait: float, take: float) -> Collective:
    return Collective(name=name, axis=axis, bytes=8, give=give, wait=wait, take=take)


def simulated(
    text: str, prices: StepPrices, cores: int | None = None
) -> tuple[Schedule, Layout, PlayedStep]:
    layout = Layout.parse(text)
    schedule = build_schedule(layout, layout.microbatches or 1)
    step = simulate_step(schedule, layout, prices, *([Cores(cores)] if cores else []))
    return schedule, layout, step


def test_one_rank_does_one_thing_after_the_other() -> None:
    prices = StepPrices(
        stages=(StageStep(forward=1.0, input=1.0, weight=1.0, first_weight=-0.5),),
        ranks=(RankStep(before=0.1, norm=0.2, optimizer=0.3, after=0.4),),
    )
    _, _, step = simulated("dp1:microbatches=2", prices)
    # Two microbatches of 3, of which the first gradient is taken as it comes.
    assert step.seconds == pytest.approx(6.0 - 0.5 + 1.0)
    assert [e.kind for e in step.timeline.events] == ["F", "B", "F", "B", "optimizer"]
    assert step.timeline.bubble == pytest.approx(0.0)


def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    stage = StageStep(
        forward=1.0, input=1.0, weight=1.0, message=collective("send", "pp", 0.0, 0.0, 0.0)
    )
    prices = StepPrices(stages=(stage, stage), ranks=(RankStep(), RankStep()))
    for count in (1, 2, 4, 8):
        _, _, step = simulated(f"pp2:microbatches={count},schedule=gpipe", prices)
        assert step.timeline.bubble == pytest.approx(1 / (count + 1))
        assert step.seconds == pytest.approx(3 * (count + 1))


def test_four_ranks_on_two_cores_have_no_idle_core_but_at_the_ends() -> None:
    stage = StageStep(
        forward=1.0, input=1.0, weight=1.0, message=collective("send", "pp", 0.0, 0.0, 0.0)
    )
    prices = StepPrices(stages=(stage,) * 4, ranks=(RankStep(),) * 4)
    _, _, alone = simulated("pp4:microbatches=8", prices)
    _, _, shared = simulated("pp4:microbatches=8", prices, cores=2)
    assert alone.seconds == pytest.approx(3 * 11)
    # 4 stages x 8 microbatches x 3 seconds are 48 on each of two cores, and more at the ends.
    assert 48 < shared.seconds < 52
    # On two cores every rank's spans are longer, so that ranks are idle for less of the step.
    assert shared.timeline.bubble < alone.timeline.bubble


def test_replicas_on_too_few_cores_take_turns() -> None:
    stage = StageStep(forward=1.0, input=1.0, weight=1.0)
    prices = StepPrices(stages=(stage,), ranks=(RankStep(),))
    assert simulated("dp4", prices)[2].seconds == pytest.approx(3.0)
    assert simulated("dp4", prices, cores=2)[2].seconds == pytest.approx(6.0)
    assert simulated("dp4", prices, cores=1)[2].seconds == pytest.approx(12.0)


def test_sums_over_tensor_ranks_stand_inside_of_the_actions() -> None:
    one = collective("all-reduce", "tp", 0.1, 0.2, 0.3)
    prices = StepPrices(
        stages=(
            StageStep(
                forward=1.0,
                input=1.0,
                weight=0.0,
                forward_collectives=(one, one),
                backward_collectives=(one,),
            ),
        ),
        ranks=(RankStep(),),
        loss=collective("all-reduce", "world", 0.0, 0.05, 0.0),
        norm=collective("all-reduce", "model", 0.0, 0.01, 0.0),
    )
    schedule, layout, step = simulated("tp2:microbatches=2", prices)
    assert step.seconds == pytest.approx(2 * (2.0 + 3 * 0.6) + 0.05 + 0.01)
    sums = [e for e in step.timeline.events if e.axis == "tp"]
    assert len(sums) == 2 * 2 * 3
    assert all(e.end - e.start == pytest.approx(0.6) for e in sums)
    found = exposed(schedule, layout, prices)
    assert found == pytest.approx({"model": 0.01, "tp": 2 * 3 * 0.6, "world": 0.05})


def test_a_message_takes_its_time_both_ways() -> None:
    stage = StageStep(
        forward=1.0, input=1.0, weight=1.0, message=collective("send", "pp", 0.1, 0.2, 0.3)
    )
    last = StageStep(forward=1.0, input=1.0, weight=1.0)
    prices = StepPrices(stages=(stage, last), ranks=(RankStep(), RankStep()))
    schedule, layout, step = simulated("pp2:microbatches=1", prices)
    assert step.seconds == pytest.approx(2 * 3.0 + 2 * 0.6)
    # Each rank gives once and takes once.
    assert exposed(schedule, layout, prices) == pytest.approx({"pp": 0.6})


def test_gradients_are_summed_over_replicas_of_every_stage() -> None:
    bucket = collective("all-reduce", "dp", 0.2, 0.0, 0.4)
    stage = StageStep(
        forward=1.0,
        input=1.0,
        weight=1.0,
        message=collective("send", "pp", 0.0, 0.0, 0.0),
        reductions=(bucket, bucket),
    )
    prices = StepPrices(stages=(stage, stage), ranks=(RankStep(), RankStep()))
    _, _, step = simulated("dp2.pp2:microbatches=1", prices)
    assert step.seconds == pytest.approx(6.0 + 2 * 0.6)
    assert step.timeline.num_ranks == 4
    assert sum(e.kind == "all-reduce" for e in step.timeline.events) == 4 * 2


def test_a_rank_that_ends_early_begins_the_next_step() -> None:
    stage = StageStep(
        forward=1.0, input=1.0, weight=1.0, message=collective("send", "pp", 0.0, 0.0, 0.0)
    )
    last = StageStep(forward=1.0, input=1.0, weight=1.0)
    prices = StepPrices(
        stages=(stage, last),
        ranks=(RankStep(), RankStep(optimizer=1.0)),
        loss=collective("all-reduce", "world", 0.0, 0.0, 0.0),
    )
    _, _, step = simulated("pp2:microbatches=1", prices)
    # Rank 0 runs the next forward while rank 1 updates its larger part.
    assert step.timeline.duration == pytest.approx(7.0)
    assert step.seconds == pytest.approx(6.0)


def test_replicas_that_are_unlike_wait_for_the_slowest() -> None:
    from hocket.simulation.step import paces

    assert paces(1, 0.1) == (1.0,)
    assert paces(2, 0.0) == (1.0, 1.0)
    fast, slow = paces(2, 0.1)
    assert fast + slow == pytest.approx(2.0)
    # Of two draws the larger is expected 0.56 standard deviations above the mean.
    assert slow == pytest.approx(1.0564, abs=0.005)
    assert paces(4, 0.1)[-1] > slow
