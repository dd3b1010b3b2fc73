"""Checkpoint checks: rates of saving and loading, exactness of both, and a run that is resumed.

Not executed on a GPU yet.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path

from hocket.doctor.check import CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import WIDE, TrainedModel, spec
from hocket.doctor.place import Place

RATE = 0.3e9
"""Bytes/s that saving and loading reach on any local disk of a GPU machine."""


_row = row_of(
    "hocket.doctor.checkpoints", prefix="checkpoint-", group="checkpoint", seconds=5.0,
    timeout=120.0, capability=(8, 0),
)  # fmt: skip


CHECKS = (
    _row("rates", "save and load parameters and optimizer state of a 100M Llama", "rates",
         "0.3 GB/s or more each; what is loaded equals what was saved bit for bit"),
    _row("resume", "three steps after loading a checkpoint, compared with three without", "resume",
         "losses within 1e-4"),
    _row("train-and-resume", "`hocket train` on one rank: 30 steps in bf16, compiled, with "
         "evaluation and saving, and a resumption at step 20", "resumed_run",
         "the loss falls by 1 or more; the resumed run ends within 0.05 of the first; every step "
         "reports its utilization where the GPU's peak is known", seconds=32.0, timeout=400.0,
         slow=True),
)  # fmt: skip


def _saved(place: Place, folder: Path, steps: int) -> tuple[TrainedModel, Path]:
    from hocket.runtime.checkpoint import save_checkpoint

    job = spec(place.size(WIDE, BASE), seq_len=place.size(256, 16), seed=3)
    trained = TrainedModel(place, job)
    for _ in range(steps):
        trained.step(trained.batches())
    path = save_checkpoint(
        folder, step=steps, parallel=trained.parallel, layout=str(job.layout), model="doctor",
        optimizer_state=trained.optimizer.state_tensors(),
    )  # fmt: skip
    return trained, path


def _loaded(place: Place, folder: Path) -> TrainedModel:
    from hocket.runtime.checkpoint import load_checkpoint

    job = spec(place.size(WIDE, BASE), seq_len=place.size(256, 16), seed=4)
    trained = TrainedModel(place, job)
    load_checkpoint(
        folder, parallel=trained.parallel, layout=str(job.layout), model="doctor",
        optimizer_state=trained.optimizer.state_tensors(),
    )  # fmt: skip
    return trained


def rates(place: Place) -> CheckOutcome:
    """Bytes/s of a checkpoint, and its values."""
    import torch

    from hocket.runtime.checkpoint import load_checkpoint, save_checkpoint

    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as name:
        folder = Path(name)
        saved, path = _saved(place, folder, 2)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        begun = time.perf_counter()
        save_checkpoint(
            folder, step=3, parallel=saved.parallel, layout=str(saved.job.layout), model="doctor",
            optimizer_state=saved.optimizer.state_tensors(),
        )  # fmt: skip
        place.at_least("saved_bytes_per_second", size / (time.perf_counter() - begun), RATE)
        other = _loaded(place, folder)
        begun = time.perf_counter()
        load_checkpoint(
            folder, parallel=other.parallel, layout=str(other.job.layout), model="doctor",
            optimizer_state=other.optimizer.state_tensors(),
        )  # fmt: skip
        place.at_least("loaded_bytes_per_second", size / (time.perf_counter() - begun), RATE)
    theirs = dict(other.parallel.named_parameters())
    for key, parameter in saved.parallel.named_parameters():
        place.equal(f"{key} is as saved", torch.equal(parameter, theirs[key]), True)
    state = other.optimizer.state_tensors()
    for key, tensors in saved.optimizer.state_tensors().items():
        for kind, tensor in tensors.items():
            place.equal(f"{kind} of {key} is as saved", torch.equal(tensor, state[key][kind]), True)
    return place.outcome(bytes=size)


def resume(place: Place) -> CheckOutcome:
    """Losses after a checkpoint, with and without a new process's state in between."""
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as name:
        first, _ = _saved(place, Path(name), 3)
        second = _loaded(place, Path(name))
    for step in range(3):
        batches = first.batches(seed=10 + step)
        expected, found = (float(t.step(batches)) for t in (first, second))
        place.values[f"loss_{step + 1}"] = found
        if not abs(found - expected) <= 1e-4 * abs(expected):
            place.failures.append(f"step {step + 1}: loss {found:.6f}, expected {expected:.6f}")
    return place.outcome()


def resumed_run(place: Place) -> CheckOutcome:
    """A run of one rank through the launcher, and the same resumed."""
    from hocket.doctor.model import catalogue
    from hocket.launch import Launcher
    from hocket.schedules.registry import build_schedule
    from hocket.spec.files import write_text
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload
    from hocket.training import data
    from hocket.training.tokenizer import byte_tokenizer
    from hocket.training.utilization import peak_flops

    layout = Layout(microbatches=2)
    options = TrainOptions(
        steps=30, lr=3e-3, save_every=10, eval_every=10, device=place.kind, compile=place.on_gpu
    )
    job = RunSpec(
        model="tiny-llama", config={**catalogue("tiny-llama"), "vocab_size": 257}, layout=layout,
        workload=Workload(seq_len=place.size(128, 32), global_batch=8, dtype="bf16"),
        options=options,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as name:
        text = Path(name) / "text.txt"
        text.write_text("".join(f"line {i} holds {i * i} and no more.\n" for i in range(4000)))
        folder = RunFolder(Path(name) / "run")
        data.prepare_data(
            folder.data, byte_tokenizer(), [text], seq_len=job.workload.seq_len, global_batch=8
        )
        write_text(folder.schedule_file, str(build_schedule(layout, 2)))

        def rows(job: RunSpec) -> list[dict[str, float]]:
            write_text(folder.spec_file, job.to_json())
            with Launcher(device=place.kind) as launcher:
                launcher.run(
                    "hocket.training.rank:main", 1, {"run": str(folder.path)},
                    startup_timeout=300.0, silence_timeout=300.0, on_output=lambda *_: None,
                )  # fmt: skip
            return [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]

        first = rows(job)
        place.equal("steps of the first run", [r["step"] for r in first], list(range(1, 31)))
        place.equal("a timeline was written", folder.timeline_file.exists(), True)
        (folder.checkpoints / "latest").write_text("step-000020\n")
        second = rows(dataclasses.replace(job, options=dataclasses.replace(options, resume=True)))
    place.equal("steps of the resumed run", [r["step"] for r in second], list(range(1, 31)))
    known = place.on_gpu and peak_flops(place.name) is not None
    place.equal("steps with a utilization", sum("mfu" in r for r in first), 30 if known else 0)
    place.values |= {
        "first_loss": first[0]["loss"], "last_loss": first[-1]["loss"],
        "resumed_last_loss": second[-1]["loss"],
    }  # fmt: skip
    if not first[-1]["loss"] < first[0]["loss"] - 1:
        place.failures.append(f"the loss fell from {first[0]['loss']} to {first[-1]['loss']}")
    if not abs(second[-1]["loss"] - first[-1]["loss"]) <= 0.05:
        place.failures.append(
            f"the resumed run ended at {second[-1]['loss']}, the first at {first[-1]['loss']}"
        )
    return place.outcome()
