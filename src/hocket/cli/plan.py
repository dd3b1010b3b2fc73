"""`hocket plan`: the best layout of a model on a cluster, before anything is rented."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Model, Text, parse
from hocket.spec.errors import OptionError

Pins = Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS=VALUE...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Search every layout of a model on a cluster: will it fit, how fast, at what cost.

    Attributes:
        model: a name of the catalogue, a Hugging Face directory, or a run folder.
        cluster: 2x8xH100-SXM, 16xA100-40-PCIe, 4xaws-p5, a TOML file, or auto (this machine, as
            hocket probe measured it).
        seq_len: tokens of one sequence.
        global_batch: sequences of one step.
        objective: time, tokens-per-dollar (fewer GPUs are looked at as well) or memory.
        top: how many layouts to print.
        layout: price this one layout instead: dp2.pp4.tp8:zero=1.
        pin: values that axes must have: tp=8 recompute=full microbatch=2.
        all: rank also what this hocket cannot run today.
        explain: say why the first wins, and what would change the answer.
        emit: print the first as flags of torchtitan, megatron, deepspeed or vllm.
        precision: of matrix products: bf16, fp16, fp8.
        stack: software whose constants price it: megatron-core, megatron, fsdp, fsdp-compiled,
            deepspeed ... None: megatron-core.
        json: print one JSON object.
    """

    model: Model = ""
    cluster: Text = None
    seq_len: int = 4096
    global_batch: int | None = None
    objective: str = "time"
    top: int = 10
    layout: Text = None
    pin: Pins = ()
    all: bool = False
    explain: bool = False
    emit: Text = None
    precision: str = "bf16"
    stack: Text = None
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Plan and print. Returns 0."""
    flags = parse(PlanFlags, "plan", arguments, PlanFlags())
    if not flags.model:
        raise OptionError("which model?", hint="hocket plan llama-3-70b --cluster 8x8xH100-SXM")
    if flags.cluster is None:
        raise OptionError("which GPUs?", hint="--cluster 8x8xH100-SXM")
    if flags.global_batch is None:
        raise OptionError("how many sequences make a step?", hint="--global-batch 512")
    from hocket.jobs import plan as job

    found = job.plan(
        flags.model,
        cluster=flags.cluster,
        seq_len=flags.seq_len,
        global_batch=flags.global_batch,
        objective=flags.objective,
        top=flags.top,
        layout=flags.layout,
        pin=flags.pin,
        all=flags.all,
        explain=flags.explain,
        precision=flags.precision,
        stack=flags.stack,
    )
    if flags.json:
        import json

        print(json.dumps(found.to_json()))
    elif flags.emit is not None:
        print(job.emitted(found, flags.emit), end="")
    else:
        print(job.table(found))
    return 0
