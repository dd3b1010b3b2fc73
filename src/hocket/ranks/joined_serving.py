"""A server's rank that torchrun, srun or a Kubernetes Job started: it takes its part from rank 0's
front, through the launcher's store."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from hocket.ranks.doors import Doors, HostDoors, write_address
from hocket.runtime.peer_files import own_address
from hocket.spec.errors import one_of_srun

if TYPE_CHECKING:
    from hocket.launch import RankContext


STARTUP = 1800.0
"""Seconds in which rank 0 must have checked everything and published it."""


def joined_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """Entry of every rank: of rank 0 with what the front writes to it, of the others with what
    rank 0 publishes."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from hocket.launch import await_key, main_address
    from hocket.models.source import fetch_again
    from hocket.ranks.serving import PRELOAD
    from hocket.ranks.serving import main as serve
    from hocket.spec.run import RunSpec

    # Until the server starts, a signal of the launcher ends this rank, which only waits; under
    # srun with code 0, so that its code is that of the task that failed, if one did.
    signal.signal(signal.SIGTERM, _leave if one_of_srun() else signal.SIG_DFL)
    if context.stop_asked.is_set():  # it came before
        signal.raise_signal(signal.SIGTERM)
    store = context.store(STARTUP)
    last = context.world_size - 1
    if context.rank == last:
        store.set("serving/last", own_address(main_address()))
    for module in PRELOAD:  # while rank 0's process checks
        importlib.import_module(module)
    if context.rank == 0:
        text = sys.stdin.read()
        if not text:
            raise SystemExit(1)  # the front has ended, and said why
        store.set("serving/payloads", text)
    published = json.loads(await_key(store, "serving/payloads"))
    size, each = published["size"], published["payloads"]
    # A launcher signals all its processes: the front lets requests end, and then stops the ranks.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, mine = divmod(context.rank, size)
    given = each[number]
    if "spec" in given and context.rank:
        found = RunSpec.from_json(given["spec"])
        options = dataclasses.replace(
            found.options, trust_remote_code=bool(payload.get("trust_remote_code"))
        )
        found = dataclasses.replace(found, options=options)
        fetch_again(found)  # of this host's cache
        given = {**given, "spec": found.to_json()}
    token = bytes.fromhex(given["token"])
    # The main host's own name may lead to its loopback; another host's address does not.
    reached = store.get("serving/last").decode()
    doors: Doors = HostDoors(
        given["socket"] if number == 0 else None, token, store, number, reached
    )
    if context.rank == 0 and len(each) > 1:
        threading.Thread(target=_relay, args=(context, each), daemon=True).start()
    replica = dataclasses.replace(
        context,
        rank=mine,
        world_size=size,
        _store=None,
        _opened=None,
        _open_store=lambda timeout: PrefixStore(f"replica-{number}", context.store(timeout)),
    )
    serve(replica, given, doors)


def _leave(number: int, frame: object) -> None:
    os._exit(0)


def _relay(context: RankContext, each: list[dict[str, Any]]) -> None:
    """Bring the addresses of the other replicas' drivers to the front, as they are published."""
    store = context.store(STARTUP)
    for number, given in enumerate(each):
        if number:
            host, port = json.loads(store.get(f"serving/{number}/parent"))
            write_address(given["socket"], (host, port))
