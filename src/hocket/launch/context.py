"""RankContext: what a rank knows of its world, and how it speaks to the parent."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.launch.heartbeat import Heart
from hocket.spec.errors import HocketError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

DEFAULT_TIMEOUT = 120.0


@dataclasses.dataclass
class RankContext:
    """One rank's place in its world.

    Attributes:
        rank, world_size: of the whole job.
        local_rank: among the ranks of this machine; picks the CUDA device.
        device_kind: `cpu` or `cuda`.
        one_machine: all ranks share this machine (and its memory).
        attempt: 0 at first, counted up by every restart; keys of the store carry it. Under torchrun
            the ranks agree on it when the store is opened.
        watched: a parent of ours watches the rank, and ends it.
        joined: of another launcher, and in its entry.
        address: of the host of rank 0.
        position: gives, as plain data, how far the rank has come in its collectives
            (`Mesh.position`); asked from another thread, where the run is silent.
        stop_asked: set once the job is asked to save and stop: by SIGTERM or SIGUSR1 to the parent,
            which tells rank 0, or to any rank of another launcher's.
        heart: where the rank writes its progress, for the parent to read.
    """

    rank: int
    world_size: int
    local_rank: int
    device_kind: str
    one_machine: bool
    attempt: int
    _send: Callable[[dict[str, Any]], None] = dataclasses.field(repr=False)
    _open_store: Callable[[float], Store] = dataclasses.field(repr=False)
    _store: Store | None = dataclasses.field(default=None, repr=False)
    _agree: Callable[[Store], int] | None = dataclasses.field(default=None, repr=False)
    _opened: Callable[[RankContext, Store], None] | None = dataclasses.field(
        default=None, repr=False
    )
    watched: bool = True
    joined: bool = False
    address: str = "127.0.0.1"
    position: Callable[[], dict[str, Any]] | None = dataclasses.field(default=None, repr=False)
    stop_asked: threading.Event = dataclasses.field(default_factory=threading.Event, repr=False)
    heart: Heart = dataclasses.field(default_factory=Heart, repr=False)

    def emit(self, event: dict[str, Any]) -> None:
        """Hand an event (a dictionary of plain values with a key `event`) to the parent.

        It also counts as a sign of life. May be called from any thread.
        """
        self._send(event)

    def beat(self) -> None:
        """A sign of life and nothing else, for stretches that have no event of their own."""
        self._send({"launch": "beat"})

    def expect(self, seconds: float) -> None:
        """The silence that begins now may last this long (a first step, a save, an evaluation).

        Holds until the next sign of life of any rank that comes without it.
        """
        self._send({"launch": "expect", "seconds": seconds})

    def store(self, timeout: float = DEFAULT_TIMEOUT) -> Store:
        """The key-value store that all ranks of this attempt share."""
        if self._store is None:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            store = self._open_store(timeout)
            if self._agree is not None:
                self.attempt = self._agree(store)
            prefix = f"hocket/{self.attempt}"
            self._store = PrefixStore(prefix, store)
            if self._opened is not None:
                # A client that waits for a key keeps all other threads from the store.
                own: Any = store
                self._opened(self, PrefixStore(prefix, own.clone()))
        return self._store

    def init_process_group(
        self,
        backend: str,
        device: torch.device | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Make the default process group over all ranks.

        `backend` is any that torch knows at this moment (a backend of our own has to be
        registered before); `device` is given for CUDA, which binds the group to it at once;
        `timeout` in seconds bounds every collective. Under NCCL its watchdog ends a rank after that
        time, a victim as likely as the cause: where the parent watches, it comes later.

        Raises:
            HocketError: the ranks of several hosts cannot connect to each other.
        """
        import torch.distributed as dist

        cuda = device is not None and device.type == "cuda"
        if cuda and self.watched:
            timeout = max(WATCHDOG, 2 * timeout)
        store = self.store(timeout)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=timeout),
                device_id=device if cuda else None,
            )
        except RuntimeError as error:
            if self.one_machine:
                raise
            raise unreachable(self, backend, error) from error

    def destroy(self, seconds: float = 10.0) -> bool:
        """Take down the process groups at the end of a healthy run; whether that was done in time.

        Every rank calls it once all have finished: communicators end together. After `seconds` it
        returns all the same, for the process is about to end.
        """
        return _bounded("destroy_process_group", seconds)

    def abort(self, seconds: float = 5.0) -> bool:
        """Take down the process groups after a failure, without the other ranks: whatever waits
        in a collective on this rank is released. Whether that was done in time."""
        return _bounded("_abort_process_group", seconds)


def unreachable(context: RankContext, backend: str, error: Exception) -> HocketError:
    """The error of ranks on several hosts that do not connect, with the interface to set."""
    from hocket.launch.interfaces import chosen_interface, interface_to
    from hocket.launch.lost import peer_text

    setting = chosen_interface(backend)
    name = setting.split("=")[0].split()[0]
    found = interface_to(context.address)
    first = peer_text(str(error)).strip().partition("\n")[0]
    return HocketError(
        f"rank {context.rank} of {context.world_size} on {socket.gethostname()} cannot connect to "
        f"the other ranks over {backend} ({setting}): {first}",
        hint=f"export {name}={found or 'IFACE'} on this host before the launcher; on each host it "
        f"is the one that `ip route get {context.address}` prints after `dev`",
    )


WATCHDOG = 3600.0
"""Least seconds after which NCCL's watchdog may end a rank that a parent of ours watches."""


def _bounded(name: str, seconds: float) -> bool:
    """Call a function of torch.distributed in a thread that may be left behind."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return True
    done = threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):  # the run has its outcome already
            function: Any = getattr(dist, name, None) or getattr(dist.distributed_c10d, name)
            function()
        done.set()

    threading.Thread(target=call, daemon=True).start()
    return done.wait(seconds)


def loopback_store(
    rank: int, port: int, listener: int | None, timeout: float
) -> Store:  # pragma: no cover - runs inside ranks
    """The TCP store of a local run; rank 0 serves it on a socket already bound to loopback."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = datetime.timedelta(seconds=timeout)
    if rank == 0:
        assert listener is not None
        return TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timeout=wait,
            wait_for_workers=False,
            # The store closes the descriptor it is given, so it gets one of its own.
            master_listen_fd=os.dup(listener),
        )
    return TCPStore("127.0.0.1", port, None, False, timeout=wait)
