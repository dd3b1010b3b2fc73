"""Elastic: a run on the devices that are there, fewer or more than those of its layout.

devices   torchrun or Slurm started other ranks, a rank of hocket's own launcher died twice before
          its first step, or this machine shows other GPUs
layout    the planner's best for at most so many ranks, with the same global batch; the checkpoint
          is resharded as it is read
growth    a run that lost devices looks for them at each checkpoint; where some are back it saves
          and continues in the larger layout
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.jobs.precision import on_cuda
from hocket.jobs.request import LAYOUT_FIELDS
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.launcher_variables import launcher_number
from hocket.spec.layout import TERMS, Layout

if TYPE_CHECKING:
    from hocket.jobs.prepare import PreparedJob
    from hocket.jobs.request import JobRequest
    from hocket.launch import Launcher
    from hocket.spec.forecast import Forecast
    from hocket.spec.run import TrainOptions

MOST = 1 << 16
"""Devices of a run whose layout is not given."""
LOOK = 300.0
"""Seconds between two looks for devices, where no checkpoint comes before."""
RETRY = 600.0
"""Seconds until a device whose rank died, and that is shown all the same, is tried again; twice
as long after each time that it fails."""


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
    from hocket.planning.enumeration import resized

    workload = job.request.workload
    why: HocketError | None = None
    for layout in resized(job.layout, count, workload.global_batch):
        try:
            return validate_layout(job.source.dimensions, layout, workload)
        except HocketError as error:
            why = error
    raise why or LayoutError(f"no layout has at most {count} ranks", hint="--layout dp1")


def shared_store_note(environment: Mapping[str, str]) -> str | None:
    """A line for ranks of torchrun on several hosts that could not be joined by another host."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or launcher_number(environment, "GROUP_WORLD_SIZE", 1) < 2:
        return None
    return (
        "a host that comes back cannot join: torchrun announces its shared store only once; start "
        "every agent with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def unused_ranks(job: PreparedJob, found: Forecast, count: int) -> str | None:
    """Why the chosen layout, whose forecast is `found`, uses fewer than the `count` ranks that
    there are; None where it uses them all."""
    from hocket.jobs.validate import validate_layout

    layout = Layout.parse(found.layout)
    left = count - layout.world_size
    if left <= 0:
        return None
    larger = [
        one for one in found.alternatives if Layout.parse(one.layout).world_size > layout.world_size
    ]
    if larger:
        best = min(larger, key=lambda one: (not one.fits, one.step_seconds))
        slower = best.step_seconds / found.step_seconds - 1
        speed = f"{slower:.0%} slower" if slower >= 0.005 else "as fast"
        why = f"{best.layout} would be {speed}" if best.fits else f"{best.layout} does not fit"
    else:
        try:
            validate_layout(job.source.dimensions, Layout(dp=count), job.request.workload)
            why = (
                f"none of the {len(found.alternatives)} fastest layouts has more ranks"
                if found.alternatives
                else "without measurements the run keeps its layout but for data ranks"
            )
        except HocketError as error:
            why = error.message
    return f"{left} of {count} ranks {'is' if left == 1 else 'are'} left out: {why}"


def visible(options: TrainOptions) -> int | None:
    """Devices that this machine shows; None where none can be counted: of CPU ranks."""
    if not on_cuda(options):
        return None
    from hocket.probing import devices

    return devices.visible_gpus()


class Growth:
    """The devices that a run of hocket's own launcher has lost, and whether they are back.

    Args:
        wanted: its layout with all of them.
        left: devices that its layout was chosen for; None: all.

    Attributes:
        asked: the ranks were asked to save and stop, so that the run continues on more devices.
    """

    def __init__(
        self, launcher: Launcher, request: JobRequest, wanted: Layout, left: int | None = None
    ) -> None:
        self._launcher, self._options, self._wanted = launcher, request.options, wanted
        shown = visible(request.options)
        named = shown is None or bool(request.given & {"layout", *TERMS})
        self._most = wanted.world_size if named else max(wanted.world_size, MOST)
        self._left = left or min(self._most, max(wanted.world_size, shown or 0))
        self._broken = 0
        """Of the lost devices, those that are shown all the same."""
        self._wait, self._retry, self._looked = RETRY, 0.0, 0.0
        self._tried = self.asked = False

    def lost(self, left: int) -> None:
        """The layout is to be one of `left` devices: the others are gone."""
        if self._tried:
            self._wait *= 2
        shown = visible(self._options)
        self._left, self._tried = left, False
        self._broken = max(0, (self._wanted.world_size if shown is None else shown) - left)
        self._looked = time.monotonic()
        self._retry = self._looked + self._wait

    def there(self) -> int:
        """Devices for the run: those it has, those that are shown again, and, when it is time to
        try them, those that were shown while their rank died."""
        self._looked = time.monotonic()
        shown = visible(self._options)
        shown = self._wanted.world_size if shown is None else shown
        # A broken one that is gone from view counts at once when it is back.
        self._broken = min(self._broken, max(0, shown - self._left))
        if self._looked >= self._retry:
            self._broken = 0
        return min(self._most, max(self._left, shown - self._broken))

    def hear(self, event: dict[str, Any]) -> None:
        """An event of the run: after a checkpoint, look for devices; where some are back, have
        the ranks save and stop."""
        kind = event["event"]
        if kind == "restart":
            self.asked = False
        if self._left >= self._most or self.asked:
            return
        late = kind == "step" and time.monotonic() - self._looked > LOOK
        if (kind in ("saved", "copied") or late) and self.there() > self._left:
            self.asked = True
            self._launcher.ask_stop()

    def grown(self, request: JobRequest) -> tuple[JobRequest, int]:
        """What continues the run on the devices that are there, and their number."""
        self.asked, self._tried = False, True
        count = self._left = self.there()
        if count != self._wanted.world_size:
            return dataclasses.replace(request, ranks=count), count
        given = request.given | {"layout", "microbatches"}
        return dataclasses.replace(request, layout=self._wanted, given=given), count
