"""Saves of a run: when, in the background or not; a disk that refuses costs one checkpoint only.

Where host memory suffices, a save is a copy to it, and a writer does the rest while training goes
on (`runtime.background_save`). A save that is due while the one before is being written waits for
it. The last one, and one after which the run stops, are waited for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.runtime import collectives
from hocket.runtime.background_save import BackgroundSaver
from hocket.runtime.checkpoint import save_checkpoint
from hocket.runtime.host_memory import free_memory
from hocket.runtime.lora import TrainedParameters
from hocket.runtime.rank_state import RankState
from hocket.runtime.save_job import SaveJob
from hocket.spec.checkpoint import config_hash
from hocket.spec.errors import SaveError, TrainingError
from hocket.spec.run import RunFolder
from hocket.spec.units import format_bytes, parse_bytes, parse_duration
from hocket.training import timeline
from hocket.training.build import RankJob
from hocket.training.dataset import TokenDataset
from hocket.training.faults import Faults

if TYPE_CHECKING:
    from hocket.launch import RankContext

SMALL = 16_000_000
"""Bytes of a rank's state below which `auto` saves without a copy: files are written in tens of
milliseconds, most of which is the disk's time to flush."""
SHARE = 0.5
"""Share of a host's free memory that the copies of its ranks may take by default."""


@dataclasses.dataclass(frozen=True)
class HostNeed:
    """What one rank's copy takes of its host's memory: bytes, and those that are free there."""

    host: str
    bytes: int
    free: int


def background_fits(rows: list[HostNeed]) -> bool:
    """Whether copies of all ranks' states are worth it, and fit their hosts' memory."""
    free = {row.host: row.free for row in rows}
    need = {host: sum(row.bytes for row in rows if row.host == host) for host in free}
    fits = all(need[host] <= SHARE * free[host] for host in free)
    return fits and max(row.bytes for row in rows) >= SMALL


class Saves:
    """When and how a rank's run saves.

    Args:
        context, folder, job: of the run.
        dataset: gives the position in the data.
        faults: what is to fail here.

    Attributes:
        seconds: between saves by time; None: none by time.
    """

    def __init__(
        self,
        context: RankContext,
        folder: RunFolder,
        job: RankJob,
        dataset: TokenDataset,
        faults: Faults,
    ) -> None:
        self.context, self.folder, self.job = context, folder, job
        self.options = job.spec.options
        self._dataset, self._faults = dataset, faults
        every = self.options.save_every
        self._steps = every if isinstance(every, int) else 0
        self.seconds = parse_duration(every) if isinstance(every, str) else None
        self._trained = TrainedParameters(job.parallel)
        self._saver: BackgroundSaver | None = None

    @property
    def in_background(self) -> bool:
        return self._saver is not None

    def due(self, step: int) -> bool:
        """Whether a save by steps is due after `step`."""
        if self.options.save_every == 0:
            return False
        return step == self.options.steps or (self._steps > 0 and step % self._steps == 0)

    def choose(self, peak_bytes: int) -> str | None:
        """Choose how to save, once the optimizer has its state, and allocate host memory; every
        rank calls it.

        Args:
            peak_bytes: of this rank's tensors, where `--memory-per-rank` limits them.

        Returns:
            What rank 0 prints of it.
        """
        mode = self.options.save_mode
        if mode == "blocking" or self.options.save_every == 0:
            return None
        state = RankState(self._trained, self.job.optimizer.state_tensors())
        if mode == "auto" and not self._agreed(state.num_bytes, peak_bytes):
            return None
        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        if self.context.world_size > 1:
            # A connection of its own: one that waits for a value must not hold up the others.
            store = self.context.store().clone()  # type: ignore[attr-defined]
        self._saver = BackgroundSaver(
            self.context.rank, self.context.world_size, store, self.job.mesh.device,
            progress=lambda: self._faults.at("write"),
        )  # fmt: skip
        self._saver.copy.reserve(state)
        size = format_bytes(self._saver.copy.num_bytes)
        return f"saves are written in the background from a copy in host memory ({size} a rank)"

    def _agreed(self, num_bytes: int, peak_bytes: int) -> bool:
        free, host = free_memory(), os.uname().nodename
        limit = self.options.memory_per_rank
        if limit is not None:
            free = int(max(0, parse_bytes(limit) - peak_bytes) / SHARE)
            host += f" rank {self.context.rank}"
        rows = timeline.gather(self.context, "host copies", [host, num_bytes, free])
        key = "training/host copies fit"
        if rows is not None:
            fits = background_fits([HostNeed(*row) for row in rows])
            if self.context.world_size > 1:
                self.context.store().set(key, json.dumps(fits))
            return fits
        return bool(json.loads(self.context.store().get(key)))

    def before_update(self) -> None:
        """To be called before parameters or the optimizer's state change."""
        if self._saver is not None:
            self._saver.copy.before_update()

    def save(self, step: int, *, last: bool) -> None:
        """Save what all ranks hold after `step`; all of them call it.

        Args:
            last: no step follows, so that the save is waited for, and a failure is the run's.

        Raises:
            TrainingError: the last checkpoint could not be written.
        """
        spec = self.job.spec
        kwargs: dict[str, Any] = {
            "step": step,
            "layout": str(spec.layout),
            "model": config_hash(spec.config),
            "cursor": self._dataset.cursor(step * spec.workload.global_batch),
            "keep": self.options.keep_checkpoints,
            "keep_every": self.options.keep_every,
        }
        if self._saver is not None and not last:
            state = RankState(self._trained, self.job.optimizer.state_tensors())
            job = SaveJob(folder=self.folder.checkpoints, **kwargs)
            self._saver.save(job, state, self._begin)
            self.poll()
            return
        self.finish()
        try:
            path = save_checkpoint(
                self.folder.checkpoints,
                parallel=self._trained,
                optimizer_state=self.job.optimizer.state_tensors(),
                begin=self._begin,
                **kwargs,
            )
        except SaveError as error:
            self._failed(error, last=last)
        else:
            self._saved(step, path)

    def _begin(self) -> None:
        self._faults.at("save")

    def poll(self) -> None:
        """Report the saves that have ended."""
        for result in () if self._saver is None else self._saver.finished():
            if result.reason is None:
                self._saved(result.step, result.path)
            else:
                self._not_saved(f"step {result.step} was not saved: {result.reason}")

    def finish(self, seconds: float | None = None) -> None:
        """Wait for what is being written, `seconds` at most, and report it."""
        if self._saver is not None:
            self._saver.wait(seconds)
            self.poll()

    def _saved(self, step: int, path: Path) -> None:
        if self.context.rank == 0:
            self.context.emit({"event": "saved", "step": step, "path": str(path)})

    def _not_saved(self, text: str) -> None:
        text += "; training continues, and older checkpoints stay"
        self.context.emit({"event": "note", "text": text})

    def _failed(self, error: SaveError, *, last: bool) -> None:
        """Of the ranks that could not write, the first reports it."""
        if last:
            raise TrainingError(
                error.message,
                hint="free the disk, or another --run; --resume continues from the last checkpoint",
            ) from error
        world = self.job.mesh.axis("world")
        own = float(self.context.rank if error.mine else world.size)
        first = torch.tensor([own], device=self.job.mesh.device)
        collectives.all_reduce(first, world, self.job.mesh.recorder, op="min")
        if int(first) == self.context.rank:
            self._not_saved(error.message)
