"""Elastic: a run on the devices that are there, fewer or more than those of its layout.

devices   torchrun or Slurm started other ranks, a rank of hocket's own launcher died twice before
          its first step, or this machine shows other GPUs
layout    the planner's best for at most so many ranks, with the same global batch; the checkpoint
          is resharded as it is read
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hocket.jobs.precision import on_cuda
from hocket.jobs.request import LAYOUT_FIELDS
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.layout import TERMS, Layout

if TYPE_CHECKING:
    from hocket.jobs.prepare import PreparedJob
    from hocket.jobs.request import JobRequest
    from hocket.spec.run import TrainOptions


def checked(options: TrainOptions, world_size: int | None) -> None:
    """Raise OptionError where hocket's own launcher may not start a rank again, and so never learns
    that a device is gone. Another launcher starts ranks itself. `world_size`: as of
    `prepare.prepare_job`."""
    if options.elastic and world_size is None and not options.max_restarts:
        raise OptionError(
            "--elastic with --max-restarts 0: a device counts as gone when its rank dies twice "
            "before a step, and without a restart no rank dies twice",
            hint="--max-restarts 3",
        )


def ranks_there(
    request: JobRequest, options: TrainOptions, layout: Layout, world_size: int | None
) -> int | None:
    """Ranks for which a layout is to be chosen; None: the run, whose options these are, keeps its
    layout. `world_size`: as of `prepare.prepare_job`."""
    if not options.elastic or request.auto:
        return None
    if request.ranks is not None:
        return request.ranks
    if world_size is not None:
        return world_size if world_size != layout.world_size else None
    if not on_cuda(options):
        return None
    from hocket.probing import devices

    visible = devices.visible_gpus()
    named = request.given & {"layout", *TERMS}
    enough = layout.world_size <= visible if named else layout.world_size == visible
    return visible if visible and not enough else None


def chosen_for(request: JobRequest, count: int) -> JobRequest:
    """The request with a layout that hocket chooses, of at most `count` ranks."""
    given = request.given - {"layout", *LAYOUT_FIELDS}
    return dataclasses.replace(request, auto=True, ranks=count, given=given, layout=Layout())


def unmeasured_layout(job: PreparedJob, count: int) -> Layout:
    """The first legal one of `resized`, for a machine without a probe. Raises HocketError."""
    from hocket.jobs.validate import validate_layout
    from hocket.planning.machine_choice import resized

    workload = job.request.workload
    why: HocketError | None = None
    for layout in resized(job.layout, count):
        try:
            return validate_layout(job.source.dimensions, layout, workload)
        except HocketError as error:
            why = error
    raise why or LayoutError(f"no layout has at most {count} ranks", hint="--layout dp1")
