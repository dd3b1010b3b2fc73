"""Rotation: every case is chosen by some commit, the same ones again by the same commit."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rotation, "_table", lambda: {"tests.a.test_b.test_c": 9.0, "tests.a.test_b.D.test_e": 2.5}
    )


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("name", "period"),
    [
        ("tests/a/test_b.py::test_c", 3),
        ("tests/a/test_b.py::test_c[x-y[1]]", 3),
        ("tests/a/test_b.py::D::test_e", 2),
        ("tests/a/test_b.py::test_new", 1),
        (rotation.ALWAYS[0], 1),
    ],
)
def test_a_test_has_its_turn_the_more_seldom_the_longer_it_takes(
    monkeypatch: pytest.MonkeyPatch, name: str, period: int
) -> None:
    def turns() -> list[bool]:
        found = []
        for number in range(600):
            monkeypatch.setattr(rotation, "seed", lambda number=number: number)
            found.append(rotation.has_turn(name))
        return found

    assert sum(turns()) == pytest.approx(600 / period, rel=0.2)
    assert turns() == turns()


@pytest.mark.parametrize(
    ("given", "arguments", "rotates"),
    [
        ("", ["tests"], True),
        ("", ["tests/house"], False),
        ("", ["tests", "tests/house/test_rotation.py"], False),
        ("7", ["tests/house"], True),
        ("all", ["tests"], False),
    ],
)
def test_what_is_named_runs_whole(
    monkeypatch: pytest.MonkeyPatch, given: str, arguments: list[str], rotates: bool
) -> None:
    monkeypatch.setenv("HOCKET_TESTS", given)
    monkeypatch.chdir(rotation.TESTS.parent)
    assert rotation.rotates(arguments) is rotates


def test_the_table_is_of_tests_that_exist() -> None:
    for name in json.loads(rotation.TABLE.read_text()):
        module, _, function = name.rpartition(".")
        file = rotation.TESTS.parent / f"{module.replace('.', '/')}.py"
        assert f"def {function}(" in file.read_text(), name
    for name in rotation.ALWAYS:
        path, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (rotation.TESTS.parent / path).read_text(), name


def test_a_report_updates_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("a[1]", 2.0, ""), ("a[2]", 4.0, ""), ("b", 0.4, ""), ("c", 9.0, "<skipped/>")]
    rows = (f'<testcase classname="t" name="{n}" time="{s}">{x}</testcase>' for n, s, x in cases)
    (tmp_path / "all.xml").write_text(f"<testsuites>{''.join(rows)}</testsuites>")
    here = f"tests.house.test_rotation.{test_a_report_updates_the_table.__name__}"
    before = {here: 5.0, "t.a": 8.0, "t.b": 2.0, "tests.house.test_rotation.test_gone": 3.0}
    monkeypatch.setattr(rotation, "TABLE", tmp_path / "seconds.json")
    monkeypatch.setattr(rotation, "_table", lambda: before)
    rotation.main(str(tmp_path / "all.xml"))
    assert json.loads(rotation.TABLE.read_text()) == {"t.a": 3.0, here: 5.0}
