"""A run that is asked to stop saves, exits with its own code, and resumed it is the run that was
never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.jobs.early_stop import stopping_early
from hocket.launch import Terminated
from hocket.launch.launcher import raising_on_sigterm
from hocket.spec.errors import STOPPED, OptionError

pytestmark = [pytest.mark.train, pytest.mark.ranks, pytest.mark.timeout(240)]

HOCKET = [sys.executable, "-m", "hocket"]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "-m", "--", "hocket",
]  # fmt: skip


def job(tmp_path: Path, run: str, steps: int) -> list[str]:
    (tmp_path / "text.txt").write_text("a hocket is one melody for several voices\n" * 200)
    return [
        "train", "tiny-llama", "--data", "text.txt", "--seq-len", "16", "--global-batch", "4",
        "--layout", "dp2", "--steps", str(steps), "--warmup", "2", "--eval-every", "0",
        "--cluster", "none", "--device", "cpu", "--run", run,
    ]  # fmt: skip


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "HOCKET_LEDGER": "0", **variables}, start_new_session=True,
    )  # fmt: skip


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def stopped(command: list[str], folder: Path, run: Path, number: signal.Signals) -> tuple[int, str]:
    """A job's exit code and output, asked to stop once it has taken ten steps."""
    process = start(command, folder)
    end = time.monotonic() + 120
    while steps_of(run) < 10 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_stopped_and_resumed_is_the_run_never_stopped(tmp_path: Path) -> None:
    steps = 1500
    code, output = stopped(
        [*HOCKET, *job(tmp_path, "cut", steps)], tmp_path, tmp_path / "cut", signal.SIGTERM
    )
    assert code == STOPPED, output
    assert "train --run cut --resume" in output
    (saved,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
    done = int(saved.name.split("-")[1])
    assert steps_of(tmp_path / "cut") == done < steps
    assert not (tmp_path / "cut" / "model").exists()
    last = done + 5
    resume = [*HOCKET, "train", "--run", "cut", "--resume", "--cluster", "none"]
    # The learning rate follows --steps, so the uninterrupted run has as many.
    for command in (resume, [*HOCKET, *job(tmp_path, "whole", steps)]):
        code, output = stopped_at(command, tmp_path, last)
        assert code == STOPPED, output
    cut, whole = (rows(tmp_path / name, done + 1, last) for name in ("cut", "whole"))
    assert cut == whole


def stopped_at(command: list[str], folder: Path, step: int) -> tuple[int, str]:
    """A job that is stopped some time after `step`."""
    run = folder / command[command.index("--run") + 1]
    process = start(command, folder)
    end = time.monotonic() + 120
    while last_step(run) < step and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def last_step(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:-1] if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def rows(run: Path, first: int, last: int) -> list[tuple[int, float, float]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (row["step"], row["loss"], row["grad_norm"])
        for row in found
        if first <= row["step"] <= last
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("phase", ["tokenizing", "starting ranks"])
def test_stopped_before_the_first_step(tmp_path: Path, number: signal.Signals, phase: str) -> None:
    command = [*HOCKET, *job(tmp_path, "run", 3)]
    process = start(command, tmp_path)
    assert process.stdout is not None
    while phase not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    if steps_of(tmp_path / "run") < 3:  # the last step may be over before a rank reads it
        assert process.returncode == STOPPED, output
    again = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again.stderr
    assert steps_of(tmp_path / "run") == 3


@pytest.mark.parametrize(
    ("number", "tasks", "code"),
    [(signal.SIGTERM, 1, STOPPED), (signal.SIGUSR1, 2, STOPPED), (signal.SIGTERM, 2, 1)],
)
def test_stopped_while_options_are_read(
    tmp_path: Path, number: signal.Signals, tasks: int, code: int
) -> None:
    """As while the command is imported: nothing has begun, and the job is queued again. srun sends
    SIGTERM to the tasks that are left when one fails: its code is to be the failure's."""
    os.mkfifo(tmp_path / "options.toml")
    command = [*HOCKET, *job(tmp_path, "run", 3), "--config", "options.toml"]
    process = start(command, tmp_path, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(tasks))
    with (tmp_path / "options.toml").open("w"):  # once it is opened for reading
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "stopped before the run began" in output
    assert not (tmp_path / "run").exists()


def test_a_signal_after_the_run_leaves_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun sends SIGTERM while a rank whose peer was killed reports that, or one that has saved
    ends."""
    ended: list[int] = []

    def before(number: int, frame: object) -> None:
        ended.append(number)

    before.before_run = True  # type: ignore[attr-defined]
    saved = signal.signal(signal.SIGTERM, before)
    try:
        with contextlib.suppress(OptionError), stopping_early(lambda event: None):
            raise OptionError("a rank fails")
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        with pytest.raises(Terminated) as caught, stopping_early(lambda event: None):
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 1
    finally:
        signal.signal(signal.SIGTERM, saved)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_an_import_catches_is_not_lost(number: signal.Signals) -> None:
    """An exception of a handler may be caught by a package that is being imported, as by torch."""

    def imports_and_starts() -> None:
        with stopping_early(lambda event: None):
            with contextlib.suppress(BaseException):
                signal.raise_signal(number)
            with raising_on_sigterm(lambda: None):
                pytest.fail("ranks were started")

    with pytest.raises(Terminated) as caught:
        imports_and_starts()
    assert caught.value.code == STOPPED


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (None, "; the same command continues"),
        ("0", "; unless another rank failed, the same command continues"),
        ("1", None),
    ],
)
def test_a_rank_that_torchrun_ends_does_not_report_a_job_that_rank_0_rejected(
    rank: str | None, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in {**world, "RANK": rank}.items():
            monkeypatch.setenv(name, value)
    heard: list[str] = []
    with pytest.raises(Terminated), stopping_early(lambda event: heard.append(event["text"])):
        signal.raise_signal(signal.SIGTERM)
    assert heard == ([] if text is None else [f"stopped while no step was computed{text}"])


def test_a_task_of_srun_that_is_imported_ends_with_code_0() -> None:
    code = (
        "import signal, sys, hocket.__main__, hocket.cli.main\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # another test's process may ignore it
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\n"
        "def run():\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    except BaseException: return 7\n"
        "hocket.cli.main.main = run\n"
        "sys.argv = ['hocket', 'serve']\n"
        "sys.exit(hocket.__main__.main())\n"
    )
    for tasks, wanted in (("2", 0), ("1", -signal.SIGTERM)):
        environment = {**os.environ, "SLURM_STEP_NUM_TASKS": tasks}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        assert done.returncode == wanted


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    process = start([*HOCKET, *job(tmp_path, "run", 100_000)], tmp_path)
    end = time.monotonic() + 120
    while steps_of(tmp_path / "run") < 1 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    for rank in range(2):  # so that the first one cannot be heeded
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02 * (1 - rank))
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGTERM, STOPPED), output


def test_under_torchrun_every_rank_is_asked(tmp_path: Path) -> None:
    code, output = stopped(
        [*TORCHRUN, *job(tmp_path, "run", 100_000)], tmp_path, tmp_path / "run", signal.SIGTERM
    )
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")), (code, output)
