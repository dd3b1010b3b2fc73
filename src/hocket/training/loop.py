"""The loop: batch, forward and backward, clip, optimizer; and what is said about it.

    for each step                                     every so many steps
        1 microbatches of this data rank                  5 loss on held-out text
        2 forward_backward: loss and whole gradient       6 checkpoint
        3 clip by the global norm                     at the end
        4 AdamW at this step's learning rate              7 export

On CPU a step's loss and norm are checked before the optimizer changes anything. On CUDA nothing
waits for the device: a step that is not finite is skipped there, and loss and norm are read once in
`--log-interval` steps, when the next step's work is queued.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.models.rows import one_sequence_each, packed_rows
from hocket.runtime.lora import TrainedParameters
from hocket.spec.errors import HocketError, TrainingError
from hocket.spec.run import RunFolder
from hocket.spec.units import parse_bytes
from hocket.training import attention_file, stop_bound, timeline, trackers
from hocket.training.adapter import adapter_of_ranks
from hocket.training.build import RankJob
from hocket.training.dataset import BatchOrder, WindowDataset, open_dataset
from hocket.training.evaluate import held_out_loss, num_batches, perplexity
from hocket.training.expert_load import ExpertLoad
from hocket.training.export import ModelFiles, export_ranks
from hocket.training.faults import Faults, flip, miscompute, spoil
from hocket.training.inputs import Inputs
from hocket.training.learning_rate import learning_rate
from hocket.training.memory import MemoryCount, of_replicas
from hocket.training.metrics import TrainingMetrics
from hocket.training.nonfinite import Skips
from hocket.training.pauses import STOP, Pauses
from hocket.training.reading import LossReading, Readings, elapsed, interval, mark
from hocket.training.replicas import ReplicaCheck
from hocket.training.saving import Saves
from hocket.training.slow_ranks import SlowRanks
from hocket.training.token_manifest import TRAIN, VALID, Tokens
from hocket.training.utilization import flops_per_token, multiplied_parameters, peak_flops
from hocket.training.verify import StepVerification

if TYPE_CHECKING:
    from hocket.launch import RankContext

LONG = 900.0
"""Seconds of silence allowed where compilation, a disk or held-out text may take their time."""
FIRST_STEP = 60.0
"""Seconds without progress allowed in the first steps, unless torch.compile is at work."""
LEAST = 4.0
"""Seconds without progress that are always allowed between steps."""
SETTLED = 21
"""Steps whose median is a step's time."""


class Loop:
    """A training run on one rank, from its first step (or its checkpoint) to its export.

    Args:
        job: what to train with.
        folder: the run folder.
        context: this rank's place, and its voice: rank 0 speaks for all.
        faults: what is to fail here; None: nothing.
    """

    def __init__(
        self, job: RankJob, folder: RunFolder, context: RankContext, faults: Faults | None = None
    ) -> None:
        self.job = job
        self.folder = folder
        self.context = context
        self.spec = job.spec
        self.options = job.spec.options
        self.parallel = job.parallel
        self.leads = context.rank == 0
        self.faults = faults or Faults((), context, folder.checkpoints)
        self.parallel.recorder.beat = self.faults
        self.skips = Skips(context, self.parallel, self.options.max_skipped_steps)
        self.replicas = ReplicaCheck(
            context,
            self.parallel,
            job.optimizer,
            repair=self.options.on_divergence == "repair",
        )
        self._seconds: deque[float] = deque(maxlen=SETTLED)
        workload, layout = job.spec.workload, job.spec.layout
        self.num_tokens = workload.global_batch * workload.seq_len
        tokens = Tokens.load(folder.data)
        threads = layout.data_parallel == "threads"
        order = BatchOrder(
            workload.global_batch, 1 if threads else layout.dp, layout.microbatches or 1
        )
        rank = 0 if threads else job.mesh.coordinate["dp"]

        def inputs(name: str, seed: int | None) -> Inputs:
            dataset = open_dataset(folder.data, name, tokens, workload.seq_len, seed)
            return Inputs(dataset, order, rank, job.mesh.device)

        self.inputs = inputs(TRAIN, self.options.seed)
        if isinstance(self.inputs.dataset, WindowDataset):
            self.inputs.dataset.waiting = self._alive
        self._input_seconds = 0.0
        work = sum(multiplied_parameters(stage.module) for stage in self.parallel.stages)
        self.slow = SlowRanks(context, job.mesh, self.options.slow_rank_factor, work)
        verified = self.options.verify_every
        self.verification = StepVerification(context, self.parallel, self.inputs, verified)
        self.held_out = inputs(VALID, None)
        self.cuda = job.mesh.device.type == "cuda"
        self.memory_bytes: list[int] = []
        self.done = 0
        limit = self.options.memory_per_rank
        self._memory = MemoryCount(
            self.parallel.tensors(),
            job.optimizer.tensors,
            job.mesh.device,
            compiled=self.options.compile,
            limit=None if limit is None else parse_bytes(limit),
        )
        self._flops = flops_per_token(job.skeleton, workload.seq_len)
        name = torch.cuda.get_device_name(job.mesh.device) if self.cuda else ""
        peak = None if workload.dtype == "fp32" else peak_flops(name)
        self._peak = None if peak is None else peak * context.world_size
        self._interval = interval(self.options.log_interval, job.mesh.device)
        self._clock: Any = None
        self._load = ExpertLoad(self.parallel, job.skeleton)
        self.saves = Saves(context, folder, job, self.inputs.dataset, self.faults)

    # --- the run ---------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, or to the one after which the run is asked to stop: then it
        saves, and leaves the export to the start that resumes. Every rank calls it.

        Raises:
            TrainingError: too many steps in a row whose loss or gradient is not finite.
            ReplicaError: data-parallel replicas differ.
            CheckpointError: nothing to resume from.
        """
        self._restore()
        steps = self.options.steps
        metrics = None
        if self.leads:
            metrics = TrainingMetrics(
                self.folder.metrics_file,
                done=self.done,
                trackers=trackers.run_trackers(self.spec, self.folder.path, done=self.done),
                note=lambda text: self._say(event="note", text=text),
            )
        try:
            self._say(event="phase", name="training")
            with self._rows():
                self._steps(self.done, steps, metrics)
        except HocketError as error:
            self.saves.end(error)
            raise
        finally:
            gc.unfreeze()
            if metrics is not None:
                metrics.close()
                if self._load:
                    self._load.write(self.folder.experts_file)
        if self.done < steps:
            self._say(event="stopped", step=self.done)
            self.saves.end()
            return
        self._export()
        self.saves.end()
        self._say(event="done", steps=steps)

    def _steps(self, first: int, steps: int, metrics: TrainingMetrics | None) -> None:
        recorded = timeline.recorded_steps(self.options, first)
        unread: list[LossReading] = []
        underway: Readings | None = None
        self._clock = mark(self.job.mesh.device)
        pauses = Pauses(self.context, first, self.saves.seconds, cuda=self.cuda)
        for index in range(first, steps):
            began = time.monotonic()
            step = index + 1
            if (counted := index == first) and self.options.compile:
                self._say(event="phase", name="compiling, in the first two steps")
            self._allow(index, first)
            self.faults.begin_step(index)
            with ExitStack() as stack:
                if counted or (self.options.compile and index == first + 1):
                    self.context.expect(max(LONG, self.options.timeout))
                if counted:
                    self.job.optimizer.state_tensors()  # so that its state counts as such
                    stack.enter_context(self._memory.counting())
                if step in recorded:
                    one_machine = self.context.one_machine
                    stack.enter_context(timeline.recorded(self.job.mesh, one_machine))
                sampled = step not in recorded and not counted and self.slow.due(step)
                if sampled:
                    self.slow.begin(stack)
                reading = self._step(index)
            if sampled:
                self._say_note(self.slow.after(step, self._input_seconds))
            if counted:
                self._gather_memory()
                if self.leads and self.cuda:
                    attention_file.write_attention(self.folder, self.job, packed=self.inputs.packed)
            pause = self._evaluates(step) or self.saves.due(step) or step in recorded
            unread.append(reading)
            if underway is not None:  # this step's work is queued behind it
                self._report(underway, metrics)
                underway = None
            now = counted or pause or step == steps
            if now or len(unread) >= self._interval:
                underway, unread = Readings(unread, self._load.take()), []
            if underway is not None and (now or not self.cuda):
                # Nothing is queued behind it, or the device has to be waited for.
                self._report(underway, metrics, held_out=self._evaluates(step))
                underway = None
            self.done = step
            if step == min(first + 3, steps):
                self._say_note(
                    stop_bound.stop_bound_of(
                        self.context,
                        self.folder.path,
                        TrainedParameters(self.parallel),
                        self.job.optimizer,
                        step_seconds=statistics.median(self._seconds or [time.monotonic() - began]),
                        grace=self.options.grace_seconds,
                        saves=1 + self.saves.in_background,
                    )
                )
            if step in recorded:
                self._write_timeline(step, later=step > recorded.start)
            self._seconds.append(time.monotonic() - began)
            ask = pauses.after(step, self._seconds[-1], reading.end)
            every = self.options.replica_check_every
            if (
                self.replicas.needed
                and every
                and (step % every == 0 or self.saves.due(step) or ask)
            ):
                self._say_note(self.replicas.compare(step))
            saved = self.saves.due(step) or ask
            if saved or self.saves.copies_due(step):
                if underway is not None:
                    self._report(underway, metrics)
                if unread:
                    self._report(Readings(unread, self._load.take()), metrics)
                underway, unread = None, []
                if saved:
                    with self._long():
                        self.saves.save(step, last=step == steps or ask == STOP)
                    pauses.saved()
                else:
                    self.saves.copy(step)
            self.saves.poll()
            if ask == STOP:
                return
            if counted:
                self._say_note(self.saves.choose(self._memory.memory.total))
                # What lives now lives to the end: later collections need not walk it again.
                gc.collect()
                gc.freeze()
            if counted or pause or ask:
                self._clock = mark(self.job.mesh.device)

    def _allow(self, index: int, first: int) -> None:
        """Set how long no rank may progress: in the first step, and where torch.compile is at work,
        what that may take; then 5 median steps, in a CUDA rank of as many as are read at once."""
        timeout = self.options.timeout
        if index - first < 2 and self.options.compile:
            allowed = max(LONG, timeout)
        elif len(self._seconds) < 3:
            allowed = min(FIRST_STEP, timeout)
        else:
            steps = self._interval if self.cuda else 1
            allowed = max(LEAST, 5 * steps * statistics.median(self._seconds))
            allowed = min(allowed, timeout)
        self.context.heart.allow(allowed)

    def _step(self, index: int) -> LossReading:
        parallel, options = self.parallel, self.options
        if self.faults.spoils("wrong"):
            miscompute(parallel)
        self.verification.before(index)
        began = time.perf_counter()
        self.faults.at("input")
        microbatches = self.inputs.step(index)  # 1
        self._input_seconds = time.perf_counter() - began
        learned = self.inputs.num_tokens(index)
        if self.faults.spoils("nan"):
            spoil(parallel)
        loss = parallel.forward_backward(microbatches, learned)  # 2
        norm = parallel.clip_grad_norm(options.max_grad_norm)  # 3
        lr = learning_rate(index, options)
        reading = LossReading(index + 1, lr, loss, norm, learned)
        if not self.cuda:
            reading.skipped = self.skips.skipped(reading, *reading.values.tolist(), search=True)
        with parallel.recorder.span("compute", "optimizer", "optimizer"):
            if not reading.skipped:
                self.saves.before_update()
                self.job.optimizer.step(lr, reading.skip() if self.cuda else None)  # 4
        parallel.begin_unshard()
        if row := self.faults.spoils("flip"):
            flip(parallel, row.get("place"))
        self.inputs.prefetch(index + 1)
        reading.end = mark(self.job.mesh.device)
        return reading

    @contextmanager
    def _rows(self) -> Iterator[None]:
        """Within, transformers does not look at positions to find packed documents: that would
        read the device in every forward. Whether rows are packed is known from the data."""
        packed = packed_rows() if self.cuda else nullcontext()
        with packed if self.inputs.packed else one_sequence_each():
            yield

    def _report(
        self, readings: Readings, metrics: TrainingMetrics | None, held_out: bool = False
    ) -> None:
        """Report what some steps gave, the last of them after evaluating if `held_out`."""
        rows = list(readings.rows())
        imbalance = None
        if readings.load is not None and self.leads:
            imbalance = self._load.add(readings.load.tolist())
        for number, (reading, loss, norm) in enumerate(rows, start=1):
            last = number == len(rows)
            late = self.cuda and self.skips.skipped(reading, loss, norm, search=False)
            if reading.skipped or late:
                continue
            self._report_step(
                reading, loss, norm, metrics, held_out=held_out and last, imbalance=imbalance
            )

    def _report_step(
        self,
        reading: LossReading,
        loss: float,
        norm: float,
        metrics: TrainingMetrics | None,
        *,
        held_out: bool,
        imbalance: float | None,
    ) -> None:
        seconds, self._clock = elapsed(self._clock, reading.end), reading.end
        row: dict[str, Any] = {
            "step": reading.step,
            "steps": self.options.steps,
            "loss": loss,
            "lr": reading.lr,
            "grad_norm": norm,
            "step_seconds": seconds,
            "tokens_per_second": self.num_tokens / seconds,
            "loss_tokens": reading.learned,
            "memory_bytes": self.memory_bytes,
            "layout": str(self.spec.layout),
        }
        if self.leads:
            samples = reading.step * self.spec.workload.global_batch
            row["num_input_tokens_seen"] = self.inputs.dataset.tokens_seen(samples)
        if imbalance is not None:
            row["expert_imbalance"] = imbalance
        if self._peak is not None:
            row["mfu"] = self._flops * row["tokens_per_second"] / self._peak
        if metrics is not None:
            self.context.emit({"event": "step", **row})
            silence = seconds * self._interval
            if silence > self.options.timeout / 4:
                self.context.expect(10 * silence)  # slow, and not silent
        if held_out:
            loss_held_out = self._evaluate(reading.step)
            row["held_out_loss"] = loss_held_out
            if loss_held_out is not None:
                row["held_out_perplexity"] = perplexity(loss_held_out)
        if metrics is not None:
            metrics.write(row)

    # --- what happens now and then ---------------------------------------------------------

    def _evaluates(self, step: int) -> bool:
        if not num_batches(self.held_out, self.options.eval_batches):
            return False
        every = self.options.eval_every
        return step == self.options.steps or (every > 0 and step % every == 0)

    def _evaluate(self, step: int) -> float | None:
        with self._long():
            self.faults.at("evaluate")
            loss = held_out_loss(self.parallel, self.held_out, self.options.eval_batches)
        if loss is not None:
            self._say(event="eval", step=step, loss=loss, perplexity=perplexity(loss))
        return loss

    def _write_timeline(self, step: int, *, later: bool) -> None:
        found = timeline.write_timeline(
            self.folder, self.context, self.job.mesh, step, self.memory_bytes, later=later
        )
        if found is not None and not later:
            self._say(
                event="timeline",
                step=step,
                path=str(self.folder.timeline_file),
                seconds=found.duration,
                bubble=found.bubble,
            )

    def _gather_memory(self) -> None:
        """Every rank's count, to rank 0; with replicas in threads, every replica's."""
        memory = self._memory.memory
        if self.parallel.replicas is not None:
            found = of_replicas(self.parallel.replicas.replica_bytes(), memory.optimizer)
            self._memory.require(max(each.total for each in found))
            rows: list[Any] | None = [each.to_json() for each in found]
        else:
            rows = timeline.gather_values(self.context, "memory", memory.to_json())
        if rows is not None:
            self.memory_bytes = [row["total"] for row in rows]
            timeline.write_record(self.context, self.folder.memory_file, json.dumps(rows))
            self.context.emit({"event": "memory", "ranks": rows})

    # --- checkpoints -----------------------------------------------------------------------

    def _restore(self) -> None:
        with self._long():
            restored = self.saves.restore()
        if restored is None:
            return
        self.inputs.dataset.restore(restored.cursor)
        cursor = self.inputs.dataset.cursor(restored.step * self.spec.workload.global_batch)
        assert {**cursor, **restored.cursor} == cursor, (restored.cursor, cursor)
        self.done = self.parallel.step = restored.step
        for text in restored.notes:
            self._say(event="note", text=text)
        self._say(event="note", text=f"resumed from {restored.path}")

    def _export(self) -> None:
        self.faults.at("export")
        if self.options.lora_rank is not None:
            self._say(event="phase", name="exporting the adapter")
            with self._long(), self._disk(self.folder.path, f".{self.folder.adapter.name}.*"):
                adapter_of_ranks(self.parallel, self.folder.adapter, self.spec)
            return
        self._say(event="phase", name="exporting the model")
        source = self.job.source
        files = ModelFiles(
            config=source.config,
            directory=source.directory,
            tokenizer=self.folder.data,
            code=source.code,
        )
        with self._long(), self._disk(self.folder.path, f".{self.folder.model.name}.*"):
            export_ranks(self.parallel, self.folder.model, files)

    # --- saying ----------------------------------------------------------------------------

    def _say_note(self, text: str | None) -> None:
        if text is not None:
            self._say(event="note", text=text)

    def _say(self, **event: Any) -> None:
        if self.leads:
            self.context.emit(event)

    @contextmanager
    def _disk(self, folder: Path, parts: str) -> Iterator[None]:
        """Within, a full disk is reported as such, and half-written files are removed."""
        try:
            yield
        except OSError as error:
            for half in folder.glob(parts):
                shutil.rmtree(half, ignore_errors=True)
            saved = "--resume continues from the last checkpoint" if self.options.save_every else ""
            raise TrainingError(
                f"step {self.done}: {folder} cannot be written to: {error.strerror or error}",
                hint="; ".join(filter(None, ["free the disk, or another --run", saved])),
            ) from error

    @contextmanager
    def _long(self) -> Iterator[None]:
        """Within, silence may last."""
        seconds = max(LONG, self.options.timeout)
        self.context.expect(seconds)
        before = self.context.heart.allow(seconds)
        yield
        self.context.heart.allow(before)
        self.context.beat()

    def _alive(self) -> None:
        """Where a rank waits for tokens, and for no other rank: progress, as for the heartbeat."""
        self.context.heart.tick()
        self.context.beat()
