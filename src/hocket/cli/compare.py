"""`hocket compare`: one model run in every way of splitting it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Count, Model, Text, parse
from hocket.spec.errors import OptionError

Ways = Annotated[tuple[str, ...], tyro.conf.arg(metavar="WAY...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Run one model in every way of splitting it, from the same weights and data.

    One process, DataParallel, DistributedDataParallel, layer-wise, GPipe, 1F1B, tensor parallel
    and combinations: speed, memory by kind, every collective by its name, idle time, and whether
    each computes what one process computes. Exits 1 if any does not.

    Attributes:
        model: a Hugging Face directory, a run folder, an adapter of PEFT, a name
            that `hocket models` lists, or ORG/NAME[@REVISION] on the Hugging Face Hub.
        devices: ranks (or replicas, or stages) of each pure way.
        ways: only these, by name (threads data layerwise gpipe 1f1b tensor) or by layout.
        microbatches: of the pipelines. None: 4, or the most below it that divides the batch.
        sweep: microbatches, layers or devices: a curve instead of the tables.
        input_work: milliseconds of Python to prepare each sequence, in a second timing; 0: none.
        cluster: auto (this machine, measured once), a file of `hocket probe`, or none: what
            predictions are made for.
        links: links that CPU ranks are to feel, as in nvlink3 or pcie4@H100-SXM-80. None: the
            machine's own.
        memory_per_rank: tensor bytes that a CPU rank may hold, as in 60MB; what needs more is not
            run. None: what there is.
        steps: optimizer steps to time.
        seq_len: tokens of one sequence.
        global_batch: sequences of one step.
        seed: of the weights, if they are random, and of the tokens.
        attention: attention implementation, `sdpa` or `eager`.
        device: `auto`, `cpu` or `cuda`.
        backend: `auto`, `shm`, `gloo` or `nccl`.
        threads: CPU threads per rank.
        trust_remote_code: run code that a model directory brings along.
        json: print one JSON object.
    """

    model: Model = ""
    devices: int = 2
    ways: Ways = ()
    microbatches: Count = None
    sweep: Text = None
    input_work: float = 5.0
    cluster: str = "auto"
    links: Text = None
    memory_per_rank: Text = None
    steps: int = 5
    seq_len: int = 128
    global_batch: int = 8
    seed: int = 0
    attention: str = "sdpa"
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    trust_remote_code: bool = False
    json: bool = False


_JOB = (
    "model", "steps", "seq_len", "global_batch", "seed", "attention", "device", "backend",
    "threads", "trust_remote_code", "cluster", "links",
    "memory_per_rank",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Compare. Returns 0 where every way computes what one process computes, else 1."""
    flags = parse(Compare, "compare", arguments, Compare())
    import json

    from hocket.cli.terminal import terminal
    from hocket.jobs.compare import asked, compare, sweep
    from hocket.jobs.request import request

    job = request({name: getattr(flags, name) for name in _JOB})
    wanted = asked(
        devices=flags.devices,
        wanted=flags.ways,
        microbatches=flags.microbatches,
        input_work=flags.input_work,
    )
    _, width = terminal()

    def tell(text: str) -> None:
        print(f"{text} ...", file=sys.stderr, flush=True)

    if flags.sweep is not None:
        if flags.ways:
            raise OptionError(
                "--ways names rows of the tables; a sweep runs ways of its own",
                hint=f"hocket compare {flags.model} --sweep {flags.sweep}",
            )
        points = sweep(job, wanted, flags.sweep, on_way=tell)
        if flags.json:
            rows = [{"at": p.at, **p.outcome.to_json()} for p in points]
            print(json.dumps({"sweep": flags.sweep, "points": rows}))
        else:
            from hocket.jobs.compare import sweep_text

            print("\n" + sweep_text(job, flags.sweep, points, width))
        return 0
    found = compare(job, wanted, on_way=tell)
    if flags.json:
        print(json.dumps(found.to_json()))
    else:
        from hocket.jobs.compare import text

        print("\n" + text(found))
    return 0 if found.equal else 1
