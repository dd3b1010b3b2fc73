"""Saves by time and stopping: every rank does the same after the same step, however far apart the
ranks' hosts are; and how a time is written."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import OptionError
from hocket.spec.units import parse_duration
from hocket.training.pauses import NOTHING, SAVE, SETTLED, STOP, Pauses

pytestmark = pytest.mark.train


class Store(dict[str, str]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def ranks(count: int, *, cuda: bool, seconds: float | None) -> list[Pauses]:
    store = Store()
    return [
        Pauses(
            SimpleNamespace(  # type: ignore[arg-type]
                rank=rank, world_size=count, stop_asked=threading.Event(), store=lambda: store
            ),
            0, seconds, cuda=cuda,
        )
        for rank in range(count)
    ]  # fmt: skip


@given(
    count=st.integers(2, 4),
    step_seconds=st.sampled_from([0.02, 0.05, 0.1, 1.0]),
    asked=st.tuples(st.integers(0, 3), st.integers(0, 40)),
    saves=st.sets(st.integers(0, 60)),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("cuda", [False, True])
def test_every_rank_pauses_after_the_same_step(
    cuda: bool,
    count: int,
    step_seconds: float,
    asked: tuple[int, int],
    saves: set[int],
    seed: int,
) -> None:
    """`asked`: a rank, and the step after which it is asked to stop."""
    each = ranks(count, cuda=cuda, seconds=1e9)
    signalled, when = asked[0] % count, asked[1]
    draw = random.Random(seed)
    done, found = [0] * count, [[] for _ in range(count)]  # type: list[int], list[list[Any]]
    mark = SimpleNamespace(synchronize=lambda: None)

    def may(rank: int) -> bool:
        """Whether this rank's host can be at the end of its next step."""
        step = done[rank] + 1
        if (found[rank] and found[rank][-1][1] == STOP) or step > 120:
            return False
        slowest = min(done[1:]) if rank == 0 else done[0]
        if step == SETTLED and rank:
            return done[0] >= step  # the pace is waited for
        if not cuda:
            return slowest >= step - 1
        pace = each[0].every
        return pace is None or step % pace != 0 or slowest >= step - 3

    while able := [rank for rank in range(count) if may(rank)]:
        rank = draw.choice(able)
        step = done[rank] + 1
        if rank == 0 and step in saves:
            each[0]._saved = -2e9
        if rank == signalled and step == when:
            each[rank].context.stop_asked.set()
        ask = each[rank].after(step, step_seconds, mark)
        if ask != NOTHING:
            found[rank].append((step, ask))
            each[rank].saved()
        done[rank] = step
    assert all(one == found[0] for one in found)
    if when:
        assert found[0][-1][1] == STOP


def test_one_process_needs_no_store() -> None:
    (alone,) = ranks(1, cuda=False, seconds=0.0)
    alone.context.store = None  # type: ignore[assignment, method-assign]
    assert [alone.after(step, 1.0, None) for step in (1, 2, 3)] == [NOTHING, NOTHING, SAVE]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("30min", 1800), ("1.5h", 5400), ("1d", 86400)],
)
def test_a_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0m", "-3m", "30 weeks", "1e9h", "30M"])
def test_no_time(text: str) -> None:
    with pytest.raises(OptionError, match="neither a number of steps nor a time"):
        parse_duration(text)
