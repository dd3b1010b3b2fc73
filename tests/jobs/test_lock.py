"""One writer for each run folder: who it is, when it is dead, and who follows it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs import lock, prepare
from hocket.jobs.export import export_run
from hocket.jobs.request import request
from hocket.spec.errors import RunFolderError
from tests.support.runs import job

HOLD = (
    "import sys, time; from pathlib import Path; from hocket.jobs.lock import locked\n"
    "with locked(Path(sys.argv[1]), 'train'): print('has it', flush=True); time.sleep(600)"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the folder `run`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


@pytest.mark.train
@pytest.mark.parametrize(
    "command",
    [
        ["train", "tiny-llama", "--data", "x.txt", "--run", "RUN"],
        ["train", "--run", "RUN", "--resume"],
        ["demo", "--run", "RUN"],
        ["export", "OTHER", "--to", "RUN/model"],
    ],
)
def test_a_second_writer_is_reported_who_the_first_is(
    other: subprocess.Popen[str],
    tmp_path: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run" / "run.json").write_text("{}")
    names = {"RUN": "run", "OTHER": "other"}
    for short, name in names.items():
        command = [word.replace(short, str(tmp_path / name)) for word in command]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"process {other.pid} on host {socket.gethostname()}" in said
    assert f"kill {other.pid}" in said
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.train
def test_a_server_and_an_export_during_a_run_are_locked_too(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    from types import SimpleNamespace

    from hocket.jobs.serving.start import server_folder

    asked: Any = SimpleNamespace(request=SimpleNamespace(run=tmp_path / "run"), name="x")
    with pytest.raises(RunFolderError, match=f"process {other.pid} "):
        server_folder(asked)
    with lock.export_locked(tmp_path / "out"):
        aside = tmp_path / ".out.writing"
        assert (aside / lock.NAME).exists()
    assert not aside.exists()


def test_the_lock_of_a_killed_process_is_taken_over(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunFolderError), lock.locked(folder, "train"):
        pass
    other.send_signal(signal.SIGKILL)
    other.wait()
    with lock.locked(folder, "train"):
        assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
        with lock.locked(folder, "train"):  # within one process it is one lock
            lock.reject_locked(folder)
    assert not list(folder.glob(".lock*"))


def me(**changes: object) -> lock.LockOwner:
    return dataclasses.replace(lock.LockOwner.me("train"), **changes)  # type: ignore[arg-type]


def write(folder: Path, owner: lock.LockOwner) -> None:
    folder.mkdir(exist_ok=True)
    (folder / lock.NAME).write_text(json.dumps(dataclasses.asdict(owner)))


ELSEWHERE = """
import contextlib, os, sys, time
from pathlib import Path
from hocket.jobs import lock
lock.RENEWED, lock.socket.gethostname = 0.05, lambda: "gpu-7"
folder = Path(sys.argv[1])
with lock.locked(folder, "train"):
    print("has it", flush=True)
    while True:
        if sys.argv[2]:  # this host's clock is wrong, and with it the times of the file
            for file in folder.glob(".lock*"):
                with contextlib.suppress(FileNotFoundError):  # one that asks for the lock left
                    os.utime(file, (float(sys.argv[2]),) * 2)
        time.sleep(0.02)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process on another host, as far as its lock shows, that writes the folder `run`."""
    skewed = str(getattr(request, "param", ""))
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "run"), skewed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED", 0.5)
    monkeypatch.setattr(lock, "SILENT", 2.0)


@pytest.fixture
def patient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For owners that live: they are seen as soon as they give a sign, and a busy machine may keep
    them from that for seconds."""
    monkeypatch.setattr(lock, "SILENT", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("elsewhere", ["", "1", "4000000000"], indirect=True)
def test_the_lock_of_another_host_is_taken_over_once_its_owner_is_silent(
    elsewhere: subprocess.Popen[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a pod that was replaced. The hosts' clocks do not count."""
    folder = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(RunFolderError, match="gives signs of life"):
            lock.reject_locked(folder)
        with pytest.raises(RunFolderError, match=f"{elsewhere.pid} on host gpu-7"):
            lock.locked(folder, "train").__enter__()
    elsewhere.kill()
    elsewhere.wait()
    monkeypatch.setattr(lock, "SILENT", 2.0)
    lock.reject_locked(folder)
    with lock.locked(folder, "train"):
        assert json.loads((folder / lock.NAME).read_text())["pid"] == os.getpid()
    assert "waiting 2 s for a sign of life" in capfd.readouterr().err
    assert not list(folder.glob(".lock*"))


@pytest.mark.usefixtures("patient")
def test_a_folder_whose_owner_leaves_while_it_is_waited_for_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, signs = tmp_path / "run", iter(["3", "3", ""])
    write(folder, me(host="gpu-7", renews=True))

    def leaves(*_: object) -> str:
        sign = next(signs)
        if not sign:
            (folder / lock.NAME).unlink()
        return sign

    monkeypatch.setattr(lock, "_count", leaves)
    lock.reject_locked(folder)
    assert next(signs, None) is None


@pytest.mark.usefixtures("quick")
def test_an_owner_that_was_frozen_ends_and_its_successor_waits_for_that(
    elsewhere: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    elsewhere.send_signal(signal.SIGSTOP)
    with lock.locked(folder, "train"):
        text = (folder / lock.NAME).read_bytes()
        elsewhere.send_signal(signal.SIGCONT)
        assert elsewhere.wait(60) == 1
        assert elsewhere.stderr is not None
        ends = elsewhere.stderr.read()
        assert f"which process {os.getpid()} on host {socket.gethostname()} writes now" in ends
        assert (folder / lock.NAME).read_bytes() == text


@pytest.mark.usefixtures("quick")
def test_an_owner_that_comes_back_while_it_is_followed_keeps_its_lock(
    elsewhere: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, still, looks = tmp_path / "run", lock._still, []

    def thaws(*given: object) -> bool:
        if not looks:
            owner = lock.LockOwner.read(folder / lock.NAME)
            assert owner is not None
            count = (alive := folder / f"{lock.NAME}.{owner.token}.alive").read_text()
            elsewhere.send_signal(signal.SIGCONT)
            while alive.read_text() in ("", count):
                time.sleep(0.01)
        looks.append(given)
        return still(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(lock, "_still", thaws)
    elsewhere.send_signal(signal.SIGSTOP)
    with pytest.raises(RunFolderError, match=f"{elsewhere.pid} on host gpu-7"):
        lock.locked(folder, "train").__enter__()
    assert looks
    assert elsewhere.poll() is None
    assert json.loads((folder / lock.NAME).read_text())["pid"] == elsewhere.pid
    assert not list(folder.glob("*.next"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_file_system_that_does_not_answer_is_no_silence_of_the_owner(
    elsewhere: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    count, begin = lock._count, time.monotonic()
    monkeypatch.setattr(lock, "SILENT", 5.0)  # shorter than the outage; 4 s are left after it

    def outage(*given: object) -> str:
        if how == "hangs" and 0.5 < time.monotonic() - begin < 6.0:
            time.sleep(6.0)
            elsewhere.send_signal(signal.SIGCONT)  # it waited for the same server
        if how == "fails" and 0.5 < time.monotonic() - begin < 6.5:
            raise OSError(errno.ESTALE, "stale file handle")
        if how == "fails" and time.monotonic() - begin >= 6.5:
            elsewhere.send_signal(signal.SIGCONT)
        return count(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(lock, "_count", outage)
    elsewhere.send_signal(signal.SIGSTOP)
    with pytest.raises(RunFolderError, match="gives signs of life"):
        lock.reject_locked(tmp_path / "run")


def test_a_lock_that_was_removed_by_hand_is_made_again_by_a_living_owner(
    elsewhere: subprocess.Popen[str], tmp_path: Path
) -> None:
    file = tmp_path / "run" / lock.NAME
    text = file.read_bytes()
    file.unlink()
    while not file.exists():
        assert elsewhere.poll() is None
        time.sleep(0.01)
    assert file.read_bytes() == text


@pytest.mark.train
@pytest.mark.ranks
@pytest.mark.usefixtures("runs")
def test_a_rank_saves_nothing_once_another_process_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the moment in which a frozen process runs again, before it has seen the lock."""
    monkeypatch.setattr(lock, "RENEWED", 1000.0)
    file, own, saved, failed = tmp_path / "run" / lock.NAME, b"", [], []

    def hear(event: dict[str, Any]) -> None:
        nonlocal own
        if event["event"] == "step" and not own:
            own = file.read_bytes()
            write(file.parent, me(host="gpu-8"))
        elif event["event"] == "note" and "was not saved" in event["text"]:
            failed.append(event["text"])
            file.write_bytes(own)
        elif event["event"] == "saved":
            saved.append(event["step"])

    job(tmp_path, "run", "dp1", heard=hear, steps=120, save_every=30)
    assert saved[-1] == 120
    assert failed
    assert all(f"another process writes {file.parent} now" in text for text in failed)
    assert not [step for step in saved if any(f"step {step} " in text for text in failed)]


def test_a_process_that_has_got_the_pid_since_is_another_one(tmp_path: Path) -> None:
    write(tmp_path / "run", me(start=1))
    with lock.locked(tmp_path / "run", "train"):
        pass


@pytest.mark.parametrize("changed", [{"host": "gpu-7"}, {"boot": "x"}, {"namespace": "x"}])
def test_the_lock_of_another_host_is_taken_over_by_hand(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    folder = tmp_path / "run"
    owner = me(start=1, **changed)
    write(folder, owner)
    with pytest.raises(RunFolderError) as caught, lock.locked(folder, "train"):
        pass
    assert f"process {os.getpid()} on host {owner.host}" in caught.value.message
    hint = str(caught.value.hint)
    subprocess.run(hint[hint.index("rm ") :], shell=True, check=True)
    with lock.locked(folder, "train"):
        pass


@pytest.mark.parametrize(("job", "restarts"), [("7", 1), ("7", 0), ("8", 1)])
def test_a_requeued_job_takes_over_the_lock_of_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, restarts: int
) -> None:
    """Another node cannot see whether the process lives. The lock of another job stays."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    write(tmp_path, me(host="node-1", boot="of node-1"))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    dead = (job, restarts) == ("7", 1)
    lost = contextlib.nullcontext() if dead else pytest.raises(RunFolderError, match="node-1")
    with lost, lock.locked(tmp_path, "train"):
        pass


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"host": 3}', "\xff"])
def test_a_file_that_is_no_lock_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / lock.NAME).write_text(text, encoding="latin-1")
    with pytest.raises(RunFolderError, match="cannot be read as a lock"):
        lock.reject_locked(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", Path("/proc/none/run")):
        with pytest.raises(RunFolderError, match=f"{path.parent}.* cannot be made") as caught:
            lock.locked(path, "train").__enter__()
        assert caught.value.hint


def test_what_was_made_for_a_lock_goes_with_it(tmp_path: Path) -> None:
    with lock.locked(tmp_path / "runs" / "one", "train"):
        pass
    assert not (tmp_path / "runs").exists()


def test_a_sign_of_life_at_the_end_of_a_lock_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of, gives = lock._of, threading.Event()
    monkeypatch.setattr(lock, "RENEWED", 0.5)

    def slow(*given: Any) -> Path:
        if threading.current_thread().name == "lock":
            gives.set()
            time.sleep(0.3)
        return path_of(*given)

    monkeypatch.setattr(lock, "_of", slow)
    with lock.locked(tmp_path, "train"):
        assert gives.wait(60)
    time.sleep(0.4)
    assert not list(tmp_path.iterdir())


def test_of_many_that_find_a_dead_owner_one_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a first follower has died before it took the name."""
    folder = tmp_path / "run"
    monkeypatch.setattr(lock, "RENEWED", 0.1)
    monkeypatch.setattr(lock, "SILENT", 0.5)
    for turn in range(6):
        dead = me(host="gpu-7", renews=True) if turn > 3 else me(start=1)
        write(folder, dead)
        if turn % 2:
            between = folder / f"{lock.NAME}.{dead.token}.next"
            between.write_text(json.dumps(dataclasses.asdict(me(start=2))))
        go, end = os.pipe(), os.pipe()
        children = []
        for _ in range(6):
            child = os.fork()
            if not child:
                code = 2
                try:
                    os.close(go[1])
                    os.close(end[1])
                    os.read(go[0], 1)
                    with lock.locked(folder, "train"):
                        code = 1
                        os.read(end[0], 1)  # the others have answered
                except RunFolderError:
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        os.close(go[0])
        os.close(end[0])
        os.close(go[1])
        codes, left = [], set(children)
        while len(left) > 1:  # all but the one that has it
            child, status = os.wait()
            left.discard(child)
            codes.append(os.waitstatus_to_exitcode(status))
        os.close(end[1])
        _, status = os.waitpid(left.pop(), 0)
        codes.append(os.waitstatus_to_exitcode(status))
        assert sorted(codes) == [0, 0, 0, 0, 0, 1]
        assert not list(folder.glob(".lock*"))


@pytest.mark.train
def test_two_runs_without_a_name_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request({"model": "tiny-llama"})
    first, second = prepare.train_folder(asked), prepare.train_folder(asked)
    assert (first.path.name, second.path.name) == ("tiny-llama-1", "tiny-llama-2")


@pytest.mark.train
def test_an_export_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.iterdir())
