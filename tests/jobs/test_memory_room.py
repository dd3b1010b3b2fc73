"""Jobs that this machine cannot hold: rejected before ranks start, with a layout that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.runtime import host_memory
from tests.jobs.warm import warm  # noqa: F401  a fixture

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]


def train(tmp_path: Path, *flags: str) -> int:
    data = tmp_path / "text.txt"
    data.write_text("One melody is dealt note by note to several voices. " * 400)
    return main(
        ["train", "tiny-llama", "--data", str(data), "--seq-len", "64", "--global-batch", "32",
         "--steps", "1", "--cluster", "none", "--run", str(tmp_path / "run"), *flags]
    )  # fmt: skip


def test_what_this_machine_cannot_hold_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks once started and were killed, as nothing compared the prediction with the machine."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: 60 * 10**6)
    assert train(tmp_path) == 2
    error = capsys.readouterr().err
    assert "on its 1 rank, and this machine has 60 MB of memory free; fits at" in error
    fix = error.split("hint: ")[1].split()
    assert fix[0] == "--layout"
    assert "microbatches=" in fix[1]
    assert train(tmp_path, *fix) == 0


def test_what_no_layout_makes_fit_names_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda: 10**6)
    assert train(tmp_path, "--layout", "dp2") == 2
    assert "hint: hocket plan tiny-llama --cluster 8xH100" in capsys.readouterr().err
