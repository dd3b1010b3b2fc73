"""A slow rank is named with its cause, by the seconds of all ranks, and no other is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.spec.layout import Layout
from hocket.training import timeline
from hocket.training.slow_ranks import RankSeconds, SlowRanks, diagnose, rank_seconds

USUAL = RankSeconds(step=1.0, compute=0.5, input=0.01, links={"dp": [0.05, 0.05], "tp": [0.01] * 4})


def world(layout: str, changed: dict[int, RankSeconds]) -> tuple[list[RankSeconds], Layout]:
    found = Layout.parse(layout)
    return [changed.get(rank, USUAL) for rank in range(found.world_size)], found


@pytest.mark.parametrize("layout", ["dp2", "dp4", "dp2.tp2", "dp2.pp2:microbatches=2"])
@pytest.mark.parametrize("cause", ["compute", "input"])
def test_the_rank_is_named_with_its_share(layout: str, cause: str) -> None:
    slow = dataclasses.replace(USUAL, **{cause: getattr(USUAL, cause) + 0.25})
    for rank in range(Layout.parse(layout).world_size):
        (found,) = diagnose(*world(layout, {rank: slow}), 1.3)
        assert (found.ranks, found.cause) == ((rank,), cause)
        assert found.share == pytest.approx(0.25)
        assert f"rank {rank} is slow: its {cause}" in str(found)


def test_equal_ranks_and_small_differences_are_not_named() -> None:
    assert diagnose(*world("dp4", {}), 1.3) == []
    assert diagnose(*world("dp4", {1: dataclasses.replace(USUAL, compute=0.6)}), 1.3) == []
    # Five times as long, and a hundredth of the step: nobody would feel it.
    assert diagnose(*world("dp4", {1: dataclasses.replace(USUAL, input=0.02)}), 1.3) == []


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    heavy = dataclasses.replace(USUAL, compute=0.9)
    ranks, layout = world("dp2.pp2:microbatches=2", {})
    ranks = [heavy if layout.coordinate(r)["pp"] else USUAL for r in range(4)]
    assert diagnose(ranks, layout, 1.3) == []


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stage_without_another_rank_is_compared_by_its_work(slow: int) -> None:
    """The second stage has three times the work, for which it may take three times as long."""
    layout = Layout.parse("pp2:microbatches=2")
    stages = [
        dataclasses.replace(USUAL, compute=0.2, work=1e6),
        dataclasses.replace(USUAL, compute=0.6, work=3e6),
    ]
    assert diagnose(stages, layout, 1.3) == []
    stages[slow] = dataclasses.replace(stages[slow], compute=2.5 * stages[slow].compute)
    (found,) = diagnose(stages, layout, 1.3)
    assert (found.ranks, found.cause) == ((slow,), "compute")
    assert found.factor == pytest.approx(2.5)
    late = [USUAL, dataclasses.replace(USUAL, input=0.3)]
    assert [(one.ranks, one.cause) for one in diagnose(late, layout, 1.3)] == [((1,), "input")]


def test_a_slow_link_is_separated_from_a_rank_that_comes_late() -> None:
    """Of dp2.tp2 the groups of dp are (0, 2) and (1, 3). A link is slow for all of its group; where
    one rank is late, the others wait and it does not."""
    slow = dataclasses.replace(USUAL, links={**USUAL.links, "dp": [0.2, 0.2]})
    (found,) = diagnose(*world("dp2.tp2", {1: slow, 3: slow}), 1.3)
    assert (found.ranks, found.cause) == ((1, 3), "link")
    assert found.share == pytest.approx(0.3)
    assert diagnose(*world("dp2.tp2", {1: slow}), 1.3) == []  # it waits for rank 3


def test_a_slow_link_hides_no_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each cause the costliest is reported, once."""
    link = dataclasses.replace(USUAL, links={**USUAL.links, "dp": [0.3, 0.3]})
    slow = dataclasses.replace(USUAL, compute=0.8)
    ranks, layout = world("dp2.tp2", {1: link, 2: slow, 3: link})
    rows = [dataclasses.asdict(rank) for rank in ranks]
    monkeypatch.setattr(timeline, "gather_values", lambda *_: rows)
    recorder = SimpleNamespace(timeline_events=list, waits=list)
    mesh: Any = SimpleNamespace(recorder=recorder, layout=layout)
    context: Any = SimpleNamespace(world_size=4, one_machine=True)
    watch = SlowRanks(context, mesh, 1.3)
    texts = [watch.after(step, 0.0) for step in (50, 100, 150, 200, 250)]
    assert texts[3] is not None
    assert "ranks (1, 3) are slow: the link" in texts[3]
    assert "rank 2 is slow: its compute" in texts[3]
    assert texts == [None, None, None, texts[3], None]


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ("1111", 4),
        ("01111", 5),
        ("110011", 6),  # two steps find nobody
        ("1110111", 5),
        ("111011", 5),
        ("11211", None),
        ("112111", 6),  # one finds the other rank
        ("1122112", None),
        ("010101010101", None),
        ("121212121212", None),  # as with more processes than cores
    ],
)
def test_a_rank_is_named_by_the_steps_that_agree(
    monkeypatch: pytest.MonkeyPatch, slow: str, named: int | None
) -> None:
    """By step 1: rank 1 is slow, 2: rank 0 is, 0: neither."""
    context = SimpleNamespace(world_size=2)
    mesh = SimpleNamespace(
        layout=Layout.parse("dp2"),
        recorder=SimpleNamespace(timeline_events=lambda: [], waits=lambda: ()),
    )
    watch = SlowRanks(context, mesh, 1.3)  # type: ignore[arg-type]
    rows = [
        [dataclasses.asdict(RankSeconds(3.0, 1.0 + (step == who), 0.0)) for who in ("2", "1")]
        for step in slow
    ]
    recorded = iter(rows)
    monkeypatch.setattr("hocket.training.timeline.gather_values", lambda *_: next(recorded))
    texts = [watch.after(50 * step, 0.0) for step in range(1, len(rows) + 1)]
    assert [number for number, text in enumerate(texts, 1) if text] == ([named] if named else [])
    if named:
        assert "rank 1 is slow: its compute takes 2.0 times" in str(texts[named - 1])


def test_compute_is_what_is_not_inside_a_collective() -> None:
    def event(lane: str, start: float, end: float, axis: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(lane=lane, start=start, end=end, axis=axis)

    found = rank_seconds(
        [
            event("compute", 0.0, 1.0), event("communication", 0.2, 0.5, "tp"),
            event("communication", 0.9, 1.4, "dp"), event("compute", 1.6, 1.7),
        ],
        2.0, 0.1,
    )  # fmt: skip
    # 0.7 of the first span, a gap of 0.2 in which nothing was waited for, and the last span.
    assert found.compute == pytest.approx(1.0)
    assert found.links == {"tp": [pytest.approx(0.3)], "dp": [pytest.approx(0.5)]}


def test_waiting_inside_compute_is_not_compute() -> None:
    """Under ZeRO-3 a layer waits for its values, which a slow rank is late to send."""
    forward = SimpleNamespace(lane="compute", start=0.0, end=1.0, axis=None)
    gather = SimpleNamespace(lane="communication", start=0.1, end=0.9, axis="dp")
    assert rank_seconds([forward, gather], 1.0, 0.0).compute == pytest.approx(1.0)
    found = rank_seconds([forward, gather], 1.0, 0.0, waits=[(0.3, 0.9)])
    assert found.compute == pytest.approx(0.4)
