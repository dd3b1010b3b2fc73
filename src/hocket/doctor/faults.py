"""Fault checks: a rank that dies, hangs, runs out of memory or faults on the device is named.

Each starts ranks as `hocket train` does, injects one fault, and times until the launcher reports
the rank. With two GPUs the ranks are joined by NCCL and wait for each other inside a collective.

Not executed on a GPU yet.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CheckOutcome, GpuCheck
from hocket.doctor.families import BASE
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from hocket.launch import RankContext

SILENCE = 6.0
"""Seconds without a sign of life after which the launcher calls a hang, in these checks: what
`--timeout` sets."""
DEATH = 5.0
"""Seconds in which a death is to be reported."""
LATE = 10.0
"""Seconds beyond `SILENCE` in which a hang is to be reported."""
WATCHDOG = 8.0
"""Seconds after which NCCL's watchdog ends a rank, in the check of its victims."""

_WORDS = {
    "kill": ("SIGKILL", "signal 9"),
    "hang": ("no rank gave a sign of life",),
    "stop": ("no rank gave a sign of life",),
    "watchdog": ("the others may be waiting for it",),
    "out-of-memory": ("out of memory", "OutOfMemoryError", "can't allocate"),
    "device-assert": ("device-side assert", "out of range", "out of bounds"),
    "raise": ("injected",),
}
"""What a report must hold, any one of them."""


_SILENT = ("hang", "stop")


ENTRY = "hocket.doctor.faults:fault_rank"
"""What each rank of a fault calls."""


def _limit(kind: str) -> float:
    """Seconds in which a fault is to be reported."""
    return {"watchdog": WATCHDOG + LATE}.get(kind, SILENCE + LATE if kind in _SILENT else DEATH)


def _row(kind: str, what: str, *, ranks: int) -> GpuCheck:
    suffix = "-nccl" if ranks > 1 else ""
    return GpuCheck(
        id=f"fault-{kind}{suffix}",
        group="faults",
        gpus=ranks,
        what=f"{what}, {ranks} rank{'s, joined by NCCL' if ranks > 1 else ''}",
        criterion=f"the rank is named within {_limit(kind):.0f} s"
        + (", in the first line of the report" if ranks > 1 and kind != "watchdog" else ""),
        function="hocket.doctor.faults:fault",
        arguments={"kind": kind, "ranks": ranks},
        seconds=7.0 + (SILENCE if kind in _SILENT else WATCHDOG if kind == "watchdog" else 0),
        timeout=120.0,
        slow=True,
    )


_KINDS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("kill", "SIGKILL of the last rank", (1, 2)),
    ("hang", "a last rank that does not come to a collective", (1, 2)),
    ("stop", "SIGSTOP of the last rank", (2,)),
    ("watchdog", "a last rank that hangs until NCCL's watchdog ends the other, a victim", (2,)),
    # A single rank that raises is reported as one that runs out of memory is.
    ("raise", "an exception in the last rank", (2,)),
    ("out-of-memory", "an allocation larger than the GPU", (1,)),
    ("device-assert", "an index out of range in a kernel", (1,)),
)

CHECKS = (
    *(_row(kind, what, ranks=ranks) for kind, what, sizes in _KINDS for ranks in sizes),
    GpuCheck(
        id="fault-memory-report", group="faults", what="a training step that runs out of memory: "
        "the owners, tensors and layouts in the report", criterion="its owners' bytes sum to "
        "what is allocated within 5%, and it has a layout to paste",
        function="hocket.doctor.faults:memory_report", seconds=3.0, timeout=60.0,
    ),
)  # fmt: skip


def fault(place: Place, *, kind: str, ranks: int) -> CheckOutcome:
    """Seconds from the fault to the report, and whether it names the rank."""
    from hocket.launch import Launcher
    from hocket.spec.errors import HocketError

    begun: dict[str, float] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "fault":
            begun["fault"] = time.time()

    silence = place.size(
        60.0 if kind == "watchdog" else SILENCE, 20.0 if kind == "watchdog" else 3.0
    )
    message = ""
    with Launcher(device=place.kind) as launcher:
        try:
            launcher.run(
                ENTRY, ranks,
                {"kind": kind, "backend": place.size("nccl", "gloo")}, listen,
                on_output=lambda *_: None, startup_timeout=90.0, silence_timeout=silence,
            )  # fmt: skip
        except HocketError as error:
            message = error.message
    seconds = time.time() - begun.get("fault", time.time())
    place.at_most("seconds", seconds, _limit(kind))
    place.values["message"] = message.strip().splitlines()[0][:200] if message else ""
    last = ranks - 1
    first = (message.splitlines() or [""])[0]
    if kind == "watchdog":  # a victim ends first, and is named first
        named = f"rank {last} (the others may be waiting for it" in message
    else:
        named = f"rank {last}" in (first if ranks > 1 else message)
    if not named:
        place.failures.append(f"the report does not name rank {last}: {message[:200]!r}")
    if not any(words.lower() in message.lower() for words in _WORDS[kind]):
        place.failures.append(
            f"the report does not contain {_WORDS[kind][0]!r}: {message[-300:]!r}"
        )
    return place.outcome()


def fault_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: joins, communicates, and the last one fails as asked."""
    import torch

    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.device import claim_device
    from hocket.runtime.mesh import Mesh
    from hocket.spec.layout import Layout

    context.expect(90.0)  # until the fault: contexts and communicators take their time
    cuda = context.device_kind == "cuda"
    device = torch.device("cuda", context.local_rank) if cuda else torch.device("cpu")
    claim_device(device)
    watchdog = payload["kind"] == "watchdog"
    if context.world_size > 1:
        if watchdog:  # else ranks that a parent watches get hours
            context.watched = False
        limit = payload.get("limit", WATCHDOG) if watchdog else 600.0
        context.init_process_group(payload["backend"], device, timeout=limit)
    mesh = Mesh(Layout(dp=context.world_size), context.rank, device)
    context.position = mesh.position
    value = torch.ones(4, device=device)
    all_reduce(value, mesh.axis("dp"), mesh.recorder)
    float(value.sum())
    if context.rank == context.world_size - 1:
        context.emit({"event": "fault"})
        inject(payload["kind"], device)
    else:
        all_reduce(value, mesh.axis("dp"), mesh.recorder)
        float(value.sum())


def inject(kind: str, device: Any) -> None:
    """Fail as `kind` asks for."""
    import torch

    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind in ("hang", "watchdog"):
        time.sleep(3600)
    elif kind == "raise":
        raise RuntimeError("injected")
    elif kind == "out-of-memory":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    elif kind == "device-assert":
        table = torch.zeros(4, 4, device=device)
        found = torch.nn.functional.embedding(torch.tensor([1 << 20], device=device), table)
        float(found.sum())


# --- out of memory ---------------------------------------------------------------------------


def memory_report(place: Place) -> CheckOutcome:
    """The report of a step whose activations do not fit. In a rehearsal a layer raises torch's
    error, and the CPU's allocator keeps no account: parameters alone are summed."""
    import torch

    from hocket.doctor.model import WIDE, TrainedModel, spec
    from hocket.runtime.memory_report import device_state
    from hocket.training.build import RankJob
    from hocket.training.out_of_memory import explained_out_of_memory, job_owners

    job = spec(
        WIDE if place.on_gpu else BASE, seq_len=place.size(512, 16), rows=place.size(64, 4),
        device=place.kind,
    )  # fmt: skip
    trained = TrainedModel(place, job)
    trained.optimizer.state_tensors()
    parallel: Any = trained.parallel
    made = RankJob(
        spec=job, mesh=parallel.mesh, source=None, skeleton=trained.skeleton,  # type: ignore[arg-type]
        plan=parallel.plan, parallel=parallel, optimizer=trained.optimizer,
    )  # fmt: skip
    if place.on_gpu:
        torch.cuda.synchronize()
        _, total = torch.cuda.mem_get_info()
        # Room for the model and a gigabyte of the step's activations, which take several.
        share = (torch.cuda.memory_reserved() + (1 << 30)) / total
        torch.cuda.set_per_process_memory_fraction(share)
    else:
        last = list(parallel.stages[0].module.model.layers)[-1]
        last.register_forward_hook(_raise)
    try:
        parallel.forward_backward(trained.batches())
    except torch.OutOfMemoryError as error:
        state = device_state(error, parallel.mesh.device)
        found = job_owners(made, state.allocated)
        report = explained_out_of_memory(error, made)
    else:
        place.failures.append("the step did not run out of memory")
        return place.outcome()
    finally:
        if place.on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
    held = {owner.name: owner.nbytes for owner in found}
    own = sum(p.numel() * p.element_size() for p in parallel.parameters())
    place.values |= {f"{name.replace(' ', '_')}_bytes": n for name, n in held.items()}
    place.equal("bytes of parameters", held["parameters"], own)
    place.equal("whether a request is named", state.requested > 0, True)
    place.equal("whether it proposes a layout", "--layout" in (report.hint or ""), True)
    if place.on_gpu:
        place.values["allocated_bytes"] = state.allocated
        place.near("owners_bytes", sum(held.values()), state.allocated, 0.05)
    return place.outcome()


def _raise(*_: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
