"""Saves of a run: when, in the background or not; a disk that refuses costs one checkpoint only.

Where host memory suffices, a save is a copy to it, and a writer does the rest while training goes
on (`runtime.background_save`). A save that is due while the one before is being written waits for
it. The last one, and one after which the run stops, are waited for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.runtime import collectives
from hocket.runtime.background_save import BackgroundSaver
from hocket.runtime.checkpoint import CheckpointWorld, Restored, load_checkpoint, save_checkpoint
from hocket.runtime.host_copy import SHARE, HostNeed, background_fits
from hocket.runtime.host_memory import free_host_memory
from hocket.runtime.lora import TrainedParameters
from hocket.runtime.rank_state import RankState
from hocket.runtime.save_job import SaveJob
from hocket.runtime.state_copies import CopyJob, StateCopies
from hocket.spec.checkpoint import config_hash
from hocket.spec.errors import HocketError, ReplicaError, SaveError, TrainingError
from hocket.spec.files import LOCK
from hocket.spec.run import RunFolder
from hocket.spec.units import format_bytes, parse_bytes, parse_duration
from hocket.training import timeline
from hocket.training.build import RankJob
from hocket.training.dataset import TokenDataset
from hocket.training.faults import Faults

if TYPE_CHECKING:
    from hocket.launch import RankContext

ENDING = 20.0
"""Seconds that a run that fails waits for a checkpoint that is being written."""


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
        self.copies: StateCopies | None = None
        self._copier: BackgroundSaver | None = None
        self._lock = self._lock_text()
        self._damaged: Sequence[str] = ()  # checkpoints that this run could not resume from

    @property
    def in_background(self) -> bool:
        return self._saver is not None

    def due(self, step: int) -> bool:
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
        mode, note = self.options.save_mode, None
        wait = mode == "blocking" or self.options.save_every == 0
        if wait and self.copies is None:
            return None
        state = RankState(self._trained, self.job.optimizer.state_tensors())
        if self.copies is not None:
            if short := self.copies.room(state.num_bytes):
                note = f"--replicate-state is off: {short}"
            else:
                self._copier = self._writer("copies", state)
        if wait or (mode == "auto" and not self._agreed(state.num_bytes, peak_bytes)):
            return note
        self._saver = self._writer("saves", state)
        size = format_bytes(self._saver.copy.num_bytes)
        text = f"saves are written in the background from a copy in host memory ({size} a rank)"
        return "; ".join(filter(None, (text, note)))

    def _writer(self, name: str, state: RankState) -> BackgroundSaver:
        saver = BackgroundSaver(
            self.context.rank, self.context.world_size,
            torch.distributed.PrefixStore(name, self._store()), self.job.mesh.device,  # type: ignore[attr-defined]
            progress=lambda: self._faults.at("write"),
        )  # fmt: skip
        saver.copy.reserve(state)
        return saver

    def _store(self) -> Any:
        """A connection of its own: one that waits for a value must not hold up the others."""
        if self.context.world_size == 1:
            return torch.distributed.HashStore()  # type: ignore[attr-defined]
        return self.context.store().clone()  # type: ignore[attr-defined]

    def _agreed(self, num_bytes: int, peak_bytes: int) -> bool:
        free, host = free_host_memory(), os.uname().nodename
        limit = self.options.memory_per_rank
        if limit is not None:
            free = int(max(0, parse_bytes(limit) - peak_bytes) / SHARE)
            host += f" rank {self.context.rank}"
        rows = timeline.gather_values(self.context, "host copies", [host, num_bytes, free])
        key = "training/host copies fit"
        if rows is not None:
            fits = background_fits([HostNeed(*row) for row in rows])
            if self.context.world_size > 1:
                self.context.store().set(key, json.dumps(fits))
            return fits
        return bool(json.loads(self.context.store().get(key)))

    def restore(self) -> Restored | None:
        """Fill this rank from the newest copy in memory or checkpoint; None: the run begins. Every
        rank calls it. Raises CheckpointError: no checkpoint to resume from is whole."""
        context, options, spec = self.context, self.options, self.job.spec
        of_run: Any = {"layout": str(spec.layout), "model": config_hash(spec.config)}
        again = options.resume or context.attempt
        if again:
            of_run["optimizer_state"] = self.job.optimizer.state_tensors()
        if options.replicate_state:
            self.copies = StateCopies(
                self.folder.state_copies, self.folder.checkpoints, rank=context.rank,
                size=context.world_size, local_rank=context.local_rank, store=self._store(),
                towards="" if context.one_machine else context.address,
            )  # fmt: skip
            if not again:
                self.copies.clear()
            else:
                agree = CheckpointWorld.of(self.job.mesh).all_agree
                copy = self.copies.restore(self._trained, all_agree=agree, **of_run)
                if copy is not None:
                    return copy
        if not (options.resume or (self.copies and again and self.copies.newest())):
            return None
        restored = load_checkpoint(self.folder.checkpoints, parallel=self._trained, **of_run)
        self._damaged = restored.damaged
        return restored

    def before_update(self) -> None:
        """To be called before parameters or the optimizer's state change."""
        for saver in filter(None, (self._saver, self._copier)):
            saver.copy.before_update()

    def copies_due(self, step: int) -> bool:
        """Whether ranks' states are copied after `step`; a checkpoint is one as well."""
        return self._copier is not None and step % self.options.replicate_state == 0

    def copy(self, step: int) -> None:
        """Copy what all ranks hold after `step` into memory; all of them call it."""
        assert self._copier is not None and self.copies is not None  # noqa: PT018
        job = CopyJob(copies=self.copies, newest=self.copies.newest(), **self._at(step))
        state = RankState(self._trained, self.job.optimizer.state_tensors())
        self._copier.save(job, state, lambda: None)

    def _at(self, step: int) -> dict[str, Any]:
        spec = self.job.spec
        return {
            "step": step,
            "layout": str(spec.layout),
            "model": config_hash(spec.config),
            "cursor": self._dataset.cursor(step * spec.workload.global_batch),
        }

    def save(self, step: int, *, last: bool) -> None:
        """Save what all ranks hold after `step`; all of them call it.

        Args:
            last: no step follows, so that the save is waited for, and a failure is the run's.

        Raises:
            TrainingError: the last checkpoint could not be written.
        """
        keep, keep_every = self.options.keep_checkpoints, self.options.keep_every
        kwargs: dict[str, Any] = {**self._at(step), "keep": keep, "keep_every": keep_every}
        kwargs["damaged"] = self._damaged
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
        # Below a mount that is gone, a save would make another folder, on another file system.
        self.folder.spec_file.stat()
        if self._lock_text() != self._lock:  # this process was frozen, and has a successor
            raise OSError(errno.ESTALE, f"another process writes {self.folder.path} now")

    def _lock_text(self) -> bytes:
        """The lock of the run folder; empty: it has none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder.path / LOCK).read_bytes()
        return b""

    def poll(self) -> None:
        """Report the saves and copies that have ended."""
        for saver in filter(None, (self._saver, self._copier)):
            for result in saver.finished():
                if result.reason is None:
                    self._saved(result.step, result.path, result.kind)
                else:
                    self._not_saved(f"step {result.step} was not {result.kind}: {result.reason}")

    def finish(self, seconds: float | None = None) -> None:
        """Wait for what is being written, `seconds` at most, and report it."""
        for saver in filter(None, (self._saver, self._copier)):
            saver.wait(seconds)
        self.poll()

    def end(self, error: HocketError | None = None) -> None:
        """The run ends here, in good order or with what a restart does not mend. Copies in memory
        go where nothing continues from them: after the end, and of replicas that differ."""
        if error is not None:
            self.finish(ENDING)  # a checkpoint to continue from
        if self.copies is not None and (error is None or isinstance(error, ReplicaError)):
            self.finish()
            self.copies.clear()

    def _saved(self, step: int, path: Path, kind: str = "saved") -> None:
        if self.context.rank == 0:
            self.context.emit({"event": kind, "step": step, "path": str(path)})

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
