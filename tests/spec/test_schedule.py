"""Actions and schedules: text and back, and the board."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import ScheduleError
from hocket.spec.schedule import (
    KINDS,
    OVERLAP_F_B,
    WITHOUT_MICROBATCH,
    Action,
    Schedule,
    schedule_text,
)

plain = st.builds(
    lambda stage, kind, mb: Action(stage, kind, None if kind in WITHOUT_MICROBATCH else mb),
    st.integers(0, 30),
    st.sampled_from([k for k in KINDS if k != OVERLAP_F_B]),
    st.integers(0, 500),
)
overlap = st.builds(
    lambda s, f, b: Action(s, OVERLAP_F_B, f, (Action(s, "F", f), Action(s, "B", b))),
    st.integers(0, 30),
    st.integers(0, 500),
    st.integers(0, 500),
)
actions = plain | overlap


@given(actions)
def test_an_action_reads_back_equal(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions, min_size=1).map(tuple), min_size=1, max_size=4).map(tuple))
def test_a_schedule_reads_back_equal(ranks: tuple[tuple[Action, ...], ...]) -> None:
    schedule = Schedule(
        name="mine", num_microbatches=3, stage_ranks=tuple(range(len(ranks))), ranks=ranks
    )
    assert Schedule.parse(str(schedule)) == schedule


def test_pytorchs_letters() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("1SEND_B3") == Action(1, "SEND_B", 3)
    assert Action.parse("0REDUCE_GRAD") == Action(0, "REDUCE_GRAD")


@pytest.mark.parametrize(
    ("text", "peer"), [("1SEND_F0", 2), ("1RECV_F0", 0), ("1SEND_B0", 0), ("1RECV_B0", 2)]
)
def test_the_other_end(text: str, peer: int) -> None:
    assert Action.parse(text).peer_stage == peer


@pytest.mark.parametrize(
    "text", ["F0", "2X0", "2F", "2REDUCE_GRAD1", "", "2F0;", "9" * 5000 + "F0"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0\n", "begins with the line"),
        ("# hocket schedule 1\n0F0\n", "lacks name, microbatches, stage ranks"),
        ("# hocket schedule 1\n# nam: x\n0F0\n", "unknown header field 'nam'"),
        ("# hocket schedule 1\n# name: x\n# microbatches: 1\n# stage ranks: 0\n0F0,zz\n", "line 5"),
        ("# hocket schedule 1\n# name: x\n# microbatches: 1\n# stage ranks: 0 1\n0F0\n", "1 ranks"),
        (
            "# hocket schedule 1\n# name: x\n# microbatches: a\n# stage ranks: 0\n0F0\n",
            "bad number",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert says in str(caught.value)


def test_the_board_marks_the_failing_cell() -> None:
    ranks = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0)]]
    drawn = schedule_text(ranks, mark=[(0, 1)]).splitlines()
    assert drawn[1] == "rank 0  0F0 >>0B0<<"
    assert drawn[2] == "rank 1  1F0"
