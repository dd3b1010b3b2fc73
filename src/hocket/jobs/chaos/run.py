"""Run: training jobs with faults, what found each fault, and whether the end is as it should be.

    reference    the same job without faults (but for gradients that are not finite)
    job          the same, with its faults; submitted again after SIGTERM, until it is done

Every fault is written to a file in the moment in which it happens, and every answer of hocket is
an event of the job: their times give the seconds to detection and to the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import defaults, prepare
from hocket.jobs.chaos.draw import STRETCH, ChaosFault, ChaosJob, chosen_kinds, draw_faults
from hocket.jobs.chaos.result import ChaosResult, FaultResult
from hocket.jobs.request import JobRequest, request
from hocket.jobs.train import PRELOAD, train_model
from hocket.spec.checkpoint import checkpoints, verify_checkpoint
from hocket.spec.errors import HocketError, ModelError, OptionError
from hocket.spec.run import RunFolder

if TYPE_CHECKING:
    from hocket.launch import Launcher

MOST_PARAMETERS = 50e6
"""Of a model: each fault starts it again."""
SEQ_LEN, GLOBAL_BATCH = 16, 8
WORDS = "a hocket is one melody for several voices sung note by note in turns"
DISK = "256m"
"""Size of the file system of checkpoints in a job whose disk fills up."""
ENDING = ("kill", "stop", "stuck", "exception", "cut", "torn", "checkpoint", "weights")
"""Kinds that end the ranks."""

Listener = Callable[[FaultResult], None]


def chaos(
    model: str,
    *,
    layout: str,
    seed: int = 0,
    faults: int = 20,
    kinds: Sequence[str] = (),
    on_fault: Listener | None = None,
    launcher: Launcher | None = None,
) -> ChaosResult:
    """Inject `faults` faults into training jobs of `model` in `layout`.

    Args:
        kinds: names of `kinds.ALL`; empty: all that the layout allows.
        on_fault: called with what became of each fault.
        launcher: a warm one, which stays open.

    Raises:
        OptionError, LayoutError, ModelError: as it cannot be run.
    """
    from hocket.launch import Launcher

    if faults < 1:
        raise OptionError(f"--faults is {faults}; it is at least 1", hint="--faults 20")
    with tempfile.TemporaryDirectory(prefix="hocket-chaos-") as name, _no_ledger():
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(_text(seed))
        asked = _request(model, layout, text, folder / "whole", steps=STRETCH, backend="auto")
        job = prepare.prepare_job(asked, any_size=True)
        parameters = defaults.parameters(job.source.dimensions)
        if parameters > MOST_PARAMETERS:
            raise ModelError(
                f"{model} has about {parameters / 1e6:,.0f} million parameters; chaos starts a "
                f"model again at each fault, and takes at most {MOST_PARAMETERS / 1e6:.0f} million",
                hint=f"hocket chaos tiny-llama --layout {layout}",
            )
        jobs = draw_faults(seed, faults, chosen_kinds(kinds, job.layout), job.layout)
        found = ChaosResult(model=model, layout=str(job.layout), seed=seed)
        with (
            contextlib.nullcontext(launcher)
            if launcher is not None
            else Launcher("cpu", 1, preload=PRELOAD)
        ) as warm:
            run = _Runs(model, layout, folder, text, warm)
            for number, one in enumerate(jobs):
                rows, equal = run.disturbed(number, one)
                found.faults += rows
                found.jobs_equal.append(equal)
                for row in rows:
                    if on_fault is not None:
                        on_fault(row)
        return found


class _Runs:
    """The jobs of one call, and the digests of those that were not disturbed."""

    def __init__(
        self, model: str, layout: str, folder: Path, text: Path, launcher: Launcher
    ) -> None:
        self._model, self._layout, self._folder, self._text = model, layout, folder, text
        self._launcher = launcher
        self._undisturbed: dict[Any, str] = {}

    def disturbed(self, number: int, job: ChaosJob) -> tuple[list[FaultResult], bool]:
        """Run a job with its faults: what became of each, and whether its end is as it should."""
        folder = self._folder / f"job-{number}"
        expected = self._expected(job)
        with _disk(folder / "checkpoints", any(f.kind.name == "full" for f in job.faults)):
            watch = _Watched(folder, number, job)
            error = ""
            try:
                self._through(folder, job, watch)
            except HocketError as failure:
                error = str(failure)
            equal = not error and digest(folder, losses=_losses_count(job)) == expected
            rows = watch.results(error)
        shutil.rmtree(folder, ignore_errors=True)
        return rows, equal

    def _through(self, folder: Path, job: ChaosJob, watch: _Watched) -> None:
        from hocket.launch.launcher import Terminated

        asked = self._asked(folder, job)
        while True:
            watch.submitted()
            try:
                summary = train_model(
                    asked, on_event=watch, faults=watch.rows, launcher=self._launcher
                )
            except Terminated:
                watch.damage()
                continue
            except HocketError as error:
                # A damaged file is put back, and the disk has space now: submitted again.
                if watch.rejected(error, time.time()):
                    continue
                if not watch.disk_was_full(error.message, time.time()):
                    raise
                continue
            if not summary.stopped:
                return
            watch.stopped(time.time())

    def _expected(self, job: ChaosJob) -> str:
        """The digest of a job's undisturbed run; of one that skips the same steps."""
        skipped = tuple(f for f in job.faults if f.kind.name == "nan")
        losses = _losses_count(job)
        key = job.steps, job.backend, skipped, losses
        if key not in self._undisturbed:
            folder = self._folder / "undisturbed"
            only = dataclasses.replace(job, faults=skipped)
            watch = _Watched(folder, -1, only)
            train_model(
                self._asked(folder, only), on_event=watch, faults=watch.rows,
                launcher=self._launcher,
            )  # fmt: skip
            self._undisturbed[key] = digest(folder, losses=losses)
            shutil.rmtree(folder)
        return self._undisturbed[key]

    def _asked(self, folder: Path, job: ChaosJob) -> JobRequest:
        return _request(
            self._model, self._layout, self._text, folder, steps=job.steps, backend=job.backend
        )


class _Watched:
    """What is heard of one job: the listener of its events.

    Attributes:
        folder: of the run. rows: the faults that ranks bring on themselves.
        done: the last step before the signal that was sent last.
    """

    def __init__(self, folder: Path, number: int, job: ChaosJob) -> None:
        self.folder, self._number, self._faults = folder, number, job.faults
        self._log = folder.with_name(f"{folder.name}-faults.jsonl")
        self._log.unlink(missing_ok=True)
        self._filler = folder / "checkpoints" / ".filler"
        self.rows = [f.row(str(self._log), str(self._filler)) for f in job.faults if f.kind.brought]
        if any(fault.kind.name == "term" for fault in job.faults):
            from hocket.training.pauses import APART

            # Ranks agree to stop a few times a second, and a job of milliseconds would be over.
            slow = {"kind": "slow", "phase": "input", "rank": 0, "step": 1, "place": 0.0}
            self.rows.append({**slow, "again": True, "seconds": APART})
        self._found: dict[int, dict[str, Any]] = {}
        self._signals = [f for f in job.faults if not f.kind.brought]
        self._sent: ChaosFault | None = None
        self._damaged: tuple[ChaosFault, Path, int, int] | None = None
        self._passed = ""  # notes of this start
        self.done = 0  # the last step before that signal
        self._open: list[int] = []  # detected, and not recovered yet

    def submitted(self) -> None:
        """The job is submitted, once more. What happened while a signal ended it has no restart."""
        for fault in self._of(*ENDING):
            self.detected(fault, time.time(), None, self.done)
            self._found[fault.number]["text"] = "it happened while a signal ended the job"
        self._sent, self._passed = None, ""

    def injected(self, fault: ChaosFault) -> None:
        """A fault that this process injects happens now."""
        line = {"id": fault.number, "time": time.time(), "step": fault.step}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def detected(self, fault: ChaosFault, when: float, named: bool | None, done: int = 0) -> None:
        """A fault is found; `done`: the last step before it that had been reported."""
        self._found[fault.number] = {"time": when, "named": named, "done": done, "lost": 0}
        self._open.append(fault.number)

    def _recovered(self, event: dict[str, Any], now: float) -> None:
        for number in self._open:
            found = self._found[number]
            found["recovered"] = now
            if event["event"] == "step":
                found["lost"] = max(0, found["done"] - event["step"] + 1)
        self._open.clear()

    def disk_was_full(self, text: str, now: float) -> bool:
        """Whether a message is that of a disk that this job was to fill; it has space again."""
        self._filler.unlink(missing_ok=True)
        full = self._of("full")[:1] if "was not saved" in text else []
        for fault in full:
            self.detected(fault, now, "No space left on device" in text)
        return bool(full)

    def stopped(self, now: float) -> ChaosFault | None:
        """The fault whose signal ended the job, after a checkpoint or from its newest one."""
        if self._sent is None:
            raise KeyboardInterrupt  # the signal came from outside
        if self._sent.kind.name == "term" and self._sent.number not in self._found:
            self.detected(self._sent, now, None)
        return self._sent

    def damage(self) -> None:
        """Two signals ended the job at once: flip a bit of its tokens, or of any file."""
        from hocket.training.token_manifest import TRAIN

        if self._sent is None:
            raise KeyboardInterrupt  # the signal came from outside
        fault, run = self._sent, RunFolder(self.folder)
        path, rng = run.data / TRAIN, random.Random(fault.place)
        if fault.kind.name == "file":
            found = [p for p in sorted(self.folder.rglob("*")) if p.is_file() and p.stat().st_size]
            path = rng.choice(found)
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        _flip(path, at, bit)
        self.injected(fault)
        self._damaged = fault, path, at, bit

    def rejected(self, error: HocketError, when: float) -> bool:
        """Whether an error rejects the file that was damaged; its bit is put back."""
        if self._damaged is None:
            return False
        (fault, path, at, bit), self._damaged = self._damaged, None
        if path.is_file() and at < path.stat().st_size:
            _flip(path, at, bit)
        text = str(error)
        named = path.name in text or path.parent.name in text
        self.detected(fault, when, named, self.done)
        place = f"{path.relative_to(self.folder)}, bit {bit} of byte {at}"
        self._found[fault.number]["text"] = f"{place}: {text}"
        return True

    def _accepted(self, when: float) -> None:
        """The job has taken a step with the damaged file."""
        assert self._damaged is not None
        (fault, path, _, _), self._damaged = self._damaged, None
        if fault.kind.name == "file":
            over = "step-" in path.parent.name and path.parent.name in self._passed
            by = "checksum: an older checkpoint" if over else "no effect on the end"
            self.detected(fault, when, None, self.done)
            self._found[fault.number]["by"] = f"{by} ({path.relative_to(self.folder)})"

    def __call__(self, event: dict[str, Any]) -> None:
        kind, now = event["event"], time.time()
        if kind == "done" and self._sent and self._sent.kind.name == "term":
            self.stopped(now)
        if kind in ("step", "done") and self._damaged is not None:
            self._accepted(now)
        if kind in ("step", "done"):
            self._recovered(event, now)
        if kind == "step" and self._signals and self._signals[0].step <= event["step"]:
            if self._sent is None:
                self._sent = self._signals.pop(0)
                self.done = event["step"]
                if self._sent.kind.name == "term":
                    self.injected(self._sent)
                else:
                    os.kill(os.getpid(), signal.SIGTERM)  # the second one ends the job at once
                os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "stopped":
            self.stopped(now)
        elif kind == "restart":
            # A stopped rank continues to show its stack, and may reach the next fault meanwhile.
            for number, fault in enumerate(self._of(*ENDING)):
                named = None if number else _names(fault, event)
                self.detected(fault, event["time"], named, event["step"])
                if named is False:
                    self._found[fault.number]["text"] = event["cause"]
        elif kind == "skipped":
            for fault in self._of("nan"):
                if fault.step == event["step"] and fault.number not in self._found:
                    self.detected(fault, now, "first parameter" in event["place"])
        elif kind == "note":
            self._noted(event["text"], now)

    def _of(self, *names: str) -> list[ChaosFault]:
        """Faults of these kinds that have happened and are not found yet, the earliest first."""
        log = self._happened()
        found = [
            f for f in self._faults
            if f.kind.name in names and f.number in log and f.number not in self._found
        ]  # fmt: skip
        return sorted(found, key=lambda fault: float(log[fault.number]["time"]))

    def _happened(self) -> dict[int, dict[str, Any]]:
        from hocket.training.faults import happened

        return happened(str(self._log))

    def _noted(self, text: str, now: float) -> None:
        self._passed += "" if text.startswith("resumed from") else f"{text}\n"
        if "was not saved" in text:
            self.disk_was_full(text, now)
        elif "; the run was asked to stop: " in text:
            for fault in self._of(*ENDING)[:1]:
                ranks = [int(number) for number in re.findall(r"\brank (\d+)\b", text)]
                rank = fault.rank if fault.rank in ranks else next(iter(ranks), None)
                self.detected(fault, now, _names(fault, {"cause": text, "rank": rank}))
        elif " is slow: " in text:
            for fault in self._of("slow")[:1]:
                self.detected(fault, now, f"rank {fault.rank} is slow" in text)

    def results(self, error: str) -> list[FaultResult]:
        """What became of each fault; `error` ended the job, if it is not empty."""
        log, rows = self._happened(), []
        for fault in self._faults:
            happened, found = log.get(fault.number), self._found.get(fault.number)
            moment = {"job": self._number, "step": fault.step, "phase": fault.phase}
            result = FaultResult(kind=fault.kind.name, injected_at=moment, rank=fault.rank)
            rows.append(result)
            if happened is None:
                result.remark = error or "the job ended before it happened"
                continue
            moment["step"] = happened["step"]
            if found is None:
                result.remark = error or "nothing has found it"
                continue
            result.detected_by = found.get("by", fault.kind.detected_by)
            result.detected_seconds = max(0.0, found["time"] - happened["time"])
            result.named = found["named"]
            result.steps_lost = found["lost"]
            if "recovered" in found:
                result.recovered_seconds = max(0.0, found["recovered"] - found["time"])
                result.survived = True
            result.remark = error if not result.survived else found.get("text", "")
        return rows


def _names(fault: ChaosFault, event: dict[str, Any]) -> bool:
    """Whether a restart's message names the rank at fault; of a link that was cut, one end."""
    text = event["cause"]
    if fault.kind.name == "weights":
        pair = re.search(r"one of ranks \[([0-9, ]+)\]", text)
        ranks_named = [] if pair is None else pair[1].split(", ")
        return f"rank {fault.rank} differs" in text or str(fault.rank) in ranks_named
    if fault.kind.name == "cut":
        return event["rank"] is not None
    return bool(event["rank"] == fault.rank)


def _losses_count(job: ChaosJob) -> bool:
    """Whether the losses in metrics.jsonl are compared; a flipped bit may be one of theirs."""
    return all(fault.kind.name != "file" for fault in job.faults)


def digest(folder: Path, *, losses: bool = True) -> str:
    """Of what a run has come to: losses of all steps, last checkpoint and exported model."""
    found = hashlib.sha256()
    run = RunFolder(folder)
    if losses:
        rows = map(json.loads, run.metrics_file.read_text().splitlines())
        found.update(json.dumps([(row["step"], row["loss"]) for row in rows]).encode())
    last = checkpoints(run.checkpoints)[0]
    for shard in verify_checkpoint(last).shards:
        for tensor in shard.tensors:
            found.update(f"{shard.file} {tensor.key} {tensor.crc32}\n".encode())
    for file in sorted(run.model.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _request(
    model: str, layout: str, text: Path, run: Path, *, steps: int, backend: str
) -> JobRequest:
    return request(
        {
            "model": model, "data": str(text), "run": str(run), "layout": layout,
            "seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "steps": steps, "warmup": 2,
            "save_every": STRETCH, "eval_every": STRETCH, "cluster": "none", "device": "cpu",
            "backend": backend, "replica_check_every": 1, "on_divergence": "repair",
        }
    )  # fmt: skip


def _text(seed: int) -> str:
    """A few kilobytes of text from the seed."""
    rng = random.Random(seed)
    words = WORDS.split()
    return "".join(" ".join(rng.choices(words, k=9)) + "\n" for _ in range(200))


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@contextlib.contextmanager
def _disk(path: Path, small: bool) -> Iterator[None]:
    """Within, `path` is a small file system of its own, where that is asked for and permitted."""
    if not small:
        yield
        return
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "hocket-chaos", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise OptionError(
            "the kind `full` mounts a small tmpfs, which this user may not",
            hint="leave full out of --kinds, or run as root (unshare -rm)",
        )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


@contextlib.contextmanager
def _no_ledger() -> Iterator[None]:
    """Within, runs are not entered in the ledger: their steps are disturbed."""
    before = os.environ.get("HOCKET_LEDGER")
    os.environ["HOCKET_LEDGER"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["HOCKET_LEDGER"]
        else:
            os.environ["HOCKET_LEDGER"] = before
