"""One warm server, many runs; the first failure is told in its own words and ends all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import Launcher, failure
from hocket.launch.spare import SpareServer, is_spare
from hocket.launch.watch import LEAVE, Watch
from hocket.spec.errors import LayoutError, OptionError, RankFailure
from tests.ranks import ROOT, RankPool

ranks_needed = pytest.mark.ranks
CASES = "tests.launch.cases:"


def test_the_parent_imports_nothing_heavy() -> None:
    code = "import hocket.launch, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown device 'tpu'"):
        Launcher(device="tpu")


@ranks_needed
def test_several_runs_from_one_server(ranks: RankPool) -> None:
    for world_size, start in ((2, 1), (4, 10), (1, 5)):
        total = sum(start + r for r in range(world_size))
        found = ranks.run(CASES + "add", world_size, start=start)
        assert found == [[total, r, world_size, 1] for r in range(world_size)]


@ranks_needed
def test_ranks_begin_warm_and_listen_on_loopback_only(ranks: RankPool) -> None:
    warm = ["torch", "transformers", "torch._dynamo"]
    found = ranks.run(CASES + "place", 2, backend=None)
    assert found == [[r, True, "cpu", 0, warm] for r in range(2)]
    addresses = ranks.run(CASES + "listeners", 3, backend="gloo")
    assert addresses[0]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert {a for of_rank in addresses for a in of_rank} <= loopback


@ranks_needed
def test_spawned_ranks_begin_as_forked_ones_do() -> None:
    """CUDA ranks are fresh interpreters; what they are told does not need a device."""
    events: list[dict[str, Any]] = []
    with Launcher(device="cuda") as launcher:
        launcher.run(CASES + "tell_place", 2, {}, events.append, attempt=3)
        with pytest.raises(RankFailure, match="rank 0 of 1 failed: ValueError: boom"):
            launcher.run(CASES + "only_fail", 1)
    reported = {event["rank"]: event["place"] for event in events}
    assert reported == {r: [r, True, "cuda", 3, []] for r in range(2)}


@ranks_needed
def test_the_server_keeps_no_thread_but_its_own(ranks: RankPool) -> None:
    ranks.run(CASES + "place", 1, backend=None)
    assert len(os.listdir(f"/proc/{ranks.launcher._server.pid}/task")) == 1


@ranks_needed
def test_output_and_events_arrive_whole(ranks: RankPool, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    lines: list[tuple[int, str]] = []
    payload = {"events": 20, "size": 50_000}
    ranks.launcher.run(
        CASES + "speak",
        2,
        payload,
        events.append,
        on_output=lambda r, text: lines.append((r, text)),
    )
    for rank in range(2):
        mine = [e for e in events if e["rank"] == rank]
        assert [e["number"] for e in mine] == list(range(20))
        assert {len(e["text"]) for e in mine} == {50_000}
        said = [text for r, text in lines if r == rank]
        assert said == [f"out of {rank}", f"err of {rank}", "no newline"]
    ranks.launcher.run(CASES + "speak", 2, {"events": 0, "size": 0}, logs=tmp_path / "logs")
    assert (tmp_path / "logs" / "rank-1.log").read_text().splitlines()[0] == "out of 1"


def failing(ranks: RankPool, how: str, **options: Any) -> tuple[Exception, float]:
    """What a run raises whose rank 1 of 3 ends as `how` says, and after how long."""
    payload = {"how": how, "rank": 1, "backend": options.pop("backend", "gloo")}
    pids: list[int] = []
    begin = 0.0

    def hear(event: dict[str, Any]) -> None:
        nonlocal begin
        pids.append(event["pid"])
        begin = time.monotonic()

    with pytest.raises(Exception) as caught:  # noqa: PT011  the callers look at it
        ranks.launcher.run(
            CASES + "fail",
            3,
            payload,
            on_event=hear,
            on_output=lambda rank, line: None,
            **options,
        )
    seconds = time.monotonic() - begin
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert seconds < 10.0
    return caught.value, seconds


@ranks_needed
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_first_failing_rank_shows_its_own_traceback(ranks: RankPool, backend: str) -> None:
    error, _ = failing(ranks, "raise", backend=backend)
    assert isinstance(error, RankFailure)
    assert str(error).startswith("rank 1 of 3 failed: ValueError: boom in the middle")
    assert 'raise ValueError("boom in the middle")' in str(error)
    assert str(error).count("Traceback") == 1
    assert "hocket/launch" not in str(error)


@ranks_needed
def test_a_hocket_error_comes_back_as_itself(ranks: RankPool) -> None:
    error, _ = failing(ranks, "hocket")
    assert type(error) is LayoutError
    assert (error.message, error.hint) == ("8 heads over tp3", "--layout tp2")


@ranks_needed
@pytest.mark.parametrize(
    ("how", "telling"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segv", "was killed by SIGSEGV"),
        ("exit", "left with exit code 3 in the middle of the run"),
        ("leave", "left with exit code 0 in the middle of the run"),
        ("sys.exit", "SystemExit: cannot go on"),
    ],
)
def test_every_other_end_is_reported(ranks: RankPool, how: str, telling: str) -> None:
    error, _ = failing(ranks, how, backend="shm" if how == "kill" else "gloo")
    assert isinstance(error, RankFailure)
    assert str(error).startswith("rank 1 of 3")
    assert telling in str(error)
    if how != "sys.exit":
        assert "about to fail" in str(error)
    if how == "segv":
        assert "in end_as" in str(error)  # the stack of the crash


@ranks_needed
@pytest.mark.parametrize(("how", "telling"), [("hang", "in dwell"), ("stop", "is stopped")])
def test_a_hung_rank_is_found_and_its_stack_shown(ranks: RankPool, how: str, telling: str) -> None:
    error, _ = failing(ranks, how, silence_timeout=3.0, backend="shm")
    assert isinstance(error, RankFailure)
    assert "no rank gave a sign of life for 3 s" in str(error)
    suspect = str(error).index("rank 1 (the others may be waiting for it)")
    assert telling in str(error)[suspect:]
    assert suspect < str(error).index("rank 0:")
    assert suspect < str(error).index("rank 2:")
    assert failure.NO_STACK not in str(error)  # each dump was read to its end


@ranks_needed
def test_a_time_out_shows_where_the_missing_rank_is(ranks: RankPool) -> None:
    """The peers give up first: their time-out is a symptom, the silent rank's stack the cause."""
    payload = {"how": "hang", "rank": 1, "backend": "shm", "timeout": 3.0}
    with pytest.raises(RankFailure) as caught:
        ranks.launcher.run(CASES + "fail", 2, payload, on_output=lambda rank, line: None)
    assert "did not come: rank 1" in str(caught.value)
    assert "in dwell" in str(caught.value)


@ranks_needed
def test_announced_silence_and_beats_are_no_hang(ranks: RankPool) -> None:
    ranks.launcher.run(CASES + "long_step", 2, {}, silence_timeout=2.0)


@ranks_needed
def test_a_stop_that_is_asked_before_there_are_ranks(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Watch.begin

    def asked(self: Watch, *given: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        begin(self, *given)

    monkeypatch.setattr(Watch, "begin", asked)
    ranks.launcher.run(CASES + "until_asked", 1, {}, stoppable=True)


@ranks_needed
def test_a_reader_that_has_gone_is_not_blamed_on_the_server(ranks: RankPool) -> None:
    def gone(event: dict[str, Any]) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ranks.launcher.run(CASES + "tell_place", 2, {}, gone)
    ranks.launcher.run(CASES + "tell_place", 2, {}, lambda event: None)


@ranks_needed
def test_an_entry_that_is_not_there(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="no attribute 'nowhere'"):
        ranks.launcher.run("tests.launch.cases:nowhere", 1)


@ranks_needed
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_parent_leaves_no_process(number: int, code: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.parent", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        pids = [int(parent.stdout.readline().split()[1])]
        pids += [int(parent.stdout.readline().split()[1]) for _ in range(2)]
        parent.send_signal(number)
        assert parent.wait(timeout=10.0) == code  # short: it is what is tested
        end = time.monotonic() + 5.0  # short: it is what is tested
        while any(alive(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)
        assert not [pid for pid in pids if alive(pid)]
        assert ("interrupted" in parent.stdout.read()) == (number == signal.SIGINT)
    finally:
        parent.kill()
        parent.stdout.close()


@ranks_needed
def test_an_interrupt_while_the_server_imports_does_not_wait_for_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.parent", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STOPPED": "1"},
    )
    assert parent.stdout is not None
    try:
        server = int(parent.stdout.readline().split()[1])
        assert parent.stdout.readline() == "running\n"
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=LEAVE + 3.0) == 130  # to ask it first would take 90 s
        assert not alive(server)
    finally:
        parent.kill()
        parent.stdout.close()


@ranks_needed
def test_a_server_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks end with it; so is one that is ended with ranks that do not leave in time. A server
    that `kill` ended stays so."""
    with Launcher(warm=False) as launcher:
        first = launcher._server

        def kill(event: dict[str, Any]) -> None:
            first.kill()

        with pytest.raises(RankFailure, match=rf"process {first.pid}\) was killed by SIGKILL"):
            launcher.run(CASES + "wait", 2, {}, kill)
        assert launcher.revive()
        events: list[dict[str, Any]] = []
        launcher.run(CASES + "tell_place", 2, {}, events.append)
        assert sorted(event["rank"] for event in events) == [0, 1]
        monkeypatch.setattr(Watch, "end", lambda watch: False)
        with pytest.raises(RankFailure, match="ValueError: boom"):
            launcher.run(CASES + "only_fail", 1)
        assert not launcher.alive
        launcher.run(CASES + "tell_place", 1, {}, events.append)
        launcher._server.kill()  # between two runs
        launcher._server.wait()
        launcher.preload(["json"])
        launcher.run(CASES + "tell_place", 1, {}, events.append)
        launcher.kill()
        assert not launcher.revive()
        with pytest.raises(RankFailure, match="fork server"):
            launcher.run(CASES + "tell_place", 1)


@ranks_needed
def test_a_killed_server_is_replaced_by_its_spare(ranks: RankPool) -> None:
    """Which imports nothing, has a spare of its own, and leaves with the launcher."""
    launcher = ranks.launcher
    launcher.run(CASES + "tell_place", 1)
    servers = []
    for when in ("between two runs", "in a run"):
        server = launcher._server
        servers.append(server.pid)
        if when == "in a run":
            with pytest.raises(RankFailure, match=rf"process {server.pid}\) ended"):
                launcher.run(CASES + "wait", 2, {}, lambda event: launcher._server.kill())
        else:
            server.kill()
        server.wait(5)  # short: it is what is tested
        assert launcher.revive()
        assert isinstance(launcher._server, SpareServer)
        events: list[dict[str, Any]] = []
        launcher.run(CASES + "tell_place", 2, {}, events.append)
        assert sorted(event["rank"] for event in events) == [0, 1]
        assert not is_spare(launcher._server.pid), "it is the server now"
    assert launcher._server.pid not in servers
    with Launcher(warm=False) as another:
        another._cold = False  # as a warm one makes a spare
        another.run(CASES + "tell_place", 1)
        spare = children(another._server.pid)
        assert len(spare) == 1
        assert is_spare(spare[0])
    assert not alive(spare[0])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Not gone, and not merely waiting to be counted by the process that adopted it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
