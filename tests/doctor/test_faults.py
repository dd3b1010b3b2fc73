"""The doctor's faults on a backend that behaves as NCCL's, and what overlaps in a profile."""

from __future__ import annotations

import pytest

from hocket.doctor import faults
from hocket.doctor.check import CPU
from hocket.doctor.place import Place
from hocket.doctor.steps import overlapped


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["kill", "hang", "stop", "watchdog"])
def test_the_rank_at_fault_is_named_and_no_victim(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Victims wait for their device, in frames that name no collective."""
    monkeypatch.setattr(faults, "ENTRY", "tests.doctor.fault_cases:rank")
    outcome = faults.fault(Place(CPU), kind=kind, ranks=2)
    assert outcome.ok, outcome.reason
    message = str(outcome.values["message"])
    if kind == "watchdog":
        assert message.startswith("rank 0 of 2")
        assert "SIGABRT" in message
    else:
        assert "rank 1" in message
        assert "rank 0" not in message


def test_seconds_next_to_other_spans() -> None:
    assert overlapped([(0.0, 4.0), (6.0, 8.0)], [(3.0, 7.0)]) == (6.0, 2.0)
    assert overlapped([(0.0, 4.0), (2.0, 5.0)], [(1.0, 2.0), (1.0, 3.0)]) == (5.0, 2.0)
    assert overlapped([], [(1.0, 2.0)]) == (0.0, 0.0)
