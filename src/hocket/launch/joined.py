"""Joining ranks that someone else started: torchrun, Slurm's srun, or any launcher like them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hocket.launch import gpus
from hocket.launch.context import RankContext
from hocket.launch.joined_store import JOINING, World, open_store
from hocket.launch.launcher import raising_on_sigterm
from hocket.launch.lost import lost_ranks, peer_text, publish_process
from hocket.launch.orphan import end_with_launcher
from hocket.launch.rank import load_entry, lost_peer
from hocket.spec.errors import HocketError, LayoutError, RankFailure
from hocket.spec.launcher_variables import launcher_number

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Event = dict[str, Any]
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS, _STEPS = 2**16 - 1, 2**32 - 1
"""The highest port; of jobs and steps of Slurm, whose numbers have 32 bits."""


def joined_context(environment: Mapping[str, str] | None = None) -> RankContext | None:
    """This process's place in a world that another launcher started; None if there is none.

    Counted as such: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT all set (torchrun and its
    like), or a task of an `srun` step of several tasks. Half a set is not enough: a shell may
    carry leftovers.

    Raises:
        LayoutError: a variable that holds no number, or one out of range: a rank outside of its
            world would wait for one that never comes together.
    """
    world = _read(os.environ if environment is None else environment)
    if world is None:
        return None
    return RankContext(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        device_kind="cuda" if gpus.cuda_shows() else "cpu",
        one_machine=world.one_machine,
        attempt=world.attempt,
        watched=False,
        address=world.address,
        _send=lambda message: None,
        _open_store=lambda timeout: open_store(world, timeout),
        _agree=(lambda store: _agreed(store, world)) if world.counts_apart else None,
        _opened=_watched if world.world_size > 1 else None,
    )


def launched_ranks() -> tuple[int, int]:
    """This process's rank and the world size of its launcher; (0, 1) without a launcher, or where
    its variables cannot be read."""
    with contextlib.suppress(LayoutError):
        if (world := _read(os.environ)) is not None:
            return world.rank, world.world_size
    return 0, 1


def _read(environment: Mapping[str, str]) -> World | None:
    number = functools.partial(launcher_number, environment)
    if all(environment.get(name) for name in _NEEDED):
        world_size = number("WORLD_SIZE", least=1)
        none = 1 if world_size == 1 else 0
        return World(
            rank=number("RANK", most=world_size - 1),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", number("SLURM_LOCALID", 0), most=world_size - 1),
            one_machine=number("LOCAL_WORLD_SIZE", none, least=1, most=world_size) == world_size,
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
            address=environment["MASTER_ADDR"],
            port=number("MASTER_PORT", least=1, most=_PORTS),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            counts_apart=world_size > 1 and "TORCHELASTIC_RESTART_COUNT" in environment,
        )
    slurm = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if all(environment.get(name) for name in slurm):
        world_size = number("SLURM_STEP_NUM_TASKS", least=1)
        if world_size == 1:  # an interactive shell of one task is no world to join
            return None
        step = number("SLURM_STEP_ID", most=_STEPS)
        job = number("SLURM_JOB_ID", 0, most=_STEPS) * 64 + step
        return World(
            rank=number("SLURM_PROCID", most=world_size - 1),
            world_size=world_size,
            local_rank=number("SLURM_LOCALID", 0, most=world_size - 1),
            one_machine=number("SLURM_STEP_NUM_NODES", 0) == 1,
            attempt=1000 * number("SLURM_RESTART_COUNT", 0) + step,
            address=environment.get("MASTER_ADDR")
            or first_host(environment["SLURM_STEP_NODELIST"]),
            # Two jobs may share a node: a port from the job's own number keeps them apart.
            port=number("MASTER_PORT", 20000 + job % 20000, least=1, most=_PORTS),
            agent_store=False,
        )
    return None


def main_address() -> str:
    """The address of rank 0's host, in a world that another launcher started."""
    world = _read(os.environ)
    assert world is not None, "main_address outside of any launcher's world"
    return world.address


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[003-006,010],login1` begins with `gpu003`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if found is None:
        raise LayoutError(
            f"SLURM_STEP_NODELIST is {nodelist[:60]!r} in the environment; Slurm sets it to a list "
            "of hosts, as in gpu[003-006],login1",
            hint="unset SLURM_STEP_NODELIST",
        )
    stem, number, rest = found.groups(default="")
    return stem + number + rest


_AGREED: list[int] = []
"""The attempt that this process belongs to, once it is known."""


def _agreed(store: Store, world: World) -> int:
    """The number of this attempt, the same on all ranks.

    torchrun's own count is one of each host: a host that starts its ranks again only because those
    of another failed does not count it. So rank 0 counts in the store, and answers the others: each
    asks under a name of its own, since what an earlier attempt left in the store looks the same.
    """
    if not _AGREED:
        if world.rank == 0:
            _AGREED.append(max(world.attempt, store.add("hocket/attempts", 1) - 1))
            ended = threading.Event()
            given = (store.clone(), _AGREED[0], ended)  # type: ignore[attr-defined]
            thread = threading.Thread(target=_answer, args=given, daemon=True, name="attempt")
            thread.start()
            # A thread that is inside the store while the interpreter ends would abort the process:
            # it is asked to end, and waited for.
            atexit.register(thread.join, 5)
            atexit.register(ended.set)
        else:
            name = secrets.token_hex(8)
            try:
                store.set(f"hocket/asked/{store.add('hocket/asked', 1)}", name)
                _AGREED.append(int(store.get(f"hocket/attempt of/{name}")))
            except RuntimeError as error:
                seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
                why = "rank 0 or who served it has ended"
                if not lost_peer(error):
                    why = f"rank 0 has not opened it in {seconds:g} s: stopped, or not started"
                raise RankFailure(
                    f"rank {world.rank} of {world.world_size} lost the store at {world.address}, "
                    f"port {world.port}, before the run began: {why}",
                    hint="rank 0, or its launcher, prints the cause",
                ) from None
    return _AGREED[0]


def _answer(store: Store, attempt: int, ended: threading.Event) -> None:
    """Tell each rank that asks the attempt, as long as the store and this process last."""
    done, waiting = 0, set[int]()
    with contextlib.suppress(Exception):
        while not ended.wait(_ASKED):
            count = store.add("hocket/asked", 0)
            waiting |= set(range(done + 1, count + 1))
            done = count
            for number in sorted(waiting):
                if store.check([f"hocket/asked/{number}"]):
                    name = store.get(f"hocket/asked/{number}").decode()
                    store.set(f"hocket/attempt of/{name}", str(attempt))
                    waiting.remove(number)


_ASKED = 0.05
"""Seconds between two looks for ranks that ask."""


def run_joined(
    entry: str,
    payload: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] | None = None,
    *,
    threads: int | None = 1,
    device: str = "auto",
    world_size: int | None = None,
) -> None:
    """Be this process's rank: call `entry` here and return when it does.

    `on_event` sees the events of this rank alone, each with its number under `rank`. What the
    entry raises is raised; torchrun gets it in its own way, so that it blames this rank.

    Args:
        entry: `module:function`, called as `function(context, payload)`.
        payload: plain data, the same on every rank.
        on_event: called with each event of this rank.
        threads: CPU threads of this rank. None: as the launcher set them.
        device: `cpu`, `cuda`, or `auto`: cuda where torch is built for it and a device shows.
        world_size: ranks that take part, the first ones; None: all that the launcher started.
    """
    context = joined_context()
    assert context is not None, "run_joined outside of any launcher's world"
    end_with_launcher()
    context.world_size = world_size or context.world_size
    if device != "auto":
        context.device_kind = device

    def hear(message: Event) -> None:
        if on_event is not None and "launch" not in message:
            on_event({**message, "rank": context.rank})

    # The interpreter's last collection looks at all that torch has: seconds, of a grace period.
    atexit.register(gc.freeze)
    context._send, context.joined = hear, True
    if context.device_kind == "cuda":  # read by torch when the device is first used
        os.environ |= gpus.rank_settings(os.environ, watched=False)
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    if threads is not None:
        torch.set_num_threads(threads)

    @record
    def call() -> None:
        try:
            with raising_on_sigterm(context.stop_asked.set):
                load_entry(entry)(context, payload or {})
        except BaseException as error:
            main = threading.current_thread() is threading.main_thread()
            if main and "SLURM_STEP_ID" in os.environ:  # srun ends the others: not a stop to obey
                for number in (signal.SIGTERM, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)
            for notice in _NOTICE:
                notice.send(error)
            context.abort()  # or the end of this process would wait for collectives under way
            if lost_peer(error) and not isinstance(error, HocketError):
                logging.getLogger(__name__).debug("a rank is lost", exc_info=error)
                raise _victim(context, error) from None
            raise
        leave_together(context)

    call()


def _victim(context: RankContext, error: BaseException) -> RankFailure:
    """The failure of a rank of which only the connection to another one ended."""
    text = peer_text(str(error)).split("\n", maxsplit=1)[0][:500]
    lost = lost_ranks(context, _NOTICE[0].store if _NOTICE else None)
    who = f"rank {lost[0]}" if len(lost) == 1 else f"one of ranks {', '.join(map(str, lost[:8]))}"
    beat = context.heart.read()
    return RankFailure(
        f"rank {context.rank} of {context.world_size} lost its connection to {who}: {text}"
        + (f"; it was in {beat}" if beat.ticks else ""),
        hint="the rank that ended first, or its launcher, prints the cause; the same command "
        "continues the run",
    )


_NOTICE: list[_Notice] = []
"""That of this process, once the store is open."""


def _watched(context: RankContext, store: Store) -> None:
    """Watch the ranks from here on: `context` has opened the store."""
    if not _NOTICE:
        publish_process(store, context.rank)
        store.add(f"alive/{context.rank}", 1)
        notice = _Notice(context, store)
        _NOTICE.append(notice)
        notice.start()
        end_with_launcher(notice.orphaned)
    _NOTICE[0].context = context


class _Notice(threading.Thread):
    """Tells the ranks of a failure of one of them, through the store.

    No launcher of ours watches these ranks, and one that waits in a collective of NCCL learns of
    a dead peer only when its watchdog does, minutes later. It ends itself here, and reports whose
    failure it was. Each rank counts up a key of its own once a second, from the moment at which it
    opens the store; rank 0 reads those of all ranks, the others that of rank 0. One that does not
    change for `SILENT` seconds is that of a rank that is stopped, or of a host that is frozen or
    cut off; where the host is that of the store, no answer comes, which a second thread finds.

    Args:
        context: of the ranks that take part by now.
        store: a client of this thread's own.
    """

    def __init__(self, context: RankContext, store: Store) -> None:
        super().__init__(daemon=True, name="notice")
        self.context, self.store = context, store
        self.done = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._asked = 0.0

    def run(self) -> None:
        threading.Thread(target=self._watch_store, daemon=True, name="store watch").start()
        store = self.store
        while not self.done.wait(_POLL):
            try:
                self._asked = time.monotonic()
                failed = store.check(["failed"])
                text = store.get("failed").decode(errors="replace") if failed else None
                text = text or self._silent(store)
                self._asked = 0.0
            except Exception as error:
                first = str(error).split("\n", maxsplit=1)[0]
                text = f"the store that the ranks share is gone, and who served it ({first})"
            if text is not None:
                self._end(text)

    def _silent(self, store: Store) -> str | None:
        """Count up this rank's key, and read the others': who has not for too long."""
        context = self.context
        store.add(f"alive/{context.rank}", 1)
        now = time.monotonic()
        for rank in range(1, context.world_size) if context.rank == 0 else (0,):
            count = store.add(f"alive/{rank}", 0)
            limit = SILENT if rank or context.joined else PREPARING
            if not count:
                limit = JOINING if context.joined and rank else math.inf
            if count >= _LEFT or count != self._seen.get(rank, (-1, 0.0))[0] or limit == math.inf:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > limit:
                text = (
                    f"rank {rank} has given no sign of life for {limit:g} s: its process is "
                    "stopped, or its host is frozen or cut off"
                )
                store.set("failed", text)
                return text
        return None

    def _watch_store(self) -> None:
        while not self.done.wait(_POLL):
            asked = self._asked
            if asked and time.monotonic() - asked > SILENT:
                self._end(
                    f"the store on rank 0's host has not answered for {SILENT:g} s: that host is "
                    "frozen, or this one is cut off from it"
                )

    def _end(self, text: str) -> None:
        if not self.done.is_set():
            print(f"rank {self.context.rank} ends: {text}", file=sys.stderr, flush=True)
            if self.context.rank == 0 and not self._asked:
                time.sleep(2 * _POLL)  # it may serve the store that the others read
            self.context.abort()
            os._exit(1)

    def leave(self) -> None:
        """This rank is done: its key is not waited for."""
        if not self.done.is_set():
            self.done.set()
            with contextlib.suppress(Exception):
                self.store.add(f"alive/{self.context.rank}", _LEFT)

    def orphaned(self, why: str) -> None:
        """Tell the other ranks that this one ends with its launcher."""
        self.done.set()
        with contextlib.suppress(Exception):
            self.store.set("failed", f"rank {self.context.rank} ended: {why}")

    def send(self, error: BaseException) -> None:
        """Say that this rank failed, unless it is only another one's victim."""
        self.done.set()
        store, context = self.context._store, self.context
        if store is None or lost_peer(error):
            return
        first = str(error).split("\n", maxsplit=1)[0][:500]
        with contextlib.suppress(Exception):
            store.set("failed", f"rank {context.rank} failed: {type(error).__name__}: {first}")
            if context.rank == 0:
                time.sleep(2 * _POLL)  # it may serve the store that the others read


_POLL = 1.0
"""Seconds between two looks at the store."""
SILENT = 10.0
"""Seconds without a sign of life after which a rank counts as lost. Its thread counts unless a call
in C keeps the interpreter's lock for as long."""
PREPARING = 60.0
"""The same for rank 0 while it reads the data, in which a call in C may take long."""
_LEFT = 1 << 40
"""Added to the key of a rank that is done."""


def leave_unused() -> None:
    """This process has no further part in the run: its silence is no failure."""
    for notice in _NOTICE:
        notice.leave()


def leave_together(context: RankContext) -> None:
    """Every rank calls it at its end. Rank 0 may serve the store, so it leaves last, after a minute
    at most."""
    leave_unused()
    if context.world_size == 1 or context._store is None:
        return
    store = context._store
    store.add("finished", 1)
    if context.rank == 0:
        end = time.monotonic() + 60.0
        while store.add("finished", 0) < context.world_size and time.monotonic() < end:
            time.sleep(0.02)
    context.destroy()
