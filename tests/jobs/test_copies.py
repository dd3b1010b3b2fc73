"""Copies in memory: those of a killed process go at the next start, those of a living one stay."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.jobs import copies
from hocket.jobs.lock import LockOwner
from hocket.spec.run import RunFolder, TrainOptions
from tests.ranks import ROOT
from tests.support.runs import job, text_in

COPIED = TrainOptions(replicate_state=2)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are: this test's own, in place of memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOCKET_STATE_COPIES", str(memory))
    return memory / f"hocket-{os.getuid()}"


def left(folder: RunFolder, owner: LockOwner) -> Path:
    """Copies of a run as `owner` leaves them."""
    path = folder.state_copies
    (path / "step-000002").mkdir(parents=True)
    path.parent.chmod(0o700)
    path.with_name(f"{path.name}.owner").write_text(json.dumps(dataclasses.asdict(owner)))
    return path


def owner(**changed: object) -> LockOwner:
    return dataclasses.replace(LockOwner.me("train"), **changed)


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, True),  # this process, which lives
        ({"start": 1}, False),  # another process had the pid
        ({"pid": 2**22 - 1}, False),
        ({"start": 1, "boot": "another"}, True),  # cannot be seen from here
        ({"start": 1, "namespace": "pid:[1]"}, True),
        ({"start": 1, "job": copies.JOINED}, True),  # another launcher starts it again
    ],
)
def test_the_owner_decides(
    tmp_path: Path, root: Path, changed: dict[str, object], stays: bool
) -> None:
    there = left(RunFolder(tmp_path / "other"), owner(**changed))
    with copies.own_copies(RunFolder(tmp_path / "run"), TrainOptions()):
        assert there.exists() == stays
        assert there.with_name(f"{there.name}.owner").exists() == stays
        assert not any(root.glob("*.owner")) or stays
    assert root.exists() == stays


def test_another_launcher_has_an_hour(tmp_path: Path, root: Path) -> None:
    there = left(RunFolder(tmp_path / "other"), owner(start=1, job=copies.JOINED))
    past = time.time() - copies.STARTS_AGAIN - 1
    for path in (*there.iterdir(), there.with_name(f"{there.name}.owner")):
        os.utime(path, (past, past))
    copies.claim_copies(RunFolder(tmp_path / "run"), COPIED, "train")
    assert not there.exists()
    assert len(list(root.glob("*.owner"))) == 1
    copies.release_copies(RunFolder(tmp_path / "run"))
    assert not root.exists()


def test_a_run_that_is_submitted_again_keeps_its_copies(tmp_path: Path, root: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    there = left(folder, owner(start=1))
    with copies.own_copies(folder, COPIED):
        assert there.exists()
        held = json.loads(there.with_name(f"{there.name}.owner").read_text())
        assert held["pid"] == os.getpid()
    assert not root.exists()


def test_what_is_not_an_owner_is_left_alone(tmp_path: Path, root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "old").mkdir()  # of a version without owners
    (root / "torn.owner").write_text('{"host": ')
    with copies.own_copies(RunFolder(tmp_path / "run"), COPIED):
        pass
    assert {path.name for path in root.iterdir()} == {"old", "torn.owner"}


def test_another_user_s_folder_is_not_touched(tmp_path: Path, root: Path) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    root.symlink_to(aside)
    with copies.own_copies(RunFolder(tmp_path / "run"), COPIED):
        assert not any(aside.iterdir())
    assert root.is_symlink()


@pytest.mark.train
@pytest.mark.ranks
@pytest.mark.usefixtures("runs")
@pytest.mark.timeout(240)
def test_the_next_run_deletes_the_copies_of_one_that_was_killed(tmp_path: Path, root: Path) -> None:
    command = [
        *(sys.executable, "-m", "hocket", "train", "tiny-llama", "--data", str(text_in(tmp_path))),
        *("--run", str(tmp_path / "killed"), "--layout", "dp2", "--seq-len", "16", "--steps"),
        *("100000", "--global-batch", "4", "--replicate-state", "2", "--save-every", "0"),
        *("--eval-every", "0", "--cluster", "none", "--device", "cpu"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    there = RunFolder(tmp_path / "killed").state_copies
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as killed:
        try:
            end = time.monotonic() + 120
            while not any(there.glob("step-*/rank-00001.json")):
                assert killed.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            job(tmp_path, "first", "dp1", steps=2, eval_every=0, save_every=0)
            assert any(there.glob("step-*"))  # its owner lives
        finally:
            killed.send_signal(signal.SIGKILL)
    assert any(there.glob("step-*"))
    job(tmp_path, "second", "dp1", steps=2, eval_every=0, save_every=0)
    assert not root.exists()
