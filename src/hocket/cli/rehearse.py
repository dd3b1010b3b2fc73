"""`hocket rehearse`: a job's ranks executed on fake CUDA tensors, before GPUs are rented."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from hocket.cli.flags import Count, LayoutFlags, Model, Text, explicit, flag_values, parse_flags
from hocket.cli.next import option_words, show
from hocket.cli.terminal import show_text
from hocket.spec.errors import OptionError

if TYPE_CHECKING:
    from hocket.spec.run import RunSpec


Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")]
_OF_A_MATRIX = ("models", "schedules", "options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearseFlags:
    """Execute a job's training step, rank by rank, on fake CUDA tensors, without a GPU: whether it
    completes under NCCL's rules, peak memory, collectives, host reads, kernel launches.

    Attributes:
        model: catalogue name, Hugging Face directory, run folder, or ORG/NAME on the Hugging Face
            Hub (only its configuration is downloaded).
        parallel: Degrees of parallelism and schedule
        rank: ranks to execute: replica (dp 0, identical ranks once), all, or one rank number (no
            verdict).
        gpu: GPU of each rank, as in H100, A100-40, B200.
        layers: number of layers (default: the model's own).
        seq_len: tokens per sequence (default: 2048, or the model's positions if fewer).
        rows: sequences per microbatch and data rank.
        global_batch: sequences per step (default: dp x microbatches x rows).
        dtype: compute precision. One of: fp32, bf16, fp8.
        grad_dtype: type in which gradients are accumulated and reduced. One of: fp32, bf16.
        compile: compile every layer (torch.compile) for that GPU, and run what it generates.
        expert_dispatch: tokens to experts (ep): direct (a row for each choice), node (one row for
            each node; node:8: nodes of 8 ranks), deepep (the library DeepEP; rehearsed as direct)
            or auto (node where experts are on several nodes, else direct).
        bucket_mb: gradient bucket size in MB (default: the larger of 160 and 4 per data rank).
        lora_rank: LoRA rank (default: full fine-tuning).
        quantize_base: with --lora-rank, store the frozen linear layers in 4 bits (QLoRA). One of:
            nf4.
        optimizer: AdamW, moments in fp32 or 8 bits. One of: adamw, adamw_8bit.
        kv_cache_dtype: with --serve, precision of the key/value cache. One of: auto, bf16, fp8.
        quantization: with --serve, precision of the weights of linear layers and experts
            (default: that of --dtype). One of: fp8.
        redundant_experts: with --serve, copies of experts over the ranks of ep.
        serve: rehearse prefill, mixed and decode steps of one replica of a server instead.
        json: print one JSON object, and nothing else on stdout; with --matrix one per job.
        matrix: rehearse tiny models under every schedule, layout and option.
        models: with --matrix: only these models.
        schedules: with --matrix: only these schedules.
        options: with --matrix: only these options, as in bf16, lora, recompute=full.
    """

    model: Model = ""
    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    rank: str = "replica"
    gpu: str = "H100"
    layers: Count = None
    seq_len: Count = None
    rows: int = 1
    global_batch: Count = None
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    dropout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    attention: str = "sdpa"
    compile: bool = False
    context_parallel: str = "auto"
    expert_dispatch: str = "auto"
    bucket_mb: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    lora_rank: Count = None
    lora_targets: Text = None
    quantize_base: Text = None
    optimizer: str = "adamw"
    trust_remote_code: bool = False
    kv_cache_dtype: str = "auto"
    quantization: Text = None
    redundant_experts: int = 0
    serve: bool = False
    json: bool = False
    matrix: bool = False
    models: Names = ()
    schedules: Names = ()
    options: Names = ()


PASSED = (
    "seq_len", "dtype", "grad_dtype", "dropout", "attention", "compile", "context_parallel",
    "expert_dispatch", "bucket_mb", "lora_rank", "lora_targets", "quantize_base", "optimizer",
    "trust_remote_code",
)  # fmt: skip
"""Flags that are options of a training job."""
OF_A_SERVER = {
    "kv_cache_dtype": "--serve",
    "redundant_experts": "--serve",
    "quantization": "--serve, or --dtype fp8",
}
OF_A_STEP = frozenset(("rank", "rows", "global_batch", *PASSED)) - {"dtype", "trust_remote_code"}
"""Flags that a server's steps do not have."""


def main(arguments: Sequence[str]) -> int:
    """Rehearse and print. Returns 0. Raises HocketError if the job does not complete or fit."""
    flags = parse_flags(RehearseFlags, "rehearse", arguments, RehearseFlags())
    written = explicit(arguments)
    if flags.matrix:
        return _matrix(flags, written)
    for name in (name for name in _OF_A_MATRIX if getattr(flags, name)):
        hint = f"hocket rehearse --matrix --{name} {' '.join(getattr(flags, name))}"
        raise OptionError(f"--{name} chooses jobs of a matrix", hint=hint)
    if not flags.model:
        raise OptionError("which model?", hint="hocket rehearse llama-3-8b --layout dp2.pp2.tp2")
    if flags.global_batch is not None and "rows" in written:
        raise OptionError(
            "--global-batch and --rows both set the batch", hint="leave one of them out"
        )
    if flags.serve:
        return _serve(flags, written)
    for name, hint in OF_A_SERVER.items():
        if name in written:
            raise OptionError(
                f"--{name.replace('_', '-')} is of a server, and this rehearses a training step",
                hint=hint,
            )
    from hocket.jobs import rehearse as job
    from hocket.jobs.rehearsal_fit import require_fit
    from hocket.jobs.rehearsal_text import rehearsal_report
    from hocket.jobs.request import request

    given = {name: getattr(flags, name) for name in PASSED}
    if flags.seq_len is None:
        given["seq_len"] = job.default_seq_len(flags.model, trust=flags.trust_remote_code)
    given |= flag_values(flags.parallel, also=written)
    given |= {"model": flags.model, "device": "cuda"}
    if flags.global_batch is not None:
        given["global_batch"] = flags.global_batch
    prepared = job.prepare_rehearsal(
        request(given),
        layers=flags.layers,
        rows=None if flags.global_batch is not None else flags.rows,
        gpu=flags.gpu,
    )

    with _phases() as say:
        found = job.rehearse_job(prepared, ranks=flags.rank, on_phase=say)
    show_text(found.report.to_json() if flags.json else rehearsal_report(found))
    require_fit(found)
    if not flags.json:
        words = ["train", flags.model, "--data", "DATA", "--layout", str(request(given).layout)]
        asked = {name: given[name] for name in (*PASSED, "global_batch") if name in written}
        show([*words, *option_words(asked)])
    return 0


@contextlib.contextmanager
def _phases(*, as_events: bool = False) -> Iterator[Callable[[str], None]]:
    """What to call with what happens next."""
    from hocket.cli.events import progress_of_phases

    with progress_of_phases(as_json=as_events) as tell:
        yield lambda name: tell({"event": "phase", "name": name})


def _matrix(flags: RehearseFlags, written: Collection[str]) -> int:
    from hocket.cli.rehearsal_matrix import run_rehearsal_matrix

    other = sorted(set(written) - {"matrix", "json", *_OF_A_MATRIX})
    if flags.model or other:
        raise OptionError(
            "--matrix has its own models, layouts and options; "
            f"{flags.model or other[0]} sets another",
            hint="hocket rehearse --matrix --models tiny-llama --schedules 1f1b",
        )
    return run_rehearsal_matrix(flags.models, flags.schedules, flags.options, as_json=flags.json)


def _serve(flags: RehearseFlags, written: frozenset[str]) -> int:
    """Rehearse a replica, as `print_serving`."""
    for name in sorted(written & OF_A_STEP):
        raise OptionError(
            f"--{name.replace('_', '-')} is of a training step, and --serve rehearses the prefill, "
            "mixed and decode steps of a server",
            hint="leave --serve out",
        )
    from hocket.jobs.request import request
    from hocket.jobs.serving import rehearse as job

    given = {**flag_values(flags.parallel, also=written), "model": flags.model, "device": "cuda"}
    spec = job.replica_spec(
        flags.model,
        request(given).layout,
        dtype=flags.dtype,
        layers=flags.layers,
        trust_remote_code=flags.trust_remote_code,
        quantization=flags.quantization,
        kv_cache_dtype=flags.kv_cache_dtype,
        redundant_experts=flags.redundant_experts,
    )
    return print_serving(spec, gpu=flags.gpu, as_json=flags.json)


def print_serving(spec: RunSpec, *, gpu: str, as_json: bool, as_event: bool = False) -> int:
    """Rehearse one replica and print the report, with `as_event` as the event `result`. Returns 0.
    Raises HocketError if its steps do not end or do not fit."""
    from hocket.jobs.serving.rehearsal_fit import require_replica
    from hocket.jobs.serving.rehearse import rehearse_replica

    with _phases(as_events=as_event) as say:
        found = rehearse_replica(spec, gpu=gpu, on_phase=say)
    if as_event:
        from hocket.cli.events import print_result

        print_result(json.loads(found.to_json()))
    else:
        show_text(found.to_json() if as_json else found.text())
    require_replica(found, spec)
    return 0
