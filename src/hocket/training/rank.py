"""The rank's entry: `main(context, payload)`, called in every rank of a training job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hocket.spec.run import RunFolder
from hocket.training.build import build, read_schedule
from hocket.training.loop import LONG, Loop
from hocket.training.out_of_memory import explain

if TYPE_CHECKING:
    from hocket.launch import RankContext


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Train as the run folder says.

    Args:
        context: this rank's place in the world.
        payload: `run`, the run folder's path, which holds run.json, schedule.txt and data/; and
            `trust_remote_code`, the flag of the command that started the ranks.

    Raises:
        HocketError: what the user can mend.
    """
    folder = RunFolder(payload["run"])
    spec = folder.load(trust_remote_code=bool(payload.get("trust_remote_code")))
    if context.rank == 0:
        context.emit({"event": "phase", "name": "building the model"})
    context.expect(max(LONG, spec.options.timeout))
    job = build(spec, context, read_schedule(folder.schedule_file))
    try:
        Loop(job, folder, context).run()
    except torch.OutOfMemoryError as error:
        raise explain(error, job, folder.path) from error
