"""`hocket check`: prove that a layout computes what one process computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from hocket.cli.events import print_result, progress_of_phases
from hocket.cli.flags import LayoutFlags, Model, explicit, flag_values, parse_flags
from hocket.cli.next import option_words, show
from hocket.cli.terminal import show_text
from hocket.spec.errors import OptionError
from hocket.spec.layout import TERMS

if TYPE_CHECKING:
    from hocket.spec.check import CheckReport
    from hocket.spec.served_check import ServedCheck

Types = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TYPE...")]
Layouts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="LAYOUT...")]
_OF_A_MATRIX = ("quick", "types", "layouts")
_OF_TRAINING = (
    "steps", "seq_len", "global_batch", "lr", "packing", "lora_rank", "lora_alpha", "lora_targets",
    "quantize_base", "optimizer",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Run the same steps on one process and on a layout, from the same weights and data.

    Prints the loss of both for each step, and for each parameter the largest difference of its
    gradient and of its value after the optimizer step. Exits 1 if any is above the tolerance.
    With `--serve`, starts the server of the layout instead and compares its greedy tokens and
    log-probabilities with plain transformers.

    Attributes:
        model: Hugging Face directory, run folder, PEFT adapter, a name that `hocket models` lists,
            or ORG/NAME[@REVISION] on the Hugging Face Hub.
        parallel: Degrees of parallelism and schedule
        steps: optimizer steps to compare.
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        dtype: precision of both sides; fp64 shows whether a difference is rounding. One of: fp32,
            fp64.
        seed: seed of the tokens, and of random weights.
        lr: learning rate.
        packing: `documents`: pack several documents into a row, with attention within each.
        lora_rank: compare the training of LoRA adapters of this rank with peft's.
        lora_targets: linear layers that LoRA adapts (default: all but the output head).
        quantize_base: with --lora-rank, compare with a base in bitsandbytes' own 4-bit layers. One
            of: nf4.
        optimizer: compare with torch's AdamW, or with bitsandbytes' own in 8 bits. One of: adamw,
            adamw_8bit.
        expert_dispatch: tokens to experts (ep): direct (a row for each choice), node (one row for
            each node; node:8: nodes of 8 ranks) or auto (node where experts are on several nodes).
        json: print events as JSON on stdout, one object a line; the last is the report. With
            --matrix: one object per model type.
        serve: check serving: whole and chunked prefill, decode, batching, prefix reuse, preemption
            and a restart, compared with plain transformers.
        quantization: with --serve: check weights and rows of matmuls in 8 bits, emulated on a CPU,
            compared with plain transformers that quantizes both by the format's definition. One of:
            fp8.
        kv_cache_dtype: with --serve: the cache in fp8 (e4m3), compared with plain transformers
            whose cache quantizes keys and values. One of: auto, bf16, fp8.
        redundant_experts: with --serve: copies of experts over the ranks of ep, placed again every
            few steps.
        matrix: check a tiny model of every type that transformers has, at every kind of layout.
        quick: with --matrix: two layouts that cover every axis.
        types: with --matrix: only these model types; TYPE+ is its second configuration, with
            optional switches on.
        layouts: with --matrix: only these layouts.
    """

    model: Model = ""
    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    steps: int = 3
    seq_len: int = 32
    global_batch: int = 8
    dtype: str = "fp32"
    seed: int = 0
    lr: float = 1e-3
    packing: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: str | None = None
    quantize_base: str | None = None
    optimizer: str = "adamw"
    attention: str = "sdpa"
    context_parallel: str = "auto"
    expert_dispatch: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    trust_remote_code: bool = False
    json: bool = False
    serve: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    redundant_experts: int = 0
    matrix: bool = False
    quick: bool = False
    types: Types = ()
    layouts: Layouts = ()


def main(arguments: Sequence[str]) -> int:
    """Check. Returns 0 where everything is equal, else 1."""
    flags = parse_flags(Check, "check", arguments, Check())
    said = flag_values(flags, also=explicit(arguments))
    said.pop("json", None)
    said.pop("serve", None)
    if flags.matrix:
        return _matrix(flags, said)
    alone = [name for name in _OF_A_MATRIX if name in said]
    if alone:
        raise OptionError(f"--{alone[0]} needs --matrix", hint="--matrix")
    if flags.serve:
        return _serve(flags, said)
    for name in ("quantization", "kv_cache_dtype", "redundant_experts"):
        if name in said:
            flag = name.replace("_", "-")
            raise OptionError(
                f"--{flag} is an option of servers",
                hint=f"hocket check {flags.model} --serve --{flag} {said[name]}",
            )
    if not flags.model:
        raise OptionError("no model was named", hint="hocket check tiny-llama --layout dp2")
    if not {"layout", *TERMS} & set(said):
        from hocket.jobs.api import NO_LAYOUT

        raise OptionError(NO_LAYOUT, hint="--layout dp2")
    from hocket.jobs.check import check_layout
    from hocket.jobs.request import request

    sizes = {"steps": flags.steps, "seq_len": flags.seq_len, "global_batch": flags.global_batch}

    with progress_of_phases(as_json=flags.json) as on_event:
        report = check_layout(request({**said, **sizes}), on_event=on_event)
    if flags.json:
        print_result(json.loads(report.to_json()))
    else:
        show_text("\n".join(_report_lines(report)))
        if report.ok:
            words = ["train", flags.model, "--data", "DATA", "--layout", report.layout]
            names = ("lora_rank", "lora_alpha", "lora_targets", "quantize_base", "optimizer")
            show([*words, *option_words({name: said[name] for name in names if name in said})])
    return 0 if report.ok else 1


def _matrix(flags: Check, said: dict[str, object]) -> int:
    from hocket.cli.matrix import run_matrix

    other = [name for name in said if name not in ("matrix", *_OF_A_MATRIX)]
    if other:
        raise OptionError(
            f"--matrix makes its own models, layouts and steps; {other[0]} is incompatible",
            hint="hocket check --matrix --types llama --layouts tp2",
        )
    if flags.serve and flags.quick:
        raise OptionError(
            "--quick chooses layouts of the training matrix", hint="--serve --matrix --layouts tp2"
        )
    return run_matrix(
        flags.types, flags.layouts, quick=flags.quick, served=flags.serve, as_json=flags.json
    )


def _serve(flags: Check, said: dict[str, object]) -> int:
    from hocket.jobs.serving.check import served_check

    trained = [name for name in _OF_TRAINING if name in said]
    if trained:
        flag = trained[0].replace("_", "-")
        raise OptionError(
            f"--{flag} is an option of training steps; --serve makes none",
            hint=f"hocket check {flags.model} --serve --layout tp2",
        )

    with progress_of_phases(as_json=flags.json) as on_event:
        report = served_check(said, on_event=on_event)
    if flags.json:
        print_result(json.loads(report.to_json()))
    else:
        show_text("\n".join(served_lines(report)))
    return 0 if report.ok else 1


def served_lines(report: ServedCheck) -> list[str]:
    """The report of a server as a table."""
    wide = max(len(one.name) for one in report.comparisons)
    found = ["", f"{'comparison':<{wide}}  positions  tokens  largest difference (limit)"]
    for one in report.comparisons:
        numbers = f"{one.difference:.1e} ({report.limit:.1e})" if one.positions else "tokens only"
        found.append(
            f"{one.name:<{wide}}  {one.positions:>9}  {one.tokens:>6}  "
            f"{numbers}{'' if one.ok else '  DIFFERENT'}"
        )
        found += [f"  note: {one.note}"] if one.note else []
    if report.eight_bits:
        found += [
            "",
            f"in 8 bits: median difference of all positions {report.median:.1e} "
            f"({report.median_limit:.1e}); 8 bits change a log-probability by up to "
            f"{report.eight_bits:.1e}",
        ]
    found.append("")
    if report.ok:
        whose = " that quantizes to 8 bits" if report.eight_bits else ""
        return [
            *found, f"equal: a server of {report.layout} answers as plain transformers{whose} does"
        ]  # fmt: skip
    return [*found, "NOT equal:", *report.failures]


def _report_lines(report: CheckReport) -> list[str]:
    """The report as a table."""
    found = ["", "step  one process    layout         difference"]
    found += [
        f"{s.step:>4}  {s.reference_loss:<13.7f}  {s.loss:<13.7f}  {s.difference:.1e}"
        f"{'' if s.ok else '  ABOVE TOLERANCE'}"
        for s in report.steps
    ]
    rows = report.worst()
    width = max([len(row.name) for row in rows] + [len("parameter")])
    shapes = {row.name: "x".join(map(str, row.shape)) for row in rows}
    wide = max([len(shape) for shape in shapes.values()] + [len("shape")])
    found += [
        "",
        "largest difference of each parameter over the steps (limit)",
        f"{'parameter':<{width}}  {'shape':<{wide}}  {'gradient':<18}  value after the step",
    ]
    found += [
        f"{row.name:<{width}}  {shapes[row.name]:<{wide}}  "
        f"{row.gradient:.1e} ({row.gradient_limit:.1e})  {row.value:.1e} ({row.value_limit:.1e})"
        f"{'' if row.ok else '  ABOVE TOLERANCE'}"
        for row in rows
    ]
    found.append("")
    if report.ok:
        found.append(
            f"equal: {report.layout} on {report.world_size} ranks computes what one process does"
        )
    else:
        found += ["NOT equal:", *report.failures]
    return found
