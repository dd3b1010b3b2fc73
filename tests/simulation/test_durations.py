"""Many prices at once give what one at a time gives."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.schedules.registry import build_schedule
from hocket.simulation import durations, simulate
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.prices import Prices
from hocket.spec.schedule import Schedule

KINDS = ("F", "B", "I", "W", "SEND_F", "SEND_B", "REDUCE_GRAD")


@pytest.mark.parametrize(
    ("name", "pp", "virtual", "microbatches"),
    [
        ("1f1b", 1, 1, 3), ("1f1b", 4, 1, 9), ("gpipe", 3, 2, 5), ("interleaved", 4, 3, 8),
        ("sequential", 3, 1, 2), ("zero-bubble", 4, 1, 7),
        ("zb-v", 3, 2, 6),
    ],
)  # fmt: skip
@pytest.mark.parametrize("left_out", ["", "B", "I W", "SEND_F SEND_B"])
def test_the_same_as_event_by_event(
    name: str, pp: int, virtual: int, microbatches: int, left_out: str
) -> None:
    layout = Layout(pp=pp, virtual_stages=virtual, schedule=name, dp=2)
    schedule = build_schedule(layout, microbatches)
    random = np.random.default_rng(3)
    stages = layout.num_stages
    seconds = {k: random.random((5, stages)) for k in KINDS if k not in left_out.split()}
    found = durations(schedule, seconds)
    for row in range(5):
        one = Prices(seconds={k: tuple(v[row].tolist()) for k, v in seconds.items()})
        assert found[row] == pytest.approx(simulate(schedule, one).duration, rel=1e-12)


def test_a_schedule_that_hangs_is_refused() -> None:
    hung = Schedule.parse(
        "# hocket schedule 1\n# name: hung\n# microbatches: 1\n# stage ranks: 0 1\n"
        "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    with pytest.raises(ScheduleError, match="never ends"):
        durations(hung, {"F": np.ones((1, 2))})
