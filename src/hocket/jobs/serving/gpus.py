"""GPUs of a replica: which of those that this process may use each replica's ranks see."""

from __future__ import annotations

import os

from hocket.spec.errors import OptionError


def replica_gpus(number: int, size: int) -> list[str]:
    """The GPUs of one replica, among those that this process may use.

    Raises:
        OptionError: there are fewer: another program's GPU is not taken.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = range(number * size, (number + 1) * size)
    if not seen:
        return [str(i) for i in mine]
    names = [name.strip() for name in seen.split(",")]
    if mine[-1] >= len(names):
        raise OptionError(
            f"replica {number} needs GPUs {mine[0]} to {mine[-1]} of those that this process may "
            f"use; CUDA_VISIBLE_DEVICES={seen} names {len(names)}",
            hint=f"fewer replicas, or CUDA_VISIBLE_DEVICES with {mine[-1] + 1} GPUs",
        )
    return [names[i] for i in mine]
