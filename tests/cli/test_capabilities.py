"""`hocket doctor` states what works here and what the rest needs, from the tables verbs obey."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import capabilities, installed
from hocket.cli.main import VERBS, main
from hocket.spec.install import install_line


def test_a_missing_extra_moves_its_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    whole = capabilities.capability_lines()[0]
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "starlette" else find(name)
    )
    found = capabilities.capability_lines()
    assert "serve" not in found[0].removeprefix("works here: ").split(", ")
    assert f"needs {install_line('serve')}: serve" in found
    assert set(whole.removeprefix("works here: ").split(", ")) <= set(VERBS)
    assert installed.NEEDS["serve"] == "serve"


def test_what_is_listed_as_working_is_not_rejected() -> None:
    for verb in capabilities.capability_lines()[0].removeprefix("works here: ").split(", "):
        installed.require_extra(verb)


def test_doctor_prints_it_first(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("hocket.doctor.job.chosen_checks", lambda **_: ())
    monkeypatch.setattr("hocket.doctor.job.doctor", _none)
    with pytest.raises(_Stop):
        main(["doctor"])
    assert capsys.readouterr().out.startswith("works here: ")


class _Stop(Exception):
    """Ends the verb before its checks."""


def _none(*_: Any, **__: Any) -> None:
    raise _Stop


def test_without_compilers_the_verbs_that_compile_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    found = capabilities.capability_lines()
    assert "rehearse" not in found[0]
    assert "needs a C compiler (apt install gcc): fast serving on CPU" in found
    assert "needs a C++ compiler (apt install g++): rehearse, --dry-run, --compile" in found
