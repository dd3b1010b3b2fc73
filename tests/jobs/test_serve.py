"""A whole server with ranks that have no model: from the command to the end of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hocket
import hocket.launch
from hocket.cli.main import main
from hocket.jobs import ledger
from hocket.jobs.serving import server as job
from hocket.launch import Launcher
from hocket.spec.run import RunFolder
from hocket.spec.serving_forecast import ServingForecast, ServingMeasured
from tests.jobs.served_model import model

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]

SMALL = {"device": "cpu", "cluster": "none", "port": 0, "metrics_port": 0}


def cold(device: str = "cpu", threads: int = 1, **_: Any) -> Launcher:
    """Ranks that need no torch start from a server that imports none."""
    return Launcher(device, threads, path=[ROOT], warm=False)


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job, "ENTRY", "tests.jobs.replica_cases:main")
    monkeypatch.setattr(hocket.launch, "Launcher", cold)
    return model(tmp_path / "model")


def post(address: str, **body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({"prompt": "Once upon", "max_tokens": 4, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


class Visitor:
    """Does its part in a thread when the server is ready, and then asks for its end."""

    def __init__(self, visit: Callable[[dict[str, Any]], None], ends: bool = True) -> None:
        self.visit = visit
        self.ends = ends
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "ready":
            self.thread = threading.Thread(target=self._run, args=(event,))
            self.thread.start()

    def _run(self, event: dict[str, Any]) -> None:
        try:
            self.visit(event)
        except BaseException as error:
            self.error = error
        finally:
            if self.ends or self.error:
                os.kill(os.getpid(), signal.SIGTERM)

    def said(self) -> str:
        return "\n".join(e["text"] for e in self.events if e["event"] == "note")

    def over(self) -> None:
        assert self.thread is not None, "it was never ready"
        self.thread.join(60)
        if self.error is not None:
            raise self.error


def asked(run: Path, tokens: int) -> None:
    """Wait until a request for so many tokens has come to a rank."""
    for _ in range(1000):
        if (run / f"asked-{tokens}").exists():
            return
        time.sleep(0.01)
    raise AssertionError("no request has come")


def pids(run: Path) -> list[int]:
    files = [f for f in run.iterdir() if f.name.count("-") == 2 and not f.name.endswith("left")]
    return [int(text) for text in (f.read_text() for f in files) if text]


def gone(run: Path) -> bool:
    """Whether no rank is left; the kernel ends those of a killed server within moments."""
    for _ in range(200):
        if not [pid for pid in pids(run) if Path(f"/proc/{pid}").exists()]:
            return True
        time.sleep(0.05)
    return False


def test_it_answers_on_two_replicas_and_ends_in_order(where: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        answers = [post(address) for _ in range(4)]
        assert [code for code, _ in answers] == [200] * 4
        assert answers[0][1]["usage"]["completion_tokens"] == 4
        assert answers[0][1]["model"] == "model"
        assert status(f"{address}/health") == 200
        assert status(f"{address}/ready") == 200
        assert status(f"{event['metrics']}/metrics") == 200
        assert status(f"{address}/metrics") == 404
        code, refused = post(address, max_tokens=10_000)
        assert code == 400
        assert "128" in refused["error"]["message"]
        code, refused = post(address, n=13)
        assert code == 400
        assert refused["error"]["message"].endswith("at most 12")  # two replicas of 4 + 2

    visitor = Visitor(visit)
    few = {"max_num_seqs": 4, "max_queue": 2, **SMALL}
    found = hocket.serve(where, layout="dp2", run=run, on_event=visitor, **few)
    visitor.over()
    assert found.drained
    assert (found.measured.requests, found.measured.output_tokens) == (4, 16)
    assert gone(run)
    spec = RunFolder(run).load()
    assert spec.serving is not None
    assert (spec.command, spec.layout.dp, spec.serving.max_model_len) == ("serve", 2, 128)
    assert ServingMeasured.from_json((run / "measured.json").read_text()).requests == 4
    assert "none" in ServingForecast.from_json((run / "forecast.json").read_text()).why
    (entered,) = [one for one in ledger.read_all_entries()[1] if one.run == str(run.resolve())]
    assert (entered.layout, entered.requests, entered.predicted) == ("dp2", 4, None)
    assert entered.measured.cache_tokens
    assert json.loads((run / "background_load.json").read_text()) == {"cores": entered.others}
    assert entered.measured.decode_seconds


@pytest.mark.parametrize(("forced", "code"), [(False, 0), (True, 1)])
def test_the_exit_code_of_a_server_that_did_not_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool, code: int
) -> None:
    """A drain that takes its whole time is no failure, a second signal that cuts requests is."""
    import hocket.cli.serve as verb
    from hocket.jobs.serving import server

    nothing: Any = None
    found = server.ServerResult(
        run=tmp_path, address="", metrics="", measured=nothing, drained=False, forced=forced
    )
    monkeypatch.setattr(server, "serve_model", lambda *_, **__: found)
    monkeypatch.setattr(verb, "_summary", lambda served: None)
    assert main(["serve", str(tmp_path)]) == code


def test_the_command(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import hocket.cli.serve as verb

    visitor = Visitor(lambda event: None)
    plain = verb._line

    def both(event: dict[str, Any]) -> None:
        plain(event)
        visitor(event)

    monkeypatch.setattr(verb, "_line", both)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    words = ["serve", str(where), "--run", str(tmp_path / "run"), "--port", "0"]
    assert main([*words, "--metrics-port", "0", "--cluster", "none", "--device", "cpu"]) == 0
    visitor.over()
    said = capsys.readouterr().out
    assert "warning: no kernels in C: no C compiler (gcc, clang, cc)" in said
    assert "Fix: apt-get install gcc libc6-dev, or set CC" in said
    assert "ready after" in said
    assert "at http://127.0.0.1:" in said
    assert f"hocket report {tmp_path / 'run'}" in said


def test_a_killed_rank_is_a_503_and_the_next_request_succeeds(where: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    codes: list[int] = []

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        asking = threading.Thread(
            target=lambda: codes.append(post(address, max_tokens=100, ignore_eos=True)[0])
        )
        asking.start()
        asked(run, 100)
        os.kill(int((run / "0-0-0").read_text()), signal.SIGKILL)
        asking.join(60)
        for _ in range(300):
            if status(f"{address}/ready") == 200:
                break
            time.sleep(0.05)
        assert post(address)[0] == 200

    visitor = Visitor(visit)
    found = hocket.serve(where, run=run, on_event=visitor, **SMALL)
    visitor.over()
    assert codes == [503]
    assert (found.measured.restarts, found.measured.failed) == (1, 1)
    assert "replica 0 died" in visitor.said()
    assert gone(run)


def test_the_first_signal_lets_requests_end_and_the_second_does_not(
    where: Path, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []

    def ask(event: dict[str, Any], tokens: int) -> threading.Thread:
        address, run = event["address"], Path(event["run"])

        def body() -> None:
            code, answer = post(address, max_tokens=tokens, ignore_eos=True)
            done.append((code, answer.get("usage", {}).get("completion_tokens", 0)))

        thread = threading.Thread(target=body)
        thread.start()
        asked(run, tokens)
        return thread

    def gently(event: dict[str, Any]) -> None:
        thread = ask(event, 100)
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join(60)

    visitor = Visitor(gently, ends=False)
    found = hocket.serve(where, run=tmp_path / "one", on_event=visitor, **SMALL)
    visitor.over()
    assert done == [(200, 100)]
    assert found.drained
    assert "1 requests have 30 s to end" in visitor.said()

    def at_once(event: dict[str, Any]) -> None:
        thread = ask(event, 119)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        thread.join(60)

    visitor = Visitor(at_once, ends=False)
    found = hocket.serve(where, run=tmp_path / "two", on_event=visitor, **SMALL)
    visitor.over()
    assert done[-1][0] != 200
    assert not found.drained
    assert found.forced
    assert gone(tmp_path / "one")
    assert gone(tmp_path / "two")


def test_requests_that_outlast_the_drain_are_cut(where: Path, tmp_path: Path) -> None:
    codes: list[int] = []

    def visit(event: dict[str, Any]) -> None:
        address = event["address"]
        thread = threading.Thread(target=lambda: codes.append(post(address, max_tokens=119)[0]))
        thread.start()
        asked(tmp_path / "run", 119)
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join(60)

    visitor = Visitor(visit, ends=False)
    found = hocket.serve(where, run=tmp_path / "run", on_event=visitor, drain_seconds=0.1, **SMALL)
    visitor.over()
    assert not found.drained
    assert not found.forced
    assert codes == [503]
    assert "ended before their time" in visitor.said()
    assert gone(tmp_path / "run")


def test_a_server_that_cannot_keep_what_it_measured_has_ended_well(
    where: Path, tmp_path: Path
) -> None:
    """As on a full disk, or in a folder that was removed meanwhile."""

    def visit(event: dict[str, Any]) -> None:
        assert post(event["address"])[0] == 200
        file = tmp_path / "run" / "measured.json"
        file.unlink()
        (file / "taken").mkdir(parents=True)

    visitor = Visitor(visit)
    found = hocket.serve(where, run=tmp_path / "run", on_event=visitor, **SMALL)
    visitor.over()
    assert found.drained
    assert found.measured.requests == 1
    assert "warning: what was measured is not kept" in visitor.said()
    assert visitor.events[-1]["event"] == "ended"
    assert gone(tmp_path / "run")


def test_a_server_whose_parent_is_killed_leaves_no_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        "import hocket, hocket.launch, hocket.jobs.serving.server as job\n"
        "from tests.jobs.test_serve import cold, SMALL\n"
        "job.ENTRY = 'tests.jobs.replica_cases:main'\n"
        "hocket.launch.Launcher = cold\n"
        f"hocket.serve({str(model(tmp_path / 'model'))!r}, layout='dp2', run={str(run)!r},\n"
        "             on_event=lambda e: print(e['event'], flush=True), **SMALL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line == "ready\n" for line in process.stdout)
        assert len(pids(run)) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids(run))
        process.kill()
    assert gone(run)


@pytest.mark.parametrize(
    ("number", "there"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, False)],
)
def test_a_server_that_is_ended_before_it_is_ready_leaves_no_run(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, there: bool
) -> None:
    monkeypatch.setattr(job, "ENTRY", "tests.jobs.replica_cases:never")
    run, notes = tmp_path / "run", []
    if there:
        run.mkdir()

    def end() -> None:
        while not (run / "0-0-0").exists():  # once there is a rank, signals are heard
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def on_event(event: dict[str, Any]) -> None:
        assert event["event"] != "ready"
        notes.append(event.get("text", ""))
        if event == {"event": "phase", "name": "starting ranks"}:
            threading.Thread(target=end).start()

    if number == signal.SIGINT:  # as Ctrl-C of any other program
        with pytest.raises(KeyboardInterrupt):
            hocket.serve(where, run=run, on_event=on_event, **SMALL)
    else:
        assert hocket.serve(where, run=run, on_event=on_event, **SMALL).drained
    assert "ended before every replica was ready; no run was recorded" in notes
    assert run.exists() == there
    assert not any((run / name).exists() for name in ("run.json", "forecast.json", "measured.json"))
    assert not [one for one in ledger.read_all_entries()[1] if one.run == str(run.resolve())]


def test_a_start_that_fails_says_why_and_leaves_no_run(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "ENTRY", "tests.jobs.replica_cases:refuse")
    run = tmp_path / "run"
    words = ["serve", str(where), "--run", str(run), "--port", "0", "--metrics-port", "0"]
    assert main([*words, "--cluster", "none", "--device", "cpu", "--layout", "dp2"]) == 2
    assert "the model cannot be served" in capsys.readouterr().err
    assert not run.exists()
