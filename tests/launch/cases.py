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


def place(context: RankContext) -> list[Any]:
    """What a local rank is told, and what is imported already when it begins."""
    warm = [name for name in ("torch", "transformers", "torch._dynamo") if name in sys.modules]
    return [context.local_rank, context.one_machine, context.device_kind, context.attempt, warm]


def tell_place(context: RankContext, payload: dict[str, Any]) -> None:
    context.emit({"event": "place", "place": place(context)})


def only_fail(context: RankContext, payload: dict[str, Any]) -> None:
    end_as("raise")


def listeners(context: RankContext) -> list[str]:
    """Addresses on which this rank listens, in the kernel's hexadecimal."""
    context.store().set(f"here {context.rank}", "yes")
    context.store().wait([f"here {r}" for r in range(context.world_size)])
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    found.append(words[1].split(":")[0])
    return found


def speak(context: RankContext, payload: dict[str, Any]) -> None:
    print(f"out of {context.rank}")
    print(f"err of {context.rank}", file=sys.stderr)
    os.write(1, b"no newline")
    for number in range(payload["events"]):
        context.emit({"event": "number", "number": number, "text": "x" * payload["size"]})


def until_asked(context: RankContext, payload: dict[str, Any]) -> None:
    """Ends once it is asked to."""
    assert context.stop_asked.wait(60)


def fail(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank ends as `how` says while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    if payload["backend"] == "shm":
        import hocket.runtime.shm  # noqa: F401
    context.init_process_group(payload["backend"], timeout=payload.get("timeout", 30.0))
    dist.all_reduce(torch.ones(4))
    context.emit({"event": "ready", "pid": os.getpid()})
    if context.rank == payload["rank"]:
        print("about to fail", flush=True)
        end_as(payload["how"])
    dist.all_reduce(torch.ones(4))


def end_as(how: str) -> None:
    match how:
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


def dwell() -> None:
    threading.Event().wait(600)


def wait(context: RankContext, payload: dict[str, Any]) -> None:
    context.emit({"event": "ready", "pid": os.getpid()})
    time.sleep(600)


def long_step(context: RankContext, payload: dict[str, Any]) -> None:
    """Silent for longer than the bound, twice: once announced, once with beats."""
    context.emit({"event": "ready"})
    context.expect(30.0)
    time.sleep(3.0)
    for _ in range(6):
        context.beat()
        time.sleep(0.5)


def exchange(context: RankContext, payload: dict[str, Any]) -> None:
    """A rank of another launcher's world: sums over it, tells what it was told."""
    import torch
    import torch.distributed as dist

    context.init_process_group("gloo", timeout=60.0)
    value = torch.tensor([context.rank + payload["start"]])
    dist.all_reduce(value)
    seen = [context.rank, context.world_size, context.local_rank, context.one_machine]
    context.emit({"event": "sum", "value": int(value), "place": seen})


def on_nccl_like(context: RankContext, payload: dict[str, Any]) -> None:
    """Steps of two all-reduces on a backend that behaves as NCCL's; one rank fails in the third."""
    import torch

    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout
    from tests.launch import nccl_like

    nccl_like.register()
    context.init_process_group(nccl_like.NAME, timeout=payload["timeout"])
    mesh = Mesh(Layout(dp=context.world_size), context.rank)
    context.position = mesh.position
    for step in range(5):
        for call in range(2):
            if step == 2 and call == 1 and context.rank == payload["rank"]:
                context.emit({"event": "ready"})
                end_as(payload["how"])
            all_reduce(torch.ones(4), mesh.axis("dp"), mesh.recorder)
        nccl_like.synchronize()
    if payload["rank"] is None:
        atexit_groups = list(nccl_like._groups)
        destroy = context.destroy

        def recorded(seconds: float = 10.0) -> bool:
            done = destroy(seconds)
            context.emit({"event": "destroyed", "how": atexit_groups[0].ended, "done": done})
            return done

        context.destroy = recorded  # type: ignore[method-assign]


def tell_environment(context: RankContext, payload: dict[str, Any]) -> None:
    values = [os.environ.get(name) for name in payload["names"]]
    context.emit({"event": "environment", "values": values})
