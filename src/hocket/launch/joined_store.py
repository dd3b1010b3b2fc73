"""Joined store: the store of ranks that another launcher started, or why it cannot be reached."""

from __future__ import annotations

import dataclasses
import datetime
import socket
import threading
import time
from typing import TYPE_CHECKING

from hocket.spec.errors import RankFailure

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

POLL = 0.25
"""Seconds between two looks for a key of rank 0's."""
JOINING = 60.0
"""Seconds after rank 0 has begun its part in which the others must open the store."""


@dataclasses.dataclass(frozen=True)
class World:
    """The place of a rank, as its launcher's variables give it."""

    rank: int
    world_size: int
    local_rank: int
    one_machine: bool
    attempt: int
    address: str
    port: int
    agent_store: bool  # the launcher serves the store itself; rank 0 must not
    counts_apart: bool = False  # each host counts attempts by itself


def open_store(world: World, timeout: float) -> Store:
    """The store of these ranks.

    Raises:
        RankFailure: it cannot be reached, or served; with the address and a command that tries it.
    """
    serves = world.rank == 0 and not world.agent_store
    try:
        if not serves:
            _reach(world, timeout)
        return _store(world, serves, timeout)
    except (OSError, RuntimeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        where = f"MASTER_ADDR={world.address} MASTER_PORT={world.port}"
        what = "serve" if serves else f"in {timeout:g} s reach"
        other = "MASTER_PORT=PORT" if serves else "MASTER_ADDR=ADDRESS MASTER_PORT=PORT"
        tries = f"timeout 5 bash -c '</dev/tcp/{world.address}/{world.port}' && echo open"
        raise RankFailure(
            f"rank {world.rank} of {world.world_size} on {socket.gethostname()} could not {what} "
            f"the store, which rank 0's host serves at {where}: {reason}",
            hint=f"`{tries}` on each host, while rank 0 runs; another place, the same on all hosts "
            f"(torchrun: --master-addr, --master-port): export {other}",
        ) from error


def _store(world: World, serves: bool, timeout: float) -> Store:
    """Torch's store, or a client of it. Its constructor waits for ever where a connection is
    accepted and not answered."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    made: list[Store | Exception] = []

    def make() -> None:
        try:
            wait = datetime.timedelta(seconds=timeout)
            place = world.address, world.port, world.world_size, serves, wait
            made.append(TCPStore(*place, wait_for_workers=False, multi_tenant=True))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, daemon=True, name="store")
    thread.start()
    thread.join(min(timeout, JOINING))
    if not made:
        raise TimeoutError("it accepts connections and does not answer: its process is stopped")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _reach(world: World, timeout: float) -> None:
    """Return once the port of the store accepts a connection; `timeout` seconds later raise why
    not. torch's own attempts print a trace each, and take twice the time."""
    end = time.monotonic() + timeout
    while True:
        try:
            left = min(5.0, max(0.1, end - time.monotonic()))
            socket.create_connection((world.address, world.port), left).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(POLL / 5)


def await_key(store: Store, key: str) -> str:
    """The value of a key that rank 0 sets when it is ready, which may take hours. Signals are heard
    meanwhile; where rank 0 is lost, this process is ended (`_Notice`)."""
    while not store.check([key]):
        time.sleep(POLL)
    return store.get(key).decode()
