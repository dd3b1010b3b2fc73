"""Lost: whose connection ended, as a rank can tell whom no parent of ours watches.

Gloo's text has a file of its own source, no rank, and (in torch 2.13) the port with its two bytes
swapped. The rank is one of the group of the last collective; on this host, the one whose process
has ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hocket.launch.context import RankContext

_GLOO = re.compile(r"\[[^\s\]]*/gloo/[^\s\]]*:\d+\] ?(.*)")
_ADDRESS = re.compile(r"\[([\w.:%]+)\]:(\d{1,5})\b")
_ADVICE = re.compile(r"\. This is typically caused by .*")
_WAIT = 0.5
"""Seconds in which the process behind a closed connection ends: its descriptors are closed
first."""


def peer_text(text: str) -> str:
    """A text in which Gloo's lines are the event, with host and port of the peer."""
    return _GLOO.sub(lambda line: _ADDRESS.sub(_address, _ADVICE.sub("", line[1])), text)


def _address(found: re.Match[str]) -> str:
    return f"(host {found[1]}, port {socket.ntohs(int(found[2]))})"


def publish_process(store: Store, rank: int) -> None:
    """Let the other ranks find this one's host and process."""
    store.set(f"process/{rank}", f"{os.uname().nodename} {os.getpid()}")


def lost_ranks(context: RankContext, store: Store | None) -> list[int]:
    """The ranks that may be lost: those of the last collective's group, or of all where there was
    none; only those whose process has ended, where there are such on this host."""
    axis = context.heart.read().collective.rpartition(" ")[2]
    position = context.position() if context.position is not None else {}
    group = position.get(axis, (list(range(context.world_size)), 0))[0]
    peers = [rank for rank in group if rank != context.rank]
    ended: list[int] = []
    if len(peers) > 1 and store is not None:
        thread = threading.Thread(target=_ended, args=[peers, store, ended], daemon=True)
        thread.start()
        thread.join(2 * _WAIT)  # the process that serves the store may be gone
    return sorted(ended) or peers


def _ended(peers: Sequence[int], store: Store, ended: list[int]) -> None:
    with contextlib.suppress(Exception):
        places = {rank: store.get(f"process/{rank}").decode().rsplit(" ", 1) for rank in peers}
        here = {rank: pid for rank, (host, pid) in places.items() if host == os.uname().nodename}
        end = time.monotonic() + _WAIT
        while not ended and time.monotonic() < end:
            ended += [rank for rank, pid in here.items() if not _runs(pid)]
            time.sleep(0.02)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
