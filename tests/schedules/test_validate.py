"""A schedule that cannot run is refused, with the board and the failing cell marked."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.schedules import build_schedule, validate_schedule
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.schedule import Action, Schedule


def schedule(*lines: str, m: int = 1, stage_ranks: tuple[int, ...] | None = None) -> Schedule:
    return Schedule(
        name="trial",
        num_microbatches=m,
        stage_ranks=stage_ranks or tuple(range(len(lines))),
        ranks=tuple(tuple(Action.parse(a) for a in line.split()) for line in lines),
    )


GOOD = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def test_the_good_one_passes() -> None:
    validate_schedule(schedule(*GOOD))


@pytest.mark.parametrize(
    ("lines", "m", "says", "cell"),
    [
        # It would hang.
        (
            ("0F0 0RECV_B0 0SEND_F0 0B0", GOOD[1]),
            1,
            "deadlocks; rank 0: 0RECV_B0 waits for 1SEND_B0; rank 1: 1RECV_F0 waits for 0SEND_F0",
            ">>0RECV_B0<<",
        ),
        (("0F0 0SEND_F0 0B0 0RECV_B0", GOOD[1]), 1, "runs before what it needs", ">>0B0<<"),
        ((GOOD[0], "1RECV_F0 1B0 1SEND_B0 1F0"), 1, "1B0 waits for 1F0", ">>1B0<<"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", GOOD[1]), 1, "0SEND_F0 waits for 0F0", ">>0SEND_F0<<"),
        (("0F0 0REDUCE_GRAD 0B0",), 1, "0REDUCE_GRAD waits for 0B0", ">>0REDUCE_GRAD<<"),
        (("0F0 0W0 0I0",), 1, "0W0 waits for 0I0", ">>0W0<<"),
        # It forgets.
        (("0F0",), 1, "rank 0 forgets 0B0", None),
        (("0B0",), 1, "rank 0 forgets 0F0", None),
        (("0F0 0I0",), 1, "rank 0 forgets 0W0", None),
        (("0F0 0RECV_B0 0B0", GOOD[1]), 1, "receives without a matching send", ">>1RECV_F0<<"),
        ((GOOD[0], "1RECV_F0 1F0 1B0"), 1, "receives without a matching send", ">>0RECV_B0<<"),
        ((GOOD[0], "1F0 1B0 1SEND_B0"), 1, "rank 1 forgets 1RECV_F0", None),
        # It repeats.
        (("0F0 0F0 0B0",), 1, "0F0 is done twice, first by rank 0 at step 0", ">>0F0<<"),
        (("0F0 0B0 0W0",), 1, "0W0 repeats a half of 0B0", ">>0W0<<"),
        # It cannot be.
        (("0F0 0B0 0F1 0B1",), 1, "only the microbatches 0 to 0", ">>0F1<<"),
        (("0F0 0B0 1F0",), 1, "only the stages 0 to 0", ">>1F0<<"),
        (("0F0 0SEND_F0 0B0",), 1, "there is no stage 1", ">>0SEND_F0<<"),
        (("0F0 0UNSHARD 0B0",), 1, "gathered within", ">>0UNSHARD<<"),
        (("0F0 0SEND_F0 0RECV_B0 0B0 1F0", GOOD[1]), 1, "rank 1 holds that stage", ">>1F0<<"),
    ],
)
def test_what_cannot_run_is_refused(
    lines: tuple[str, ...], m: int, says: str, cell: str | None
) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate_schedule(schedule(*lines, m=m))
    text = str(caught.value)
    assert says in text
    assert "step    0" in text
    assert "rank 0 " in text
    if cell is None:
        assert ">>" not in text
    else:
        assert cell in text


def test_swapped_receives_would_exchange_data_in_silence() -> None:
    lines = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    with pytest.raises(ScheduleError) as caught:
        validate_schedule(schedule(*lines, m=2))
    assert "1RECV_F1 is received next from rank 0, which sends 0SEND_F0 first" in str(caught.value)
    assert ">>1RECV_F1<<" in str(caught.value)
    assert caught.value.hint == "receive 1RECV_F0 before 1RECV_F1"


def test_a_message_to_oneself_is_refused() -> None:
    line = "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"
    with pytest.raises(ScheduleError, match="is on the same rank"):
        validate_schedule(schedule(line, stage_ranks=(0, 0)))


def test_a_rank_without_a_stage_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 1 holds no stage"):
        validate_schedule(schedule("0F0 0B0", "0F0", stage_ranks=(0,)))


def test_the_reduction_is_asked_for_where_there_are_data_ranks() -> None:
    lines = schedule("0F0 0B0")
    validate_schedule(lines, layout=Layout())
    with pytest.raises(ScheduleError, match="forgets 0REDUCE_GRAD"):
        validate_schedule(lines, layout=Layout(dp=2))


def test_the_layout_and_the_microbatches_must_fit() -> None:
    made = build_schedule(Layout(pp=2), 4)
    with pytest.raises(ScheduleError, match="2 pipeline ranks"):
        validate_schedule(made, layout=Layout(pp=4))
    with pytest.raises(ScheduleError, match="has 2 stages"):
        validate_schedule(made, layout=Layout(pp=2, virtual_stages=2))
    with pytest.raises(ScheduleError, match="for 4 microbatches"):
        validate_schedule(made, num_microbatches=8)


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b"])
def test_dropping_or_repeating_any_action_is_noticed(name: str) -> None:
    made = build_schedule(Layout(pp=3, schedule=name), 2)
    layout = Layout(dp=2, pp=3)
    for rank, line in enumerate(made.ranks):
        for step in range(len(line)):
            for new in (line[:step] + line[step + 1 :], line[: step + 1] + line[step:]):
                ranks = (*made.ranks[:rank], new, *made.ranks[rank + 1 :])
                with pytest.raises(ScheduleError):
                    validate_schedule(dataclasses.replace(made, ranks=ranks), layout=layout)
