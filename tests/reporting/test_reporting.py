"""What is printed: the timeline as a picture, the tables."""

from __future__ import annotations

import re

from hocket.reporting import (
    collectives_text,
    curve_text,
    table_text,
    timeline_text,
)
from hocket.reporting.table import text_width
from hocket.schedules import build_schedule
from hocket.simulation import simulate, theoretical_bubble
from hocket.spec.layout import Layout
from hocket.spec.prices import Prices
from hocket.spec.timeline import Event, Timeline


def drawn(text: str) -> list[str]:
    """What stands between the bars."""
    return [m[1] for m in re.finditer(r"\|([^|]*)\|", text)]


def test_the_picture_of_1f1b() -> None:
    schedule = build_schedule(Layout(pp=2), 2)
    timeline = simulate(schedule, Prices.uniform(2, forward=1.0, backward=2.0))
    # 9 seconds in 45 columns: five to a second.
    text = timeline_text(timeline, 58, theoretical=theoretical_bubble(schedule))
    assert text.splitlines()[0] == (
        "predicted timeline: 9 s, bubble 33.3% (the schedule's own: 33.3%)"
    )
    assert drawn(text) == [
        "F0░░░F1░░░··········B0████████·····B1████████",
        "·····F0░░░B0████████F1░░░B1████████··········",
    ]
    assert "67%" in text
    assert "░ forward   █ backward   · idle" in text


def test_ascii_and_colour_carry_the_same() -> None:
    timeline = simulate(build_schedule(Layout(pp=2, schedule="gpipe"), 2))
    plain = timeline_text(timeline, 58, unicode=False)
    assert plain.isascii()
    assert drawn(plain)[0] == "F0---F1---...............B1########B0########"
    colored = timeline_text(timeline, 58, unicode=False, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert colored.count("\x1b[") > 8


def test_what_does_not_fit_is_left_out_but_kinds_stay() -> None:
    many = simulate(build_schedule(Layout(pp=2), 64))
    rows = drawn(timeline_text(many, 60))
    assert all(set(row) <= set("░█·0123456789FB") for row in rows)
    assert "█" in rows[0]
    some = simulate(build_schedule(Layout(pp=2), 12))
    assert "0█" in drawn(timeline_text(some, 60))[0]  # the number alone fits


def test_stages_that_share_a_rank_are_distinguished() -> None:
    text = timeline_text(simulate(build_schedule(Layout(pp=2, virtual_stages=2), 2)), 100)
    assert "0F0" in text
    assert "2B1" in text


def test_communication_has_a_line_of_its_own() -> None:
    events = [
        Event(rank=0, lane="compute", kind="F", name="0F0", start=0, end=5, stage=0, microbatch=0),
        Event(rank=0, lane="communication", kind="SEND_F", name="0SEND_F0", start=5, end=6),
        Event(
            rank=0, lane="communication", kind="all-reduce", name="all-reduce dp", start=6, end=8
        ),
        Event(rank=0, lane="communication", kind="RECV_B", name="0RECV_B0", start=8.5, end=8.51),
        Event(rank=0, lane="compute", kind="optimizer", name="optimizer", start=9, end=10),
    ]
    timeline = Timeline.of("measured", 1, events)
    compute, talk = drawn(timeline_text(timeline, 64))
    assert re.fullmatch(r"F0░+·+o+", compute)
    assert re.fullmatch(r" +>+=+ +< +", talk)
    assert "measured timeline: 10 s, bubble 0.0%" in timeline_text(timeline, 64)


def test_an_empty_timeline() -> None:
    assert "nothing recorded" in timeline_text(Timeline.of("measured", 2, []))


def test_no_line_is_wider_than_asked() -> None:
    timeline = simulate(build_schedule(Layout(pp=4), 8))
    for width in (60, 79, 120):
        rows = [line for line in timeline_text(timeline, width).splitlines() if "|" in line]
        assert max(map(len, rows)) == width


ROW = {"name": "all-reduce", "axis": "dp", "phase": "step", "count": 2, "bytes": 12345678}


def test_collectives_compared_with_theory() -> None:
    text = collectives_text([{**ROW, "expected_count": 2, "expected_bytes": 12345678}])
    assert "12,345,678" in text
    assert text.endswith("every count and every byte as in theory")
    text = collectives_text([{**ROW, "expected_count": 3, "expected_bytes": 12345678}])
    assert "NO" in text
    assert text.endswith("1 of 1 rows differ from theory")


def test_collectives_alone() -> None:
    text = collectives_text([ROW])
    assert "theory" not in text
    assert text.endswith("2 collectives, 12.3 MB")
    assert collectives_text([]) == "no communication"


def test_a_table_aligns_numbers_right() -> None:
    assert table_text(["a", "n"], [["x", 5], ["long", 1234]]).splitlines() == [
        "a         n",
        "----  -----",
        "x         5",
        "long  1,234",
    ]
    assert table_text(["a"], []) == "a\n-"


def test_columns_are_what_a_terminal_draws() -> None:
    spelled_out = "\u1112\u1161\u11ab"
    texts = ["한글", "漢字", spelled_out, "e\u0301", "\uff21", "a\u200db", "\U0001f600", "Ж"]
    assert [text_width(text) for text in texts] == [4, 4, 2, 1, 2, 2, 2, 1]
    assert table_text(["name", "n"], [["한글모델", 1], ["abc", 2]]).splitlines() == [
        "name      n",
        "--------  -",
        "한글모델  1",
        "abc       2",
    ]


def test_a_curve_falls_from_the_top_to_one_eighth() -> None:
    text = curve_text([8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0], width=7, height=2)
    assert text.splitlines() == ["8 |█", "1 |█▇▃▁", "   1  8"]
    assert len(curve_text([float(n) for n in range(1000)], width=80).splitlines()[0]) <= 80


def test_a_curve_without_a_slope_or_a_number_is_no_crash() -> None:
    assert curve_text([]) == curve_text([float("nan")]) == ""
    assert curve_text([2.0], height=1).splitlines() == ["2 |▁", "   1"]
    assert curve_text([1.0, float("inf"), 3.0], height=1).splitlines()[0] == "1 |▁ █"


def test_what_the_demo_prints_fits_into_80_columns() -> None:
    schedule = build_schedule(Layout(pp=2), 4)
    timeline = simulate(schedule, Prices.uniform(2, forward=1.0, backward=2.0))
    assert max(map(len, timeline_text(timeline, 80, theoretical=0.2).splitlines())) <= 80
    row = {"name": "all-reduce", "axis": "model", "phase": "microbatch"}
    sizes = {"count": 288, "expected_count": 288, "bytes": 37748736, "expected_bytes": 37748736}
    assert max(map(len, collectives_text([{**row, **sizes}]).splitlines())) <= 80
