"""Backend `links` of torch.distributed: another backend, slowed down to the links of a GPU.

    install(links, inner="shm", ...)      before init_process_group("links")

Importing this package registers it. The ranks share one machine and its clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hocket.runtime.links.process_group import LinkedProcessGroup
from hocket.runtime.links.wire import Wire
from hocket.spec.links import Links

__all__ = ["LinkedProcessGroup", "Wire", "install"]

NAME = "links"


class _Installed:
    """What groups that are made from now on are made of."""

    wire: Wire | None = None
    inner = "shm"
    active: Callable[[], bool] = staticmethod(lambda: True)


def install(
    links: Links,
    *,
    rank: int,
    world_size: int,
    store: Any,
    inner: str = "shm",
    active: Callable[[], bool] = lambda: True,
) -> Wire:
    """Say what the links of this rank's groups are. Call on every rank, with equal links.

    Args:
        links: with a scale.
        store: that all ranks share.
        inner: the backend that moves the data, `shm` or `gloo`.
        active: asked before every operation; while it returns False, links cost nothing. It must
            return the same on all ranks of a group.
    """
    assert inner in ("shm", "gloo"), inner
    _Installed.wire = Wire(links, rank, world_size, store)
    _Installed.inner = inner
    _Installed.active = staticmethod(active)
    return _Installed.wire


def create_links_group(options: Any, backend_options: Any = None) -> LinkedProcessGroup:
    """What torch.distributed calls to make a group of backend `links`."""
    wire = _Installed.wire
    assert wire is not None, "install() was not called"
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if options.group_rank == 0:
        options.store.set("links/group", str(wire.new_group()))
    number = int(options.store.get("links/group"))
    if _Installed.inner == "shm":
        from hocket.runtime.shm import process_group

        inner: Any = process_group.create_shm_group(options)
    else:
        inner = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
    return LinkedProcessGroup(inner, wire, number, ranks, _Installed.active)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, create_links_group, extended_api=True, devices=["cpu"])
