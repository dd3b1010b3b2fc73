"""The rank's entry: `main(context, payload)`, called in every rank of a training job."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hocket.spec import downloads
from hocket.spec.run import RunFolder
from hocket.training.build import build_rank_job, read_schedule
from hocket.training.faults import Faults
from hocket.training.loop import LONG, Loop
from hocket.training.out_of_memory import explained_out_of_memory

if TYPE_CHECKING:
    from hocket.launch import RankContext


@contextlib.contextmanager
def reading_shown(context: RankContext) -> Iterator[None]:
    """Within, rank 0 emits `progress` of the weights that it reads, twice a second at most."""
    due = 0.0

    def tell(download: downloads.Download) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return
        due = now + 0.5
        context.emit(
            {
                "event": "progress", "what": "reading weights", "done": download.done,
                "total": download.total, "unit": "bytes",
            }
        )  # fmt: skip

    with downloads.download_listener(tell) if context.rank == 0 else contextlib.nullcontext():
        yield


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Train as the run folder says.

    Args:
        context: this rank's place in the world.
        payload: `run`, the run folder's path, which holds run.json, schedule.txt and data/;
            `trust_remote_code`, the flag of the command that started the ranks; `resume`, where
            this start differs from what run.json says: ranks that are started again do.

    Raises:
        HocketError: what the user can mend.
    """
    folder = RunFolder(payload["run"])
    spec = folder.load(trust_remote_code=bool(payload.get("trust_remote_code")))
    resume = bool(payload.get("resume", spec.options.resume))
    spec = dataclasses.replace(spec, options=dataclasses.replace(spec.options, resume=resume))
    if context.rank == 0:
        context.emit({"event": "phase", "name": "building the model"})
    context.expect(max(LONG, spec.options.timeout))
    context.heart.allow(max(LONG, spec.options.timeout))
    faults = Faults(payload.get("faults", ()), context, folder.checkpoints)
    faults.at("build")
    # A model's own code may draw from both; a process of its own has another seed of torch's.
    random.seed(spec.options.seed)
    torch.manual_seed(spec.options.seed)
    with reading_shown(context):
        job = build_rank_job(spec, context, read_schedule(folder.schedule_file))
    try:
        Loop(job, folder, context, faults).run()
    except torch.OutOfMemoryError as error:
        raise explained_out_of_memory(error, job, folder.path) from error
