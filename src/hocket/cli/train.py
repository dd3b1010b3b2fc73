"""`hocket train`: flags and configuration file to a Request, and its events to the screen."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from hocket.cli import config as config_file
from hocket.cli.flags import (
    Count,
    File,
    LayoutFlags,
    Model,
    Paths,
    Run,
    explicit,
    flag_values,
    parse_flags,
    with_defaults,
)
from hocket.cli.terminal import show_text
from hocket.spec.errors import STOPPED, OptionError
from hocket.spec.run import TrainOptions, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model with data, tensor and pipeline parallelism.

    Attributes:
        model: Hugging Face directory (safetensors weights, or only a config.json for random
            weights), run folder, PEFT adapter, a name that `hocket models` lists, or
            ORG/NAME[@REVISION] on the Hugging Face Hub.
        data: text files, JSON lines, parquet files, `datasets` directories, folders of text,
            patterns such as 'logs/*.jsonl', or data sets of the Hugging Face Hub:
            ORG/NAME[/SUBSET][:SPLIT][[:N]][@REVISION]. `:SPLIT` and `[:N]` (the first
            N records) also apply to directories. A number at the end is a weight: a mixture, as in
            a.jsonl:0.7 b.jsonl:0.3; all sources have one, or none.
        eval_data: data to evaluate on, as --data, instead of a fraction of --data.
        run: run folder (default: a new folder under runs/).
        config: TOML or YAML file of options by flag name; flags override it.
        cluster: machine to predict the run for, and to choose --layout auto for: auto (this
            machine, measured once), a file written by `hocket probe`, or none.
        micro_batch_size: sequences per microbatch and data rank; the rest of the global batch is
            accumulated (default: as --microbatches).
        gradient_accumulation_steps: microbatches whose gradients are accumulated in a step; with
            --micro-batch-size and without --global-batch, it sets the global batch (default: as
            --microbatches).
        json: print events as JSON on stdout, one object a line, and nothing else there.
        dry_run: decide everything, decode the first batch, rehearse the job on fake GPUs (whether
            its ranks complete, and fit), predict time and price, and stop before ranks start.
        push_to_hub: upload the trained model to ORG/NAME on the Hugging Face Hub after the last
            step, with a model card of the run. Needs a token that may write.
        parallel: Degrees of parallelism and schedule
        workload: Size and precision of a step
        training: Optimizer, data, checkpoints and runtime
    """

    model: Model = ""
    data: Paths = ()
    eval_data: Paths = ()
    run: Run = None
    config: File = None
    cluster: str = "auto"
    micro_batch_size: Count = None
    gradient_accumulation_steps: Count = None
    json: bool = False
    dry_run: bool = False
    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="ORG/NAME")] = None
    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    workload: Workload = dataclasses.field(default_factory=Workload)
    training: TrainOptions = dataclasses.field(default_factory=TrainOptions)


def read_train_flags(arguments: Sequence[str]) -> tuple[Train, dict[str, Any]]:
    """The flags, and the options of flags and configuration file together, by name."""
    path = config_file.config_path(arguments)
    given = {} if path is None else config_file.read_config(path)
    default = Train(
        model=given.get("model", ""),
        data=given.get("data", ()),
        eval_data=given.get("eval_data", ()),
        run=given.get("run"),
        cluster=given.get("cluster", "auto"),
        workload=with_defaults(Workload, given),
        training=with_defaults(TrainOptions, given),
    )
    flags = parse_flags(Train, "train", _resumed(arguments), default)
    said = flag_values(flags, also=explicit(arguments))
    said.pop("json", None)
    said.pop("dry_run", None)
    said.pop("push_to_hub", None)
    said.pop("config", None)
    if path is not None:
        from hocket.jobs.request import AUTO, LAYOUT_FIELDS, layout_values
        from hocket.spec.layout import TERMS

        # Field by field, so that a flag wins over the file's text and not against it.
        said_layout = "layout" in said
        ours = layout_values(said)
        theirs = layout_values(given)
        for name in ("layout", *LAYOUT_FIELDS):
            said.pop(name, None)
        if ours.get("layout") == AUTO:  # chosen again, whatever the file says of degrees
            theirs = {name: value for name, value in theirs.items() if name not in TERMS}
        merged = {**theirs, **ours}
        if merged.get("layout") == AUTO and "layout" not in ours and said_layout:
            del merged["layout"]  # the flag's text was taken apart, the file asked for a choice
        said.update(merged)
    return flags, said


def main(arguments: Sequence[str]) -> int:
    """Train. Returns 0, or STOPPED where the run was asked to stop before its last step."""
    flags, said = read_train_flags(arguments)
    if flags.push_to_hub is not None:
        from hocket.jobs.export import check_push

        check_push(flags.push_to_hub)
    if flags.dry_run:
        return _dry_run(flags, said)
    from hocket.cli.progress import progress
    from hocket.jobs.early_stop import stopping_early
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model

    with progress(as_json=flags.json) as on_event, stopping_early(on_event):
        summary = train_model(request({"model": _run_model(said), **said}), on_event=on_event)
    if on_event.heard:
        if flags.json:
            from hocket.cli.events import print_result
            from hocket.cli.summary import summary_values as values_of

            print_result(values_of(summary))
        else:
            from hocket.cli.summary import print_summary

            print_summary(summary, to=sys.stdout)
        if flags.push_to_hub is not None and not summary.stopped:
            _push(flags, summary.run, sys.stderr if flags.json else sys.stdout)
    return STOPPED if summary.stopped else 0


def _push(flags: Train, run: Path, out: TextIO) -> None:
    from hocket.jobs.export import push_run
    from hocket.spec.units import format_bytes

    assert flags.push_to_hub is not None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored once the run is over
    trust = flags.training.trust_remote_code
    pushed = push_run(run, flags.push_to_hub, trust_remote_code=trust)
    print(f"pushed {format_bytes(pushed.num_bytes)} to {pushed.page}", file=out)


def _dry_run(flags: Train, said: dict[str, Any]) -> int:
    if said.get("resume"):
        raise OptionError(
            "--dry-run decides a new run; --resume continues one, as its run.toml has decided it",
            hint=f"hocket config show train --config {said.get('run') or 'RUN'}/run.toml",
        )
    from hocket.cli.progress import progress
    from hocket.jobs.dry_run import dry_run, dry_run_text
    from hocket.jobs.record import JobRecorder
    from hocket.jobs.request import request

    with (
        contextlib.redirect_stdout(sys.stderr if flags.json else sys.stdout),
        progress() as on_event,
    ):
        found = dry_run(request({"model": _run_model(said), **said}), JobRecorder(on_event))
    if flags.json:
        from hocket.cli.events import print_result

        print_result(found.to_json())
    else:
        show_text(dry_run_text(found))
    return 0


def _resumed(arguments: Sequence[str]) -> list[str]:
    """`--resume RUN` as `--run RUN --resume`, where no other run is named."""
    found = list(arguments)
    if "--resume" in found and not {"run", "output_dir"} & explicit(found) and "-o" not in found:
        at = found.index("--resume")
        named = at + 1 < len(found) and not found[at + 1].startswith("-")
        place = at + 1 if named else 0
        if named or (found and (Path(found[0]) / "run.json").exists()):
            found += ["--run", found.pop(place)]
    return found


def _run_model(said: dict[str, Any]) -> str | None:
    """A run that is there knows its model; it need not be given again."""
    run = said.get("run")
    there = run is not None and (Path(run) / "run.json").exists()
    return str(run) if said.get("resume") or (there and not said.get("model")) else None
