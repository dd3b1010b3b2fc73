"""Named schedules against tables shaped like their pictures, and the passes that lower them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedules import (
    NAMES,
    build_schedule,
    load_schedule,
    relower,
    validate_schedule,
)
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.schedule import COMPUTE, RECEIVES, SENDS, Action, Schedule


def compute(schedule: Schedule) -> list[list[str]]:
    """The compute actions alone, per rank."""
    return [[str(a) for a in line if a.kind in COMPUTE] for line in schedule.ranks]


def picture(drawn: str) -> list[list[str]]:
    """Rows of a drawing; two dots are a rest."""
    rows = [line.split() for line in drawn.strip().splitlines()]
    return [[cell for cell in row if cell != ".."] for row in rows]


PICTURES = {
    ("pp2:schedule=sequential", 2): """
        0F0 ..  ..  0B0 0F1 ..  ..  0B1
        ..  1F0 1B0 ..  ..  1F1 1B1 ..
    """,
    ("pp4:schedule=sequential", 1): """
        0F0 ..  ..  ..  ..  ..  ..  0B0
        ..  1F0 ..  ..  ..  ..  1B0 ..
        ..  ..  2F0 ..  ..  2B0 ..  ..
        ..  ..  ..  3F0 3B0 ..  ..  ..
    """,
    ("pp4:schedule=gpipe", 4): """
        0F0 0F1 0F2 0F3 ..  ..  ..  ..  ..  ..  0B3 0B2 0B1 0B0
        ..  1F0 1F1 1F2 1F3 ..  ..  ..  ..  1B3 1B2 1B1 1B0 ..
        ..  ..  2F0 2F1 2F2 2F3 ..  ..  2B3 2B2 2B1 2B0 ..  ..
        ..  ..  ..  3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 ..  ..  ..
    """,
    ("pp2:schedule=gpipe,virtual_stages=2", 2): """
        0F0 0F1 2F0 2F1 ..  ..  2B1 2B0 ..  0B1 0B0
        ..  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 ..  ..
    """,
    ("pp4", 4): """
        0F0 0F1 0F2 0F3 ..  ..  ..  0B0 ..  0B1 ..  0B2 ..  0B3
        ..  1F0 1F1 1F2 ..  ..  1B0 1F3 1B1 ..  1B2 ..  1B3 ..
        ..  ..  2F0 2F1 ..  2B0 2F2 2B1 2F3 2B2 ..  2B3 ..  ..
        ..  ..  ..  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 ..  ..  ..
    """,
    ("pp4", 2): """
        0F0 0F1 ..  ..  ..  ..  ..  0B0 ..  0B1
        ..  1F0 1F1 ..  ..  ..  1B0 ..  1B1 ..
        ..  ..  2F0 2F1 ..  2B0 ..  2B1 ..  ..
        ..  ..  ..  3F0 3B0 3F1 3B1 ..  ..  ..
    """,
    ("pp2:virtual_stages=2", 2): """
        0F0 0F1 2F0 2F1 ..  2B0 2B1 ..  0B0 0B1
        ..  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ..
    """,
    ("pp2:schedule=zero-bubble", 4): """
        0F0 0F1 ..  0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        ..  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """,
    ("pp3:schedule=zero-bubble", 3): """
        0F0 0F1 0F2 ..  ..  0I0 0W0 0I1 0W1 0I2 0W2
        ..  1F0 1F1 ..  1I0 1F2 1I1 1W0 1I2 1W1 1W2
        ..  ..  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2
    """,
    ("pp2:schedule=zb-v,virtual_stages=2", 3): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """,
    ("pp2:schedule=zb-v,virtual_stages=2", 1): """
        0F0 ..  ..  3F0 3I0 3W0 ..  0I0 0W0
        ..  1F0 2F0 ..  ..  2I0 2W0 1I0 1W0
    """,
    ("dp2", 3): "0F0 0B0 0F1 0B1 0F2 0B2",
}


@pytest.mark.parametrize(("layout", "m"), PICTURES)
def test_the_picture(layout: str, m: int) -> None:
    assert compute(build_schedule(Layout.parse(layout), m)) == picture(PICTURES[layout, m])


def test_lowered_1f1b_posts_receives_early_and_reduces_last() -> None:
    lines = [",".join(map(str, line)) for line in build_schedule(Layout(pp=2), 2).ranks]
    assert lines == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ]


def test_stages_that_share_a_rank_send_nothing() -> None:
    schedule = build_schedule(Layout(virtual_stages=3, schedule="gpipe"), 2)
    assert not any(a.kind in (*SENDS, *RECEIVES) for _, a in schedule)
    assert compute(schedule) == picture("0F0 0F1 1F0 1F1 2F0 2F1 2B1 2B0 1B1 1B0 0B1 0B0")


def test_1f1b_holds_few_activations_where_gpipe_holds_all() -> None:
    def held(schedule: Schedule, rank: int) -> int:
        now = most = 0
        for action in schedule.ranks[rank]:
            now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, now)
        return most

    pipeline, flush = (
        build_schedule(Layout(pp=4), 8),
        build_schedule(Layout(pp=4, schedule="gpipe"), 8),
    )
    assert [held(pipeline, r) for r in range(4)] == [4, 3, 2, 1]
    assert [held(flush, r) for r in range(4)] == [8, 8, 8, 8]
    # Zero bubble: nowhere more than 1F1B's first rank.
    halved = build_schedule(Layout(pp=4, schedule="zero-bubble"), 8)
    assert [held(halved, r) for r in range(4)] == [4, 4, 4, 4]
    # ZB-V: two stages a rank, each half as large.
    bent = build_schedule(Layout(pp=4, virtual_stages=2, schedule="zb-v"), 8)
    assert [held(bent, r) for r in range(4)] == [8, 8, 8, 8]
    assert bent.stage_ranks == (0, 1, 2, 3, 3, 2, 1, 0)


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(["sequential", "gpipe", "zero-bubble", "zb-v"]),
)
@settings(max_examples=40, deadline=None)
def test_every_built_schedule_is_sound_and_reads_back(pp: int, v: int, m: int, name: str) -> None:
    v = {"zero-bubble": 1, "zb-v": 2}.get(name, v)
    schedule = build_schedule(Layout(pp=pp, virtual_stages=v, schedule=name), m)
    validate_schedule(schedule, layout=Layout(dp=2, pp=pp, virtual_stages=v), num_microbatches=m)
    assert Schedule.parse(str(schedule)) == schedule


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_1f1b_with_any_number_of_stages_is_sound(pp: int, v: int, laps: int, rest: int) -> None:
    m = laps * pp if v > 1 else laps * pp + rest
    schedule = build_schedule(Layout(pp=pp, virtual_stages=v), m)
    assert len(schedule.stage_ranks) == pp * v
    assert Schedule.parse(str(schedule)) == schedule


def test_the_interleaved_schedule_says_which_counts_fit() -> None:
    with pytest.raises(ScheduleError, match="5 microbatches do not divide into 2") as caught:
        build_schedule(Layout(pp=2, virtual_stages=2), 5)
    assert caught.value.hint is not None
    assert "4" in caught.value.hint
    assert "6" in caught.value.hint
    with pytest.raises(ScheduleError, match="virtual_stages is 1"):
        build_schedule(Layout(pp=2, schedule="interleaved"), 4)
    with pytest.raises(ScheduleError, match="one stage on a rank"):
        build_schedule(Layout(pp=2, virtual_stages=2, schedule="zero-bubble"), 4)
    with pytest.raises(ScheduleError, match="two stages on a rank; virtual_stages is 3"):
        build_schedule(Layout(pp=2, virtual_stages=3, schedule="zb-v"), 4)


def test_an_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule 'gpip'") as caught:
        build_schedule(Layout(pp=2, schedule="gpip"), 4)
    assert caught.value.hint == "did you mean 'gpipe'?"
    assert set(NAMES) == {"sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"}


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        build_schedule(Layout(pp=2), 0)


# --- files ------------------------------------------------------------------------------------


def test_a_saved_schedule_loads_equal_and_by_its_path(tmp_path) -> None:
    file = tmp_path / "mine.txt"
    schedule = build_schedule(Layout(pp=3), 5)
    file.write_text(str(schedule))
    assert load_schedule(file) == schedule
    assert build_schedule(Layout(pp=3, schedule=str(file)), 5) == schedule


def test_a_schedule_written_by_hand_is_lowered(tmp_path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(
        "# hocket schedule 1\n# name: mine\n# microbatches: 2\n# stage ranks: 0 1\n"
        "0F0, 0F1, 0B1, 0B0\n1F0, 1F1, 1B1, 1I0, 1W0\n"
    )
    lines = [",".join(map(str, line)) for line in load_schedule(file).ranks]
    assert lines == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0RECV_B0,0B1,0B0,0REDUCE_GRAD",
        "1RECV_F0,1RECV_F1,1F0,1F1,1B1,1SEND_B1,1I0,1SEND_B0,1W0,1REDUCE_GRAD",
    ]


def test_both_halves_of_an_overlap_are_served(tmp_path) -> None:
    file = tmp_path / "overlap.txt"
    file.write_text(
        "# hocket schedule 1\n# name: overlap\n# microbatches: 2\n# stage ranks: 0 1\n"
        "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    )
    line = ",".join(map(str, load_schedule(file).ranks[1]))
    assert line == ("1RECV_F0,1RECV_F1,1F0,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD")


@pytest.mark.parametrize(
    ("layout", "m", "says"),
    [("pp2", 5, "3 pipeline ranks"), ("pp3", 4, "for 5 microbatches")],
)
def test_a_file_that_does_not_fit_the_layout(tmp_path, layout: str, m: int, says: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(build_schedule(Layout(pp=3), 5)))
    with pytest.raises(ScheduleError, match=says):
        build_schedule(Layout.parse(layout, schedule=str(file)), m)


def test_an_unreadable_file_says_so(tmp_path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_schedule(tmp_path / "absent.txt")
    (tmp_path / "bad.txt").write_text("0F0\n")
    with pytest.raises(ScheduleError, match=r"bad\.txt: a schedule file begins"):
        load_schedule(tmp_path / "bad.txt")


def test_messages_that_a_file_orders_for_buffered_sends_are_refused_and_ordered_again(
    tmp_path,
) -> None:
    # 1F1B as it was lowered where a send does not wait: rank 0 sends F1 while rank 1 sends B0.
    file = tmp_path / "old.txt"
    file.write_text(
        "# hocket schedule 1\n# name: 1f1b\n# microbatches: 2\n# stage ranks: 0 1\n"
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )
    with pytest.raises(ScheduleError) as caught:
        load_schedule(file)
    text = str(caught.value)
    assert "rank 0: 0SEND_F1 waits for 1RECV_F1; rank 1: 1SEND_B0 waits for 0RECV_B0" in text
    assert ">>0SEND_F1<<" in text
    assert ">>1SEND_B0<<" in text
    assert caught.value.hint is not None
    assert "remove every SEND_F, RECV_F, SEND_B and RECV_B" in caught.value.hint
    # What the hint says, and what resuming a run of an earlier version does.
    file.write_text(re.sub(r"\d(SEND|RECV)_[FB]\d,", "", file.read_text()))
    expected = build_schedule(Layout(pp=2), 2)
    assert load_schedule(file) == expected
    assert relower(load_schedule(file)) == expected


def test_the_order_of_a_pair_is_kept_where_natural_order_would_differ() -> None:
    # Rank 0 sends the activation of stage 0 before the gradient of stage 2; rank 1 wants them
    # the other way round, so the activation must be received early.
    ranks = (
        [
            Action(0, "F", 0),
            Action(2, "F", 0),
            Action(0, "F", 1),
            Action(2, "B", 0),
            Action(0, "B", 0),
            Action(2, "F", 1),
            Action(2, "B", 1),
            Action(0, "B", 1),
        ],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    )
    from hocket.schedules import lower

    schedule = lower(
        Schedule(
            name="hand",
            num_microbatches=2,
            stage_ranks=(0, 1, 0),
            ranks=tuple(map(tuple, ranks)),
        )
    )
    validate_schedule(schedule)
    second = [str(a) for a in schedule.ranks[1]]
    assert second.index("1RECV_F1") < second.index("1RECV_B0") < second.index("1B0")
