"""One rank of one contender: builds it, then takes as many steps as it is told to, timed.

Started by `benchmarks.groups` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does.
Commands come as lines on standard input; rank 0 answers on a pipe of its own, so that what
libraries print can do no harm:

    parent -> every rank   steps N        take N steps
    rank   -> parent       {"ready": ...}, {"times": ..., "losses": ...} or {"error": ...}

End of input ends the rank, so none outlives its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Workload, quiet

if TYPE_CHECKING:
    import torch

Step = Callable[["torch.Tensor"], float]
"""One whole training step on the global batch's ids [B, S]: the global mean loss, on any rank
that knows it (rank 0 must)."""


def resident_bytes(field: str = "VmRSS") -> int:
    """Resident memory of this process now (VmRSS) or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let VmHWM begin again at the present resident size (Linux; elsewhere nothing happens)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class Steps:
    """Takes steps in turn and measures each from a barrier to the loss being known."""

    def __init__(self, workload: Workload, step: Step, meet: Callable[[], None]) -> None:
        self.workload, self.step, self.meet = workload, step, meet
        self.done = 0

    def take(self, count: int) -> dict[str, Any]:
        times, losses, busy = [], [], 0.0
        for _ in range(count):
            ids = self.workload.batch(self.done)
            self.meet()
            start, used = time.perf_counter(), time.process_time()
            loss = self.step(ids)
            times.append(time.perf_counter() - start)
            busy += time.process_time() - used
            losses.append(float(loss))
            self.done += 1
        return {
            "times": times,
            "losses": losses,
            "processor_seconds": busy / count,
            "peak_bytes": resident_bytes("VmHWM"),
        }


def main() -> None:
    """Entry of `python -m benchmarks.rank MODULE:FUNCTION OPTIONS WORKLOAD FD`."""
    entry, options, workload_text, descriptor = sys.argv[1:5]
    quiet()
    answers = os.fdopen(int(descriptor), "w", buffering=1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        workload = Workload.from_json(workload_text)
        module, _, function = entry.partition(":")
        built = getattr(importlib.import_module(module), function)
        before = resident_bytes()
        step = built(workload, **json.loads(options))
        # What measures something else than training steps brings its own `take`.
        steps = step if hasattr(step, "take") else Steps(workload, step, barrier())
        reset_peak()
        answer({"ready": True, "base_bytes": before})
        for line in sys.stdin:
            word, _, count = line.partition(" ")
            assert word == "steps", line
            answer(steps.take(int(count)))
    except BaseException:
        answer({"error": traceback.format_exc()})
        raise
    finally:
        answers.close()
    # Some libraries hang in their own destructors once a peer has gone; nothing is left to save.
    os._exit(0)


def barrier() -> Callable[[], None]:
    """A barrier over all ranks; nothing where there is one process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: None
    return dist.barrier


if __name__ == "__main__":
    main()
