"""Launch checks: settings of ranks, claimed GPUs, clean ends, ranks of another launcher.

Not executed on a GPU yet.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import Cannot, CheckOutcome, GpuCheck
from hocket.doctor.place import Place
from hocket.doctor.world import join, ranks, tell

if TYPE_CHECKING:
    from hocket.launch import RankContext

_HERE = "hocket.doctor.launching:"
LEFT = 64 << 20
"""Bytes of device memory by which two runs may change what is in use."""
JOINED = 10.0
"""Seconds in which a rank of another launcher ends on a failure of one."""
BUSY = 0.15
"""Share of a GPU's memory that another process holds in the check of claims."""

CHECKS = (
    GpuCheck(
        id="env-claim", group="environment", what="claim a GPU of which another process holds "
        f"{BUSY:.0%}, and one that CUDA_VISIBLE_DEVICES hides", criterion="the first is claimed "
        "with a note that others use it (or rejected with the reason in exclusive "
        "mode), the second "
        "is rejected with the number of GPUs shown", function=_HERE + "claim_messages", seconds=3.0,
        timeout=60.0, forks=True,
    ),
    GpuCheck(
        id="env-settings", group="environment", what="settings of a rank: allocator, NCCL's "
        "watchdog, order of devices, as launch/gpus.py sets them", criterion="every variable has "
        "the value set; the allocator is native, with expandable segments", seconds=7.0,
        function=_HERE + "inherited_settings", timeout=90.0, slow=True,
    ),
    GpuCheck(
        id="clean-end", group="multi-gpu", what="two short runs of two ranks, one after the other: "
        "their processes and the device memory that they leave", criterion="no process is left, "
        "and memory in use changes by at most 64 MiB on each GPU", function=_HERE + "clean_end",
        gpus=2, seconds=20.0, timeout=120.0, slow=True,
    ),
    GpuCheck(
        id="joined-failure", group="faults", what="two ranks with torchrun's variables: rank 1 "
        "raises while rank 0 waits in an all-reduce", criterion="rank 0 names rank 1 and its "
        f"error, and ends within {JOINED:.0f} s", function=_HERE + "joined_failure", gpus=2,
        seconds=15.0, timeout=120.0, slow=True,
    ),
)  # fmt: skip


# --- claiming a GPU --------------------------------------------------------------------------


def claim_messages(place: Place) -> CheckOutcome:
    """Notes and refusals of a busy and of a hidden GPU, each found in a process of its own."""
    hidden = _in_child(_hidden)
    place.values["hidden"] = str(hidden)
    if "shows 0 CUDA devices" not in str(hidden):
        place.failures.append(f"a hidden GPU is not rejected: {hidden}")
    if not place.on_gpu:
        return place.outcome(note="whether a GPU is busy is seen on a GPU alone")
    asked, holds = os.pipe()
    ready, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _hold(says, asked, holds)
        finally:  # a forked process must not go on in what its parent was doing
            os._exit(1)
    os.close(says)
    os.close(asked)
    try:
        text = os.read(ready, 200).decode()
        if text != "holds":
            raise Cannot(f"another process could not hold memory: {text}")
        notes = _in_child(_claimed)
    finally:
        os.close(holds)
        os.waitpid(child, 0)
    place.values["busy"] = str(notes)
    if "other processes use it" not in str(notes) and "cannot be used" not in str(notes):
        place.failures.append(f"a busy GPU is not noted: {notes}")
    return place.outcome()


def _in_child(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in a forked process, as plain data."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, json.dumps(call()).encode())
        except Exception as error:  # what it is, is the answer
            os.write(into, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:  # a forked process must not go on in what its parent was doing
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else f"ended without an answer (status {status})"


def _hidden() -> Any:
    from hocket.runtime.device import pick_device

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return str(pick_device("cuda", 0))


def _claimed() -> Any:
    import torch

    from hocket.runtime.device import claim_device as claimed

    return claimed(torch.device("cuda", 0))


def _hold(says: int, asked: int, holds: int) -> None:
    """Hold a share of GPU 0 until the pipe's other end is closed."""
    import torch

    os.close(holds)
    try:
        _, total = torch.cuda.mem_get_info(0)
        held = torch.empty(int(BUSY * total), dtype=torch.uint8, device="cuda:0")
        os.write(says, b"holds")
    except RuntimeError as error:
        os.write(says, str(error).encode()[:200])
        return
    os.read(asked, 1)
    del held


# --- settings --------------------------------------------------------------------------------


def inherited_settings(place: Place) -> CheckOutcome:
    """Variables and allocator of a rank that starts as on a GPU."""
    from hocket.launch import Launcher
    from hocket.launch.gpus import rank_settings

    wanted = rank_settings(os.environ, watched=True)
    found: dict[str, Any] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "found":
            found.update(event["values"])

    # Without a GPU too: what is set does not depend on one.
    with Launcher(device="cuda") as launcher:
        launcher.run(
            _HERE + "settings_rank", 1, {"names": [*wanted], "gpu": place.on_gpu}, listen,
            on_output=lambda *_: None, startup_timeout=90.0,
        )  # fmt: skip
    for name, value in wanted.items():
        place.equal(name, found["variables"][name], value)
        place.values[name] = str(found["variables"][name])
    if place.on_gpu:
        place.values["allocator"] = found["allocator"]
        place.equal("the allocator", found["allocator"], "native")
        if any("expandable_segments" in value for value in wanted.values()):
            place.equal("expandable segments", found["expandable"], True)
    return place.outcome()


def settings_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: its variables, and what its allocator says."""
    values: dict[str, Any] = {"variables": {n: os.environ.get(n) for n in payload["names"]}}
    if payload["gpu"]:
        import torch

        from hocket.runtime.device import claim_device as claimed

        claimed(torch.device("cuda", context.local_rank))
        snapshot: Any = torch.cuda.memory._snapshot()
        values["allocator"] = torch.cuda.memory.get_allocator_backend()
        values["expandable"] = bool(snapshot["allocator_settings"]["expandable_segments"])
    tell(context, **values)


# --- ends ------------------------------------------------------------------------------------


def _used() -> list[int]:
    """Bytes in use of every GPU, as NVML counts all processes'."""
    from hocket.doctor.environment import nvml_opened

    with nvml_opened() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        memories = [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return [int(each.total - each.free) for each in memories]


def clean_end(place: Place) -> CheckOutcome:
    """What two runs leave behind."""
    before = _used() if place.on_gpu else []
    pids = []
    for _ in range(2):
        payload = {"backend": place.size("nccl", "gloo")}
        pids += [values["pid"] for values in ranks(place, _HERE + "short_rank", 2, payload)]
    left = [pid for pid in pids if _lives(pid)]
    place.equal("processes that are left", left, [])
    end = time.monotonic() + 5.0
    after = _used() if place.on_gpu else []
    while time.monotonic() < end and any(
        b - a > LEFT for a, b in zip(before, after, strict=True)
    ):  # the driver frees a process's memory a moment after its end
        time.sleep(0.2)
        after = _used()
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        place.at_most(f"gpu_{index}_left_bytes", b - a, LEFT)
    return place.outcome(processes=len(pids))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number was given to another user's process
        return False
    return True


def short_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: joins, sums 64 MiB, and returns."""
    import torch

    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    device = join(context, payload["backend"])
    mesh = Mesh(Layout(dp=context.world_size), context.rank, device)
    context.position = mesh.position
    value = torch.ones(1 << 24, device=device)
    all_reduce(value, mesh.axis("dp"), mesh.recorder)
    assert float(value[0]) == context.world_size
    tell(context, pid=os.getpid())


def joined_failure(place: Place) -> CheckOutcome:
    """What rank 0 prints and when it ends, after rank 1 raised."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folders = os.pathsep.join(dict.fromkeys(folder for folder in sys.path if folder))
    environment = {
        **os.environ, "PYTHONPATH": folders, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    code = (
        "from hocket.launch import run_joined; "
        f"run_joined({_HERE + 'joined_rank'!r}, {{}}, device={place.kind!r})"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=100)[1] for process in processes]
    except subprocess.TimeoutExpired:
        place.failures.append("a rank has not ended after 100 s")
        return place.outcome()
    finally:
        for process in processes:
            process.kill()
    raised = next((w.split()[1] for w in texts[1].splitlines() if w.startswith("raises ")), None)
    if raised is None:
        place.failures.append(f"rank 1 did not come to its failure: {texts[1][-500:]}")
        return place.outcome()
    # Rank 0 ends last: nothing is read from it after its end.
    place.at_most("seconds", time.time() - float(raised), JOINED)
    text = "rank 0 ends: rank 1 failed: RuntimeError: injected"
    if text not in texts[0]:
        place.failures.append(f"rank 0 does not report {text!r}: {texts[0][-500:]!r}")
    place.equal("whether rank 0 failed", processes[0].returncode != 0, True)
    return place.outcome()


def joined_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: sums once; then rank 1 raises, and rank 0 waits for it in a second sum."""
    import torch

    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    cuda = context.device_kind == "cuda"
    device = join(context, "nccl" if cuda else "gloo")
    mesh = Mesh(Layout(dp=2), context.rank, device)
    value = torch.ones(4, device=device)
    all_reduce(value, mesh.axis("dp"), mesh.recorder)
    float(value.sum())
    if context.rank == 1:
        print(f"raises {time.time()}", file=sys.stderr, flush=True)
        raise RuntimeError("injected")
    if not cuda:  # Gloo raises when a peer is gone; a host that waits for its device does not
        time.sleep(60.0)
    all_reduce(value, mesh.axis("dp"), mesh.recorder)
    float(value.sum())
