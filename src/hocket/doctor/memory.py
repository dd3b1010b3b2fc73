"""Memory checks: peaks of a step as the allocator counts them, and what lowers them.

Not executed on a GPU yet.
"""

from __future__ import annotations

import gc
from typing import Any

from hocket.doctor.check import CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import WIDE, TrainedModel, catalogue, spec
from hocket.doctor.place import Place

GB = 1e9
_NO_COUNT = "the CPU's allocator keeps no account; losses alone are compared"


_row = row_of(
    "hocket.doctor.memory", prefix="memory-", group="memory", seconds=3.5, timeout=90.0,
    capability=(8, 0),
)  # fmt: skip


CHECKS = (
    _row("offload-activations", "activations in host memory: ten steps, compared with none "
         "offloaded", "offload_memory",
         "losses within 1e-4, and less than 0.6 of the activations' peak"),
    _row("offload-optimizer", "optimizer state in host memory: bytes of the GPU between steps",
         "optimizer", "less by 90% of the state's 12 bytes a parameter or more"),
    _row("recompute", "every layer recomputed: peak of a step", "recompute_memory",
         "less than 0.6 of the activations' peak"),
    _row("steady", "bytes in use after the 3rd and after the 10th step", "steady_memory", "equal"),
    _row("fragments", "bytes reserved from the driver and bytes in use at the peak of training a "
         "1B Llama", "fragments", "reserved at most 1.15 times what is in use", memory=60 * GB,
         seconds=8.0),
    _row("fp8-learns", "ten steps in fp8, compared with bf16", "fp8_memory",
         "losses within 5% and not equal", capability=(8, 9), packages=("torchao",), rehearsals=(),
         unrehearsed="training in fp8 is rejected without tensor cores that multiply it"),
)  # fmt: skip


def _in_use(place: Place) -> int:
    """Bytes that the allocator of the device has handed out; 0 in a rehearsal."""
    if not place.on_gpu:
        return 0
    import torch

    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def steps(place: Place, count: int, fields: str = "", dtype: str = "bf16") -> dict[str, Any]:
    """`losses` of some steps, `activations`: largest peak above what was in use before a step,
    `in_use`: bytes after each step."""
    import torch

    torch.manual_seed(3)
    job = spec(
        place.size(WIDE, BASE), layout=f"dp1:{fields}" if fields else "dp1", dtype=dtype,
        seq_len=place.size(128, 16), rows=place.size(32, 4), seed=3,
    )  # fmt: skip
    trained = TrainedModel(place, job)
    batches = trained.batches()
    found: dict[str, Any] = {"losses": [], "activations": 0, "in_use": []}
    for _ in range(count):
        before = _in_use(place)
        if place.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        loss = trained.parallel.forward_backward(batches)
        found["losses"].append(float(loss))
        if place.on_gpu:
            peak = torch.cuda.max_memory_allocated() - before
            found["activations"] = max(found["activations"], peak)
        trained.optimizer.step(1e-3)
        found["in_use"].append(_in_use(place))
    found["parameters"] = sum(p.numel() for p in trained.parallel.parameters())
    return found


def _same_losses(place: Place, found: list[float], expected: list[float], share: float) -> None:
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    place.values["loss_relative_difference"] = worst
    if not worst <= share:
        place.failures.append(f"losses differ by {worst:.2g} of themselves ({share:g})")


def _less(place: Place, name: str, found: int, whole: int, share: float) -> None:
    place.values |= {f"{name}_bytes": found, f"{name}_bytes_without": whole}
    if place.on_gpu and not found < share * whole:
        place.failures.append(f"{name}: {found} bytes, not less than {share:g} of {whole}")


def offload_memory(place: Place) -> CheckOutcome:
    """Activations on the GPU, and in host memory."""
    if not place.on_gpu:  # a CPU rank's activations are in host memory already
        plain, moved = steps(place, 3), steps(place, 3)
    else:
        plain, moved = steps(place, 10), steps(place, 10, "offload=activations")
    _same_losses(place, moved["losses"], plain["losses"], 1e-4)
    _less(place, "activations", moved["activations"], plain["activations"], 0.6)
    return place.outcome()


def optimizer(place: Place) -> CheckOutcome:
    """Optimizer state on the GPU, and in host memory."""
    count = place.size(5, 2)
    plain, moved = steps(place, count), steps(place, count, "offload=optimizer")
    _same_losses(place, moved["losses"], plain["losses"], 1e-3)
    saved = plain["in_use"][-1] - moved["in_use"][-1]
    place.at_least("saved_bytes_per_parameter", saved / plain["parameters"], 0.9 * 12)
    return place.outcome()


def recompute_memory(place: Place) -> CheckOutcome:
    """The peak with and without recomputation."""
    count = place.size(3, 2)
    plain, less = steps(place, count), steps(place, count, "recompute=full")
    _same_losses(place, less["losses"], plain["losses"], 1e-3)
    _less(place, "activations", less["activations"], plain["activations"], 0.6)
    return place.outcome()


def steady_memory(place: Place) -> CheckOutcome:
    """Bytes in use while training goes on."""
    found = steps(place, 10)["in_use"]
    place.values |= {"bytes_after_3": found[2], "bytes_after_10": found[-1]}
    place.equal("bytes in use after 10 steps", found[-1], found[2])
    return place.outcome()


def fragments(place: Place) -> CheckOutcome:
    """What the allocator reserves beyond what is in use."""
    import torch

    job = spec(
        catalogue("llama-3.2-1b") if place.on_gpu else BASE, seq_len=place.size(4096, 16),
        rows=place.size(4, 2),
    )  # fmt: skip
    trained = TrainedModel(place, job)
    batches = trained.batches()
    for _ in range(3):
        trained.step(batches)
    if not place.on_gpu:
        return place.outcome(note=_NO_COUNT)
    torch.cuda.synchronize()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    place.values |= {"peak_bytes": peak, "reserved_bytes": reserved}
    place.at_most("reserved_share", reserved / peak, 1.15)
    return place.outcome()


def fp8_memory(place: Place) -> CheckOutcome:
    wide, narrow = steps(place, 10), steps(place, 10, dtype="fp8")
    place.equal("losses in fp8 equal those in bf16", narrow["losses"] == wide["losses"], False)
    _same_losses(place, narrow["losses"], wide["losses"], 0.05)
    return place.outcome()
