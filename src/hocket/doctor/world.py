"""World: the ranks that a check starts, how they meet, and what each of them found.

Not executed on a GPU yet.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hocket.doctor.place import Place

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext


def ranks(
    place: Place, entry: str, count: int, payload: dict[str, Any],
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank of a world handed to `tell`.

    Args:
        place: decides on the device.
        entry: `module:function`, called with a RankContext and the payload in each rank.
        count: ranks.
        payload: plain data.
        environment: variables of the ranks in addition to those of this process.

    Raises:
        HocketError: what a rank raised, or that it died.
    """
    from hocket.launch import Launcher

    found: dict[int, dict[str, Any]] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "found":
            found[event["rank"]] = event["values"]

    with Launcher(device=place.kind, environment=environment) as launcher:
        launcher.run(
            entry, count, payload, listen, on_output=lambda *_: None, startup_timeout=120.0,
            silence_timeout=120.0,
        )  # fmt: skip
    return [found[rank] for rank in range(count)]


def tell(context: RankContext, **values: Any) -> None:
    """Hand what this rank found to the check."""
    context.emit({"event": "found", "values": values})


def count_here(place: Place) -> int:
    """Ranks of a world over this machine: all its GPUs, or two CPU ranks."""
    if not place.on_gpu:
        return 2
    import torch

    return torch.cuda.device_count()


def join(context: RankContext, backend: str) -> Any:
    """Claim this rank's device and meet the other ranks; the device."""
    import torch

    from hocket.runtime.device import claim_device

    cuda = context.device_kind == "cuda"
    device = torch.device("cuda", context.local_rank) if cuda else torch.device("cpu")
    claim_device(device)
    context.init_process_group(backend, device)
    return device


def place_of(context: RankContext) -> Place:
    return Place("gpu" if context.device_kind == "cuda" else "cpu", context.local_rank)


def timed(call: Callable[[], object], repeats: int, device: Any) -> float:
    """Median seconds of a call, the device's work included."""
    import torch

    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def gradient_difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, partial: bool = False
) -> float:
    """Largest difference of gradients by name, each relative to its largest entry; infinite for
    NaN. `partial`: `found` may lack some."""
    assert set(found) == set(expected) or (partial and set(found) <= set(expected))
    worst = 0.0
    for name, gradient in found.items():
        want = expected[name]
        error = float((gradient - want).abs().max()) / max(float(want.abs().max()), 1e-30)
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst
