"""A rank of the doctor's fault checks, on a backend that behaves as NCCL's."""

from __future__ import annotations

from typing import Any

from hocket.doctor import faults
from hocket.launch import RankContext
from tests.launch import nccl_like


def rank(context: RankContext, payload: dict[str, Any]) -> None:
    """As `faults.fault_rank`; the host waits for its device where it reads what was summed."""
    nccl_like.register()
    faults.fault_rank(context, {**payload, "backend": nccl_like.NAME, "limit": 2.0})
    nccl_like.synchronize()
