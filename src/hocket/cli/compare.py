"""`hocket compare`: one model run in every strategy ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Count, Model, Text, parse_flags
from hocket.cli.progress import note
from hocket.spec import renamed
from hocket.spec.errors import OptionError

Strategies = Annotated[tuple[str, ...], tyro.conf.arg(metavar="STRATEGY...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Run one model under every parallel strategy, from the same weights and data.

    One process, DataParallel, DistributedDataParallel, layer-wise, GPipe, 1F1B, tensor parallel
    and combinations: speed, memory by kind, every collective by its name, idle time, and whether
    each computes what one process computes. Exits 1 if any does not.

    Attributes:
        model: Hugging Face directory, run folder, PEFT adapter, a name that `hocket models` lists,
            or ORG/NAME[@REVISION] on the Hugging Face Hub.
        devices: ranks (or replicas, or stages) of each single-axis strategy.
        strategies: only these strategies: threads data layerwise gpipe 1f1b tensor, or layouts
            (default: all).
        microbatches: microbatches of pipeline strategies (default: the largest up to 4 that divides
            the batch).
        sweep: print a curve over this axis instead of the tables. One of: microbatches, layers,
            devices.
        input_work: milliseconds of Python that prepare each sequence, in a second timing; 0: none.
        cluster: machine to predict for: auto (this machine, measured once), a file written by
            `hocket probe`, or none.
        emulate_links: links to emulate between CPU ranks, as in nvlink3 or pcie4@H100-SXM-80
            (default: this machine's memory speed).
        memory_per_rank: limit of tensor bytes per CPU rank, as in 60MB; strategies that need more
            are skipped (default: none).
        steps: optimizer steps to time.
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        seed: seed of the tokens, and of random weights.
        json: print one JSON object.
    """

    model: Model = ""
    devices: int = 2
    strategies: Strategies = ()
    microbatches: Count = None
    sweep: Text = None
    input_work: float = 5.0
    cluster: str = "auto"
    emulate_links: Text = None
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
    "threads", "trust_remote_code", "cluster", "emulate_links",
    "memory_per_rank",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Compare. Returns 0 where every strategy computes what one process computes, else 1."""
    flags = parse_flags(Compare, "compare", arguments, Compare())
    import json

    from hocket.cli.terminal import show_text, terminal
    from hocket.jobs.compare import compare_request, compare_strategies, compare_sweep
    from hocket.jobs.request import request

    if not flags.model:
        raise OptionError("no model was named", hint="hocket compare tiny-llama")
    job = request({name: getattr(flags, name) for name in _JOB})
    wanted = compare_request(
        devices=flags.devices,
        wanted=flags.strategies,
        microbatches=flags.microbatches,
        input_work=flags.input_work,
    )
    _, width = terminal()

    def tell(text: str) -> None:
        note(f"{text} ...")

    if flags.sweep is not None:
        if flags.strategies:
            raise OptionError(
                "--strategies names rows of the tables; a sweep runs strategies of its own",
                hint=f"hocket compare {flags.model} --sweep {flags.sweep}",
            )
        points = compare_sweep(job, wanted, flags.sweep, on_strategy=tell)
        if flags.json:
            rows = [{"at": p.at, **p.outcome.to_json()} for p in points]
            print(json.dumps(renamed.with_old_keys({"sweep": flags.sweep, "points": rows})))
        else:
            from hocket.jobs.compare import sweep_report

            show_text("\n" + sweep_report(job, flags.sweep, points, width))
        return 0
    found = compare_strategies(job, wanted, on_strategy=tell)
    if flags.json:
        print(json.dumps(renamed.with_old_keys(found.to_json())))
    else:
        from hocket.jobs.compare import comparison_tables

        show_text("\n" + comparison_tables(found))
    return 0 if found.equal else 1
