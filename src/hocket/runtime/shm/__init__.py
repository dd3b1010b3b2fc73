"""Backend `shm` of torch.distributed: collectives through shared memory, for ranks of one machine.

Importing this package registers it. On machines where ranks outnumber cores, waiting ranks sleep
in the kernel and cost nothing.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from hocket.runtime.host_memory import free_host_memory
from hocket.runtime.shm import futex
from hocket.runtime.shm.peers import Mismatch, PeerLost, PeerTimeout
from hocket.runtime.shm.process_group import ShmProcessGroup, create_shm_group
from hocket.runtime.shm.segment import needed

__all__ = ["Mismatch", "PeerLost", "PeerTimeout", "ShmProcessGroup", "available", "why_not_shm"]

NAME = "shm"

if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, create_shm_group, extended_api=True, devices=["cpu"])


def why_not_shm(world_size: int = 2) -> str | None:
    """Why ranks of this machine cannot use the backend, in words; None if they can."""
    if not futex.supported():
        return "shared-memory collectives need Linux on x86-64"
    if not os.access(f"/proc/{os.getpid()}/fd", os.X_OK):
        return "/proc is not mounted, through which ranks find the shared memory"
    if not futex.futex_works():
        return "the kernel does not allow the futex calls that ranks wait with"
    free, least = free_host_memory(), needed(world_size)
    if free < least:
        return f"{free >> 20} MB of memory are free, {world_size} ranks may share {least >> 20} MB"
    return None


def available(world_size: int = 2) -> bool:
    """Whether `world_size` ranks of this machine can use the backend."""
    return why_not_shm(world_size) is None
