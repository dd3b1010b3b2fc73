"""Rotation: every case is chosen by some commit, the same ones again by the same commit."""

from __future__ import annotations

import pytest

from tests import rotation


def chosen(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    monkeypatch.setenv("HOCKET_TESTS", str(number))
    rotation.seed.cache_clear()
    found = rotation.part(range(12), 3)
    rotation.seed.cache_clear()
    return found


def test_every_case_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [chosen(monkeypatch, number) for number in range(40)]
    assert {case for run in runs for case in run} == set(range(12))
    assert all(len(run) == 4 for run in runs)
    assert runs == [chosen(monkeypatch, number) for number in range(40)]


def test_modules_do_not_move_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(module: str, number: int) -> list[int]:
        monkeypatch.setitem(globals(), "__name__", module)
        return chosen(monkeypatch, number)

    assert [of("tests.a", n) for n in range(9)] != [of("tests.b", n) for n in range(9)]
    monkeypatch.undo()


def test_all_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_TESTS", "all")
    assert rotation.part([1, 2, 3], 3) == [1, 2, 3]
