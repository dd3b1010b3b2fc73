"""What a save and a comparison of replicas cost training, in turns within one run.

    python -m benchmarks.saves                       all layouts: about ten minutes on two cores
    python -m benchmarks.saves --layout dp2:zero=3 --cycles 9

A run takes cycles of 20 steps: without a save, with a blocking one, with one in the background,
after the first step. The cost of a save is the time that its cycle takes longer than the cycles
without one before and after it, in steps: it counts whatever the writer takes away from training,
not only how long the loop stands still. *stall* is that: the time inside the call, in steps.
*compared* is the time inside the call that compares data-parallel replicas, in steps. The model is
a Llama of about a million parameters at 4,096 tokens a rank and step; one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

LAYOUTS = ("dp2", "dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "dp2.pp2.tp2:microbatches=2")
EVERY = 20
"""Steps of a cycle."""
ORDER = ("none", "blocking", "background")
CONFIG = {
    "hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 3, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def rank(context: Any, payload: dict[str, Any]) -> None:
    """Train in cycles; rank 0 emits seconds of each step, and of the call that saves."""
    import torch

    from hocket.spec.run import RunFolder
    from hocket.training.build import build_rank_job, read_schedule
    from hocket.training.dataset import BatchOrder, open_dataset
    from hocket.training.faults import Faults
    from hocket.training.inputs import Inputs
    from hocket.training.replicas import ReplicaCheck
    from hocket.training.saving import Saves
    from hocket.training.token_manifest import TRAIN, Tokens

    folder = RunFolder(payload["run"])
    spec = folder.load()
    context.expect(900.0)
    job = build_rank_job(spec, context, read_schedule(folder.schedule_file))
    layout, workload = spec.layout, spec.workload
    tokens = Tokens.load(folder.data)
    order = BatchOrder(workload.global_batch, layout.dp, layout.microbatches or 1)
    dataset = open_dataset(folder.data, TRAIN, tokens, workload.seq_len, 0)
    inputs = Inputs(dataset, order, job.mesh.coordinate["dp"], torch.device("cpu"))
    faults = Faults((), context, folder.checkpoints)
    ways = {mode: Saves(context, folder, job, dataset, faults) for mode in ORDER}

    def step(index: int) -> None:
        batches = inputs.step(index)
        loss = job.parallel.forward_backward(batches, inputs.num_tokens(index))
        norm = job.parallel.clip_grad_norm(1.0)
        float(loss), float(norm)
        job.optimizer.step(1e-3)
        job.parallel.begin_unshard()

    for index in range(3):
        step(index)
    ways["background"].choose(0)
    index = 3
    cycles = [ORDER[n % len(ORDER)] for n in range(len(ORDER) * payload["cycles"])]
    for mode in ["background", "blocking", *cycles, "none"]:  # the first two are not counted
        seconds, stall = [], 0.0
        for number in range(EVERY):
            context.expect(900.0)
            began = time.perf_counter()
            step(index)
            index += 1
            if number == 0 and mode != "none":
                called = time.perf_counter()
                ways[mode].save(index, last=False)
                stall = time.perf_counter() - called
            ways[mode].poll()
            seconds.append(time.perf_counter() - began)
        ways[mode].finish()
        if context.rank == 0:
            row = {"event": "cycle", "mode": mode, "seconds": seconds, "stall": stall}
            context.emit(row)
    replicas = ReplicaCheck(context, job.parallel, job.optimizer, repair=False)
    for _ in range(EVERY if replicas.needed else 0):
        step(index)
        index += 1
        called = time.perf_counter()
        replicas.compare(index)
        if context.rank == 0:
            context.emit({"event": "compared", "seconds": time.perf_counter() - called})


def measure(layout: str, cycles: int, folder: Path) -> dict[str, Any]:
    """The rows of one layout, and the costs that follow from them."""
    from hocket.jobs import prepare
    from hocket.jobs.request import request
    from hocket.launch import Launcher

    job = prepare.prepare_job(
        request(
            {
                "model": str(folder / "model"), "data": [str(folder / "text.txt")],
                "run": str(folder / layout.replace(":", "-")), "layout": layout,
                "tokenizer": "bytes", "seq_len": 256,
                "global_batch": 32, "steps": 10_000, "eval_every": 0, "device": "cpu",
                "save_mode": "background", "cluster": "none",
            }
        )
    )  # fmt: skip
    run = prepare.train_folder(job.request)
    _, tokens, config = prepare.data(job, run, lambda *_: None)
    spec = prepare.write_run(prepare.fitted_to(job, tokens), run, config, "train")
    rows: list[dict[str, Any]] = []
    compared: list[float] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "cycle":
            rows.append(event)
        elif event["event"] == "compared":
            compared.append(event["seconds"])

    with Launcher("cpu", 1, preload=["hocket.training.build"]) as launcher:
        launcher.run(
            "benchmarks.saves:rank", spec.layout.world_size,
            {"run": str(run.path), "cycles": cycles}, hear,
            startup_timeout=300.0, silence_timeout=900.0,
        )  # fmt: skip
    found = {"layout": layout, **costs(rows[2:])}
    if compared:
        found["compared"] = statistics.median(compared) / found["step_seconds"]
    return found


def costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Costs in steps: of each save against the mean of the two nearest cycles without one."""
    plain = [n for n, row in enumerate(rows) if row["mode"] == "none"]
    step = statistics.median(s for n in plain for s in rows[n]["seconds"])
    found: dict[str, Any] = {"step_seconds": step}
    for mode in ORDER[1:]:
        cost, stall = [], []
        for n, row in enumerate(rows):
            if row["mode"] != mode:
                continue
            before = max(m for m in plain if m < n)
            after = min(m for m in plain if m > n)
            alone = (sum(rows[before]["seconds"]) + sum(rows[after]["seconds"])) / 2
            cost.append((sum(row["seconds"]) - alone) / (alone / EVERY))
            stall.append(row["stall"] / (alone / EVERY))
        found[mode] = {
            "cost": statistics.median(cost), "costs": cost, "stall": statistics.median(stall),
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--cycles", type=int, default=5, help="cycles of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/saves.json"))
    args = parser.parse_args()
    from benchmarks.quiet import Watch
    from hocket.catalogue import models
    from hocket.reporting.table import table_text

    found, cells = [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model").mkdir()
        config = {**models.config("tiny-llama"), **CONFIG}
        (folder / "model" / "config.json").write_text(json.dumps(config))
        (folder / "text.txt").write_text("a hocket is one melody for several voices\n" * 4000)
        for layout in args.layout:
            watch = Watch([])
            row = measure(layout, args.cycles, folder)
            row["busy"] = watch.foreign()
            found.append(row)
            blocking, later = row["blocking"], row["background"]
            cells.append(
                [
                    layout, f"{row['step_seconds'] * 1e3:.0f}",
                    f"{blocking['stall']:.3f}", f"{later['stall']:.3f}",
                    f"{blocking['cost']:.3f}", f"{later['cost']:.3f}",
                    f"{later['stall'] / blocking['stall']:.3f}",
                    f"{row['compared']:.4f}" if "compared" in row else "",
                ]
            )  # fmt: skip
    heads = ["layout", "step ms", "stall, blocking", "background", "cost, blocking", "background",
             "stall ratio", "compared"]  # fmt: skip
    print(table_text(heads, cells))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
