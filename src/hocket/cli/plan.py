"""`hocket plan`: the best layout of a model on a cluster, before anything is rented.

With `--serve`: how many GPUs of which kind answer so many requests so quickly. With `--links`: the
communication of each axis of a layout, on its links and on others.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Count, File, Model, Text, explicit, parse_flags
from hocket.cli.next import show
from hocket.cli.progress import note
from hocket.cli.terminal import show_text
from hocket.spec import renamed
from hocket.spec.errors import OptionError

Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
From = Annotated[str | None, tyro.conf.arg(name="from", metavar="FILE")]
Pins = Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS=VALUE...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Search every layout of a model on a cluster: will it fit, how fast, at what cost.

    Attributes:
        model: catalogue name, Hugging Face directory, run folder, or ORG/NAME on the Hugging Face
            Hub (only its configuration is downloaded).
        cluster: 2x8xH100-SXM, 16xA100-40-PCIe, 4xaws-p5, a TOML file, or auto (this machine, as
            measured by `hocket probe`). With --serve also kinds of GPU, as many as are needed:
            A100-40,A100-80,H100 (default with --serve: the usual kinds).
        seq_len: tokens per sequence; by default at most the model's positions.
        global_batch: sequences per step (default: 8 for each GPU, at least 32 and at most 4.2M
            tokens; on CPU 32).
        objective: what to optimize; tokens-per-dollar also considers fewer GPUs. One of: time,
            tokens-per-dollar, memory.
        top: number of layouts to print.
        layout: estimate only this layout: dp2.pp4.tp8:zero=1.
        pin: values that axes must have: tp=8 recompute=full microbatch=2.
        all: also rank layouts that this version of hocket cannot run.
        explain: explain why the first layout wins, and what would change the result.
        links: estimate the communication of --layout: bytes of each axis, its link, seconds there
            and on NVLink 2 to 5, PCIe and networks.
        emit: print the first layout as flags or configuration of megatron, megatron-bridge,
            torchtitan, torchtitan-0.2.2, deepspeed, accelerate or automodel; with --serve of vllm,
            sglang or hocket. Only layouts that the tool can run are ranked.
        source: predict the configuration of another tool, and print a better one as a diff:
            torchtitan TOML or Python, Megatron's flags or launch script, Megatron-Bridge Python,
            DeepSpeed JSON, accelerate or Automodel YAML, with --serve a vLLM or SGLang command. The
            file is parsed, never executed.
        dtype: matmul precision (default: bf16; fp16 on GPUs without bf16; fp32 on CPU). One of:
            bf16, fp16, fp8, tf32, fp32.
        grad_dtype: gradient type, as in `hocket train` (default: fp32). One of: fp32, bf16.
        stack: software whose constants estimate a step, and whose features bound the search:
            megatron-core, nemo, fsdp (torchtitan, eager), fsdp-compiled, deepspeed (2022),
            megatron (2021) ...
            (default: hocket itself, with the constants of eager PyTorch).
        price_list: providers whose on-demand quotes give the median price (default: all). One of:
            hyperscaler, specialist, all.
        lora_rank: LoRA rank (default: full fine-tuning).
        quantize_base: with --lora-rank, store the frozen linear layers in 4 bits (QLoRA). One of:
            nf4.
        optimizer: AdamW, moments in fp32 or 8 bits, as in `hocket train` (default: adamw). One of:
            adamw, adamw_8bit.
        save_seconds: seconds that a save stops training, for the expected goodput (default: the
            state written at 2 GB/s per node).
        restart_seconds: seconds from a failure to the next step (default: 300).
        failures: failures per GPU and hour (default: 2e-5, as in Llama 3's 54 days).
        repair_hours: hours until a failed node is back (default: 24).
        expert_imbalance: tokens of the most loaded expert rank over the mean, with expert
            parallelism; 1 is even routing (default: 1.5).
        mtp_layers: multi-token prediction layers after the last layer, as Megatron-Core and
            Megatron-Bridge train them (default: none).
        html: page to write: layouts to sort, memory, pipeline, what would change the answer.
        json: print one JSON object; with --emit it contains that text as well.
        serve: size a service instead of a training step.
        prompt_len: tokens per prompt (default: 1536).
        output_len: tokens per answer (default: 512).
        requests_per_second: mean request rate (default: 1).
        ttft_ms: goal for the time to first token, in milliseconds (default: 2000).
        tpot_ms: goal for the time per output token, in milliseconds (default: 100).
        percentile: percentage of the requests that meet the goals (default: 90). One of: 50, 90,
            99.
        prefix_cache_hit_rate: fraction of each prompt that is in the cache already, from requests
            with the same beginning (default: 0).
        trace: recorded requests, instead of equal ones at random times: CSV or JSON lines of
            arrival (seconds), prompt_tokens, output_tokens.
        weights: size of the weights of an otherwise unknown model, as in 180GB.
        quantization: precision of the served weights (default: as the checkpoint is stored); mxfp4
            applies to experts only; int4 is that of AWQ and GPTQ. One of: none, fp8, int8, fp4,
            int4, mxfp4.
        cache_precision: key/value cache precision (default: fp8 with fp8 weights, else bf16). One
            of: bf16, fp8.
        engine: inference server whose constants are used: trtllm, vllm ... (default: a tuned
            server).
        gpu_memory_utilization: fraction of GPU memory that the server may fill (default: 0.9).
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
    links: bool = False
    emit: Text = None
    source: From = None
    dtype: Text = None
    grad_dtype: Text = None
    stack: Text = None
    price_list: Text = None
    lora_rank: Count = None
    lora_targets: Text = None
    quantize_base: Text = None
    optimizer: Text = None
    save_seconds: Number = None
    restart_seconds: Number = None
    failures: Number = None
    repair_hours: Number = None
    expert_imbalance: Number = None
    mtp_layers: Count = None
    html: File = None
    json: bool = False
    serve: bool = False
    prompt_len: Count = None
    output_len: Count = None
    requests_per_second: Number = None
    ttft_ms: Number = None
    tpot_ms: Number = None
    percentile: Count = None
    prefix_cache_hit_rate: Number = None
    trace: File = None
    weights: Text = None
    quantization: Text = None
    cache_precision: Text = None
    engine: Text = None
    gpu_memory_utilization: Number = None


SERVING = (
    "prompt_len", "output_len", "requests_per_second", "ttft_ms", "tpot_ms", "percentile",
    "prefix_cache_hit_rate", "trace", "weights", "quantization",
    "cache_precision", "engine",
    "gpu_memory_utilization",
)  # fmt: skip
"""Flags that mean something with --serve only."""

TRAINING = (
    "seq_len",
    "global_batch",
    "objective",
    "all",
    "links",
    "grad_dtype",
    "stack",
    "lora_rank",
    "lora_targets",
    "quantize_base",
    "optimizer",
    "save_seconds",
    "restart_seconds",
    "failures",
    "repair_hours",
    "mtp_layers",
)
"""Flags that mean nothing with --serve."""


def main(arguments: Sequence[str]) -> int:
    """Plan and print. Returns 0."""
    flags = parse_flags(PlanFlags, "plan", arguments, PlanFlags())
    written = explicit(arguments)
    _one_output(flags)
    if flags.serve:
        return _serve(flags, written)
    for name in SERVING:
        if name in written:
            raise OptionError(
                f"{_flag(name)} is about serving, and this plans a training step",
                hint="--serve",
            )
    if flags.source is not None:
        return _from(flags, written)
    if not flags.model:
        raise OptionError("which model?", hint="hocket plan llama-3-70b --cluster 8x8xH100-SXM")
    if flags.cluster is None:
        raise OptionError("which GPUs?", hint="--cluster 8x8xH100-SXM")
    if flags.links:
        return _links(flags, written)
    if flags.emit is not None and flags.lora_rank is not None:
        raise OptionError(
            f"--emit writes no flags of adapters for {flags.emit}",
            hint="leave --emit out, and give hocket train the layout with --lora-rank",
        )
    from hocket.jobs import plan as job
    from hocket.jobs.planner_problem import planned_seq_len
    from hocket.jobs.serving.plan import size_is_public

    if not size_is_public(flags.model):
        raise OptionError(
            f"the size of {flags.model} is not public; a service of it is answered by hypotheses",
            hint=f"hocket plan {flags.model} --serve",
        )
    found = job.plan_training(
        flags.model,
        cluster=flags.cluster,
        seq_len=flags.seq_len if "seq_len" in written else planned_seq_len(flags.model),
        global_batch=flags.global_batch,
        objective=flags.objective,
        top=flags.top,
        layout=flags.layout,
        pin=flags.pin,
        all=flags.all,
        explain=flags.explain or flags.html is not None,
        precision=flags.dtype,
        grad_dtype=flags.grad_dtype,
        stack=flags.stack,
        lora_rank=flags.lora_rank,
        lora_targets=flags.lora_targets,
        quantize_base=flags.quantize_base,
        optimizer=flags.optimizer,
        emit=flags.emit,
        price_list=flags.price_list,
        save_seconds=flags.save_seconds,
        restart_seconds=flags.restart_seconds,
        failures=flags.failures,
        repair_hours=flags.repair_hours,
        expert_imbalance=flags.expert_imbalance,
        mtp_layers=flags.mtp_layers,
    )
    if flags.json:
        import json

        also = {} if flags.emit is None else {"emitted": job.emitted_layout(found, flags.emit)}
        print(json.dumps({"schema": 1, **renamed.with_old_keys({**found.to_json(), **also})}))
    elif flags.emit is not None:
        print(job.emitted_layout(found, flags.emit), end="")
    elif flags.html is not None:
        from hocket.jobs.plan_page import write_plan_page

        print(write_plan_page(found, flags.html))
    else:
        show_text(job.plan_table(found))
        from hocket.jobs.planner_problem import storage_note

        if stored := storage_note(flags.model):
            print(stored)
        if job.trains(found):
            show(job.train_command(found), job.rehearsal(found))
    return 0


def _one_output(flags: PlanFlags) -> None:
    """Reject flags that each ask for another output, of which one would be ignored."""
    reader = "--from with --serve" if flags.source is not None and flags.serve else ""
    if flags.html is not None:
        other = ["--json"] * flags.json + ["--emit"] * (flags.emit is not None)
        other += ["--serve"] * flags.serve
        if other:
            raise OptionError(
                f"--html writes the page of a training plan; {other[0]} asks for another output",
                hint=f"leave --html or {other[0]} out",
            )
    elif reader and flags.json:
        raise OptionError(f"{reader} prints text only", hint="leave --json out")


LINKS = {"model", "cluster", "layout", "seq_len", "global_batch", "dtype", "json", "links"}
"""Flags that mean something with --links."""


def _links(flags: PlanFlags, written: frozenset[str]) -> int:
    for name in sorted(written - LINKS):
        raise OptionError(
            f"{_flag(name)} is not used with --links, which estimates communication alone",
            hint=f"leave {_flag(name)} out",
        )
    if flags.layout is None:
        raise OptionError("the communication of which layout?", hint="--layout dp4.tp2")
    assert flags.cluster is not None
    import json

    from hocket.jobs import link_prices as job
    from hocket.jobs.planner_problem import planned_seq_len

    found = job.links(
        flags.model,
        cluster=flags.cluster,
        layout=flags.layout,
        seq_len=flags.seq_len if "seq_len" in written else planned_seq_len(flags.model),
        global_batch=flags.global_batch,
        precision=flags.dtype,
    )
    show_text(json.dumps(found.to_json()) if flags.json else job.link_prices_text(found))
    return 0


FROM = {
    "model", "cluster", "seq_len", "global_batch", "dtype", "stack", "json", "from", "serve",
    *SERVING,
}  # fmt: skip
"""Flags that mean something with --from."""


def _from(flags: PlanFlags, written: frozenset[str]) -> int:
    import json

    from hocket.jobs import plan_from as job

    for name in sorted(written - FROM):
        raise OptionError(
            f"{_flag(name)} is not used with --from, which takes the layout from the file",
            hint=f"leave {_flag(name)} out",
        )
    assert flags.source is not None
    if flags.cluster is None:
        raise OptionError("which GPUs?", hint="--cluster 8x8xH100-SXM")
    if flags.serve:
        given = {n: getattr(flags, n) for n in SERVING if getattr(flags, n) is not None}
        given |= {} if flags.dtype is None else {"precision": flags.dtype}
        print(job.serve_from(flags.source, model=flags.model, cluster=flags.cluster, **given))
        return 0
    found = job.plan_from(
        flags.source,
        model=flags.model,
        cluster=flags.cluster,
        seq_len=flags.seq_len if "seq_len" in written else None,
        global_batch=flags.global_batch,
        precision=flags.dtype,
        stack=flags.stack,
    )
    print(
        json.dumps(renamed.with_old_keys(found.to_json()))
        if flags.json
        else job.reading_text(found)
    )
    return 0


SERVICE_WIDTH = 125
"""Columns of a service's plan where there is no terminal."""


def _serve(flags: PlanFlags, written: frozenset[str]) -> int:
    for name in TRAINING:
        if name in written:
            instead = {"seq_len": "--prompt-len and --output-len", "stack": "--engine"}.get(name)
            raise OptionError(
                f"{_flag(name)} is about training, and --serve plans a service",
                hint=f"{instead} instead" if instead else f"leave {_flag(name)} out",
            )
    if flags.source is not None:
        return _from(flags, written)
    if not flags.model and flags.weights is None:
        raise OptionError("which model?", hint="hocket plan llama-3-70b --serve --cluster H100")
    from hocket.jobs.planner_problem import storage_note as stored_of
    from hocket.jobs.serving import deployment as run_as
    from hocket.jobs.serving import plan as job
    from hocket.jobs.serving import table as serve_table

    if flags.emit is not None:
        run_as.check_tool(flags.emit, one=flags.weights is not None, model=flags.model)
    if sys.stderr.isatty():
        note(f"simulating the load on deployments of {flags.model or flags.weights} ...")
    names = ("price_list", "expert_imbalance", *SERVING)
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    given |= {} if flags.dtype is None else {"precision": flags.dtype}
    found = job.serve_plan(
        flags.model,
        cluster=flags.cluster,
        top=flags.top,
        layout=flags.layout,
        pin=run_as.pins_of(flags.emit, flags.layout, flags.pin),
        explain=flags.explain,
        **given,
    )
    if flags.json:
        import json

        also = (
            {}
            if flags.emit is None
            else {"emitted": run_as.emitted_deployment(found[0], flags.emit)}
        )
        whole = renamed.with_old_keys({**serve_table.to_json(found), **also})
        print(json.dumps({"schema": 1, **whole}))
    elif flags.emit is not None:
        print(run_as.emitted_deployment(found[0], flags.emit), end="")
    else:
        show_text(serve_table.plans_text(found), most=SERVICE_WIDTH)
        if flags.weights is None and (stored := stored_of(flags.model, serve=True)):
            print(stored)
        if (words := run_as.serve_command(found)) is not None:
            show(words)
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
