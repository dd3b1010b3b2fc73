"""One run as the parent sees it: ranks begin, speak, and end; the first failure ends all.

asked -> began -> started -> events ... -> finished -> asked to leave -> ended 0
                     |            |
                     +------------+-> failed, killed, silent -> all are ended
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from hocket.launch import failure, lines
from hocket.launch.heartbeat import Beat, Hearts
from hocket.spec.errors import RankFailure
from hocket.spec.install import install_line

Event = dict[str, Any]
TAIL = 20  # lines of a dead rank's output that its failure shows
GRACE = 0.1  # seconds for peers' failures to arrive, so that they can be counted
SYMPTOM_GRACE = 3.0  # seconds for the cause to arrive where only symptoms have
LAST_CHUNKS = 4096  # of a dead rank's descriptors: all that is left, within reason
STOPPED = 3.5  # seconds after which a rank that is stopped counts as failed
TURN = 0.2  # seconds between two looks at the heartbeats
ANSWER = 0.3  # seconds after the last answer of a rank in which the next one comes, or none
BUSY = 3.0  # times as long, where a rank computes or waits for a disk
STATES = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped"}
LEAVE = 2.0  # seconds between asking ranks to end and killing them


@dataclasses.dataclass
class Rank:
    """The parent's ends of one rank's descriptors, and what is known of it."""

    rank: int
    connection: socket.socket
    events: lines.LineReader
    output: lines.LineReader
    stacks: int
    pid: int | None = None
    finished: bool = False
    ended: bool = False
    failure: failure.Failure | None = None
    position: dict[str, Any] | None = None
    tail: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=TAIL)
    )

    def close(self) -> None:
        self.connection.close()
        os.close(self.output.fd)
        os.close(self.stacks)


class Watch:
    """Asks the server for the ranks of one run and sees it through."""

    def __init__(
        self,
        control: socket.socket,
        world_size: int,
        *,
        on_event: Callable[[Event], None] | None,
        on_output: Callable[[int, str], None] | None,
        logs: Path | None,
        startup_timeout: float,
        silence_timeout: float,
    ) -> None:
        self.control = control
        self.world_size = world_size
        self.on_event = on_event
        self.on_output = on_output or print_line
        self.logs = logs
        self.startup_timeout = startup_timeout
        self.silence_timeout = silence_timeout
        self.ranks: list[Rank] = []
        self.files: dict[int, IO[str]] = {}
        self.hearts = Hearts(world_size)
        self._ticks: tuple[int, ...] = ()
        self._ticked = time.monotonic()
        self._stopped: dict[int, float] = {}
        self.times: dict[str, float] = {}
        self.begun = False
        self._stop = False
        self.allowed = startup_timeout
        self.heard = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self._from_server)

    def begin(self, start: bytes, listener: socket.socket, spawn: bool) -> None:
        """Have the server start the ranks; `start` is the message each of them reads."""
        paper = os.memfd_create("hocket-start")
        try:
            os.write(paper, start)
            lines.send(
                self.control,
                {"do": "run", "spawn": spawn},
                [paper, listener.fileno(), self.hearts.fd],
            )
        finally:
            os.close(paper)
        for rank in range(self.world_size):
            self._begin_rank(rank)
        lines.send(self.control, {"do": "begun"})
        if self._stop:  # before there was a rank to ask
            self.ask_stop()
        self.heard = time.monotonic()

    def _begin_rank(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        ours.setblocking(False)
        stacks = os.memfd_create(f"hocket-stacks-{rank}")
        reader = lines.LineReader(ours.fileno())
        entry = Rank(rank, ours, reader, lines.LineReader(read_end), stacks)
        self.ranks.append(entry)
        message = {"do": "rank", "rank": rank}
        try:
            lines.send(self.control, message, [theirs.fileno(), write_end, stacks])
        finally:
            theirs.close()
            os.close(write_end)
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._from_rank(entry))
        self.selector.register(read_end, selectors.EVENT_READ, lambda: self._from_output(entry))

    # -- what arrives

    def _from_server(self) -> None:
        packet = lines.receive(self.control)
        if packet is None:
            raise RankFailure("the fork server ended; its ranks ended with it")
        message, _ = packet
        match message["did"]:
            case "warmed":
                self.times.update({f"import {k}": v for k, v in message["seconds"].items()})
            case "failed":
                wrong = "; ".join(f"{k}: {v}" for k, v in message["wrong"].items())
                raise RankFailure(
                    f"what ranks need cannot be imported: {wrong}",
                    hint=install_line("train"),
                )
            case "began":
                self.ranks[message["rank"]].pid = message["pid"]
            case "ended":
                self._ended(self.ranks[message["rank"]], message["code"], message["time"])

    def _ended(self, entry: Rank, code: int, when: float) -> None:
        # What it said before its end is still in the pipes, and says more than the code.
        self._from_rank(entry, LAST_CHUNKS)
        self._from_output(entry, LAST_CHUNKS)
        entry.ended = True
        if entry.failure is None and not entry.finished:
            tail = (*entry.tail, *_read_memory_file(entry.stacks).splitlines())
            entry.failure = failure.Failure(entry.rank, entry.pid, when, None, code, tail)

    def _from_rank(self, entry: Rank, num_chunks: int = 16) -> None:
        if not entry.events.ended:
            for line in entry.events.read(num_chunks):
                self._hear(entry, json.loads(line))
            if entry.events.ended:
                self.selector.unregister(entry.connection)

    def _hear(self, entry: Rank, message: Event) -> None:
        kind = message.get("launch")
        if kind == "position":  # no sign of life: a thread answers, whatever the rank waits for
            entry.position = message["position"]
            return
        self.heard = time.monotonic()
        if kind is None:
            self.begun = True
            self.allowed = self.silence_timeout
            message["rank"] = entry.rank
            if self.on_event is not None:
                self.on_event(message)
        elif kind == "beat":
            self.begun = True
            self.allowed = self.silence_timeout
        elif kind == "expect":
            self.begun = True
            self.allowed = max(self.silence_timeout, message["seconds"])
        elif kind == "started":
            self.times[f"rank {entry.rank} started"] = message["time"]
        elif kind == "finished":
            entry.finished = True
        elif kind == "failed":
            entry.failure = failure.Failure(entry.rank, entry.pid, message["time"], message)

    def _from_output(self, entry: Rank, num_chunks: int = 16) -> None:
        if not entry.output.ended:
            for line in entry.output.read(num_chunks):
                text = line.decode(errors="replace").rstrip("\r")
                entry.tail.append(text)
                if self.logs is None:
                    self.on_output(entry.rank, text)
                else:
                    self._log(entry.rank, text)
            if entry.output.ended:
                self.selector.unregister(entry.output.fd)

    def _log(self, rank: int, text: str) -> None:
        if rank not in self.files:
            assert self.logs is not None
            self.logs.mkdir(parents=True, exist_ok=True)
            self.files[rank] = open(self.logs / f"rank-{rank}.log", "a", buffering=1)  # noqa: SIM115
        print(text, file=self.files[rank])

    # -- the course of a run

    def see_through(self) -> None:
        """Until all ranks have finished and left. Raises the HocketError that ended the run."""
        while not all(entry.finished for entry in self.ranks):
            if any(entry.failure for entry in self.ranks):
                raise self._conclude()
            if not self._turn(TURN) and time.monotonic() - self.heard > self.allowed:
                raise self._silence(self.allowed)
            self._require_progress()
        for entry in self.ranks:
            with contextlib.suppress(OSError):
                entry.connection.send(b"\n")
        self._wait_for_end(10.0)

    def _require_progress(self) -> None:
        """Raise RankFailure where no rank's heartbeat changes for longer than the ranks allow, or
        a rank is stopped."""
        now = time.monotonic()
        beats = self.hearts.read()
        ticks = tuple(beat.ticks for beat in beats)
        if ticks != self._ticks:
            self._ticks, self._ticked = ticks, now
            self._stopped.clear()
            return
        waited = now - self._ticked
        if waited < 1.0:
            return
        running = [e for e in self.ranks if not (e.finished or e.ended or e.failure)]
        states = {e.rank: state(e.pid) for e in running}
        for rank, word in states.items():
            if word != STATES["T"]:
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED - 1.0:
                raise self._silence(waited, [rank])
        allowed = max((beats[e.rank].allowed for e in running), default=0.0)
        if any(word in (STATES["R"], STATES["D"]) for word in states.values()):
            allowed *= BUSY  # it computes, or waits for a disk: slow is more likely than hung
        if allowed and waited > allowed:
            raise self._silence(waited)

    def _silence(self, seconds: float, stopped: list[int] | None = None) -> RankFailure:
        """The failure of a run that does not progress: whose it is, and where every rank is."""
        beats: dict[int, Beat] = dict(enumerate(self.hearts.read()))
        positions = self.positions()
        stopped = stopped or [
            e.rank for e in self.ranks if not e.ended and state(e.pid) == STATES["T"]
        ]
        stacks = self.stacks(stopped=stopped)
        for rank in stopped:
            stacks[rank] = (
                f"  the process is stopped (SIGSTOP); its stack when it went on:\n{stacks[rank]}"
            )
        return failure.silence(seconds, stacks, self.begun, positions, beats=beats, stopped=stopped)

    def _turn(self, timeout: float) -> bool:
        """Handle what has arrived; whether anything had."""
        ready = self.selector.select(timeout)
        for key, _ in ready:
            if key.fileobj in self.selector.get_map():
                key.data()
        return bool(ready)

    def _conclude(self) -> Exception:
        begin = time.monotonic()
        while True:
            failures = [entry.failure for entry in self.ranks if entry.failure]
            grace = SYMPTOM_GRACE if failure.first(failures).symptom else GRACE
            left = begin + grace - time.monotonic()
            if left <= 0 or len(failures) == self.world_size:
                break
            self._turn(left)
        stacks = ""
        if failure.first(failures).symptom:
            alive = [e.rank for e in self.ranks if not (e.failure or e.finished)]
            positions = self.positions() if alive else {}
            stacks = (
                failure.show_stacks(self.stacks(alive), failure.behind(positions)) if alive else ""
            )
        return failure.to_error(failures, self.world_size, stacks)

    def positions(self) -> failure.Positions:
        """How far each living rank has come in its collectives; None of one that cannot answer."""
        asked = [e for e in self.ranks if not (e.ended or e.finished or e.failure)]
        for entry in asked:
            entry.position = None
            with contextlib.suppress(OSError):
                entry.connection.send(b"?")
        end, missing = time.monotonic() + 2.0, len(asked)
        while missing and (left := end - time.monotonic()) > 0:
            self._turn(left)
            before, missing = missing, sum(e.position is None for e in asked)
            if missing < before:
                end = time.monotonic() + ANSWER
        return {entry.rank: entry.position for entry in asked}

    def stacks(
        self, ranks: list[int] | None = None, stopped: Collection[int] = ()
    ) -> dict[int, str]:
        """Where each living rank is, asked by SIGUSR2; a rank that cannot answer is described.

        A process that is `stopped` answers when it goes on, before it does anything else.
        """
        alive = [e for e in self.ranks if not (e.ended or e.finished or e.failure)]
        asked = [e for e in alive if ranks is None or e.rank in ranks]
        before = {e.rank: os.fstat(e.stacks).st_size for e in asked}
        self._signal(signal.SIGUSR2, asked)
        if stopped:
            self._signal(signal.SIGCONT, [e for e in asked if e.rank in stopped])
        end = time.monotonic() + 2.0
        texts: dict[int, str] = {}
        while True:
            texts = {e.rank: _read_memory_file(e.stacks, before[e.rank]) for e in asked}
            if all(map(failure.is_whole, texts.values())) or time.monotonic() > end:
                break
            self._turn(0.0)
            time.sleep(0.05)
        found = {}
        for entry in asked:
            text = found[entry.rank] = failure.trim(texts[entry.rank])
            if not failure.is_whole(texts[entry.rank]):
                known = f"{failure.NO_STACK} (process {entry.pid or '?'} is {state(entry.pid)})"
                found[entry.rank] = f"{known}:\n{text}" if text else known
        return found

    def ask_stop(self) -> None:
        """Have rank 0 lead all ranks to a stop. Called in a signal's handler."""
        self._stop = True
        if self.ranks:
            with contextlib.suppress(OSError):
                self.ranks[0].connection.send(b"s")

    def _signal(self, number: int, entries: list[Rank]) -> None:
        numbers = [e.rank for e in entries if not e.ended]
        lines.send(self.control, {"do": "signal", "signal": int(number), "ranks": numbers})

    @property
    def any_rank(self) -> bool:
        """Whether the server has answered that it started a rank."""
        return any(entry.pid is not None for entry in self.ranks)

    def end(self) -> bool:
        """End every rank that lives: asked first, then killed. False if some would not go."""
        living = [entry for entry in self.ranks if not entry.ended]
        self.on_event = None
        for number, wait in ((signal.SIGTERM, LEAVE), (signal.SIGKILL, 5.0)):
            if all(entry.ended for entry in living):
                break
            try:
                self._signal(number, living)
                self._wait_for_end(wait)
            except (OSError, RankFailure):
                return False  # the server is gone, and the kernel ended its ranks
        return all(entry.ended for entry in living)

    def _wait_for_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not all(entry.ended for entry in self.ranks):
            left = end - time.monotonic()
            if left <= 0:
                return
            self._turn(left)

    def close(self) -> None:
        """Give back every descriptor of this run; the control socket is the launcher's."""
        self.selector.close()
        self.hearts.close()
        for entry in self.ranks:
            entry.close()
        for file in self.files.values():
            file.close()


def print_line(rank: int, text: str) -> None:
    """The default for a rank's output: the parent's standard error, with the rank before it."""
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


def _read_memory_file(fd: int, offset: int = 0) -> str:
    return os.pread(fd, max(os.fstat(fd).st_size - offset, 0), offset).decode(errors="replace")


def state(pid: int | None) -> str:
    """What the kernel says a process does, in a word."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone" if pid else "not started yet"
    return STATES.get(letter, letter)
