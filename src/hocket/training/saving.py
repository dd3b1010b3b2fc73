"""Saving a step of a run: a disk that refuses costs one checkpoint, not the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hocket.runtime import collectives
from hocket.runtime.checkpoint import save_checkpoint
from hocket.runtime.lora import TrainedParameters
from hocket.spec.checkpoint import config_hash
from hocket.spec.errors import SaveError, TrainingError
from hocket.spec.run import RunFolder, RunSpec
from hocket.training.build import RankJob
from hocket.training.dataset import TokenDataset

if TYPE_CHECKING:
    from hocket.launch import RankContext


def save_step(
    context: RankContext,
    folder: RunFolder,
    spec: RunSpec,
    job: RankJob,
    step: int,
    *,
    last: bool,
    begin: Callable[[], None],
    dataset: TokenDataset,
) -> Path | None:
    """Save what all ranks hold after `step`; all of them call it.

    Args:
        last: no step follows, so that a failure is the run's. begin: as of `save_checkpoint`.
        dataset: gives the position in the data.

    Returns:
        The checkpoint's folder; None where it could not be written, which one rank then says.

    Raises:
        TrainingError: the last checkpoint could not be written.
    """
    try:
        return save_checkpoint(
            folder.checkpoints,
            step=step,
            parallel=TrainedParameters(job.parallel),
            optimizer_state=job.optimizer.state_tensors(),
            layout=str(spec.layout),
            model=config_hash(spec.config),
            cursor=dataset.cursor(step * spec.workload.global_batch),
            keep=spec.options.keep_checkpoints,
            keep_every=spec.options.keep_every,
            begin=begin,
        )
    except SaveError as error:
        if last:
            raise TrainingError(
                error.message,
                hint="free the disk, or another --run; --resume continues from the last checkpoint",
            ) from error
        world = job.mesh.axis("world")
        first = torch.tensor(
            [float(context.rank if error.mine else world.size)], device=job.mesh.device
        )
        collectives.all_reduce(first, world, job.mesh.recorder, op="min")
        if int(first) == context.rank:
            text = f"{error.message}; training continues, and older checkpoints stay"
            context.emit({"event": "note", "text": text})
        return None
