"""Doors: where the driver of a replica meets its followers and the server's parent.

Doors        one host: Unix sockets in a folder of this replica's own
HostDoors    several hosts: TCP; the addresses are in the launcher's store
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.runtime.peer_files import own_address

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hocket.serving.engine.channel import Channel, ChannelListener


class Doors:
    """Sockets of one replica: at `path` for the parent, at `path`.ranks for the followers.

    Attributes:
        parent, ranks: the driver's listeners, once it has called `listen`.
    """

    parent: ChannelListener
    ranks: ChannelListener

    def __init__(self, path: str, token: bytes) -> None:
        self.path, self.token = path, token

    def listen(self) -> None:
        """On the driver: bind both."""
        from hocket.serving.engine.channel import ChannelListener

        self.parent = ChannelListener(self.path, self.token)
        self.ranks = ChannelListener(f"{self.path}.ranks", self.token)

    def connect(self, rank: int) -> Channel:
        """On a follower, once the driver listens: the channel to it."""
        from hocket.serving.engine.channel import connect

        return connect(f"{self.path}.ranks", self.token, rank)


class HostDoors(Doors):
    """Sockets of a replica whose followers, or whose parent, are on other hosts.

    Args:
        path: the parent's socket; None: the parent is on another host than this driver.
        token: the secret. store: the launcher's, of all ranks. number: of the replica.
        reached: a host that all others reach; this host's address towards it is published.
    """

    def __init__(
        self, path: str | None, token: bytes, store: Store, number: int, reached: str
    ) -> None:
        super().__init__(path or "", token)
        self.store, self.number, self.reached = store, number, reached

    def listen(self) -> None:
        from hocket.serving.engine.channel import ChannelListener, TcpListener

        host = own_address(self.reached)
        if self.path:
            self.parent = ChannelListener(self.path, self.token)
        else:
            parent = TcpListener(host, self.token)
            self.parent = parent
            self.store.set(f"serving/{self.number}/parent", json.dumps(parent.address))
        ranks = TcpListener(host, self.token)
        self.ranks = ranks
        self.store.set(f"serving/{self.number}/ranks", json.dumps(ranks.address))

    def connect(self, rank: int) -> Channel:
        from hocket.serving.engine.channel import connect

        host, port = json.loads(self.store.get(f"serving/{self.number}/ranks"))
        return connect((host, port), self.token, rank)


def write_address(path: str, address: tuple[str, int]) -> None:
    """Leave `HOST PORT` where the front looks for a driver's socket; whole at every moment."""
    aside = Path(f"{path}~")
    aside.write_text(f"{address[0]} {address[1]}", encoding="utf-8")
    os.replace(aside, path)
