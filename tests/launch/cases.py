"""What ranks do in the tests of the launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from hocket.launch import RankContext
from hocket.spec.errors import LayoutError


def add(context: RankContext, start: int) -> list[int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([start + context.rank])
    dist.all_reduce(value)
    return [int(value), context.rank, context.world_size, torch.get_num_threads()]


def fail(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank ends as `how` says while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    if payload.get("backend"):
        if payload["backend"] == "shm":
            import hocket.runtime.shm  # noqa: F401
        context.init_process_group(payload["backend"], timeout=payload.get("timeout", 30.0))
        dist.all_reduce(torch.ones(4))
    context.emit({"event": "ready", "pid": os.getpid()})
    if context.rank == payload["rank"]:
        print("about to fail", flush=True)
        match payload["how"]:
            case "raise":
                raise ValueError("boom in the middle")
            case "hocket":
                raise LayoutError("8 heads over tp3", hint="--layout tp2")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "leave":
                os._exit(0)
            case "sys.exit":
                sys.exit("cannot go on")
            case "hang":
                dwell()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
    if payload.get("backend"):
        dist.all_reduce(torch.ones(4))
    elif payload["how"] != "leave":
        time.sleep(60)


def dwell() -> None:
    threading.Event().wait(60)
