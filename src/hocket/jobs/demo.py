"""The demo: the main job end to end, on the text that every machine with Python has.

standard library's text -> tokenizer -> two ranks (or eight) train -> timeline, collectives, memory
    compared with one process -> Hugging Face directory -> a sample
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import lock, prepare
from hocket.jobs.record import JobRecorder, Listener, Summary
from hocket.jobs.request import JobRequest, request
from hocket.jobs.resume import unstarted_is_no_run
from hocket.jobs.train import PRELOAD, launch_ranks, prepare_run
from hocket.jobs.validate import validate_layout
from hocket.spec.errors import DataError
from hocket.spec.files import named
from hocket.spec.run import RunFolder

if TYPE_CHECKING:
    from hocket.launch import Launcher

FULL: dict[str, Any] = {
    "model": "tiny-llama",
    "layout": "dp2.pp2.tp2",
    "schedule": "1f1b",
    "microbatches": 4,
    "seq_len": 128,
    "global_batch": 16,
    "steps": 300,
    "lr": 3e-3,
    "eval_every": 50,
    "tokenizer": "train",
    "vocab_size": 2048,
}
QUICK: dict[str, Any] = {
    **FULL, "layout": "pp2", "steps": 60, "seq_len": 64, "vocab_size": 512, "save_every": 0,
}  # fmt: skip
"""Two ranks: a first result within half a minute on two cores."""
QUICK_TEXT = 600_000
"""Characters that the quick one learns from."""
ALONE_STEPS = 4
"""Steps that one process takes for comparison; the first warms up."""

PROMPT = "def __init__(self, "


@dataclasses.dataclass(kw_only=True)
class DemoOutcome:
    """What the demo found.

    Attributes:
        summary: of the run on the layout.
        pictures: the measured timeline of one step, the predicted one, the table of collectives.
        alone: of the short run in one process.
        equal: whether every collective was as theory says.
        model: the exported Hugging Face directory.
        sample: text that the model wrote after `PROMPT`.
    """

    summary: Summary
    pictures: list[str]
    alone: Summary
    equal: bool
    model: Path
    sample: str


def demo_options(changes: dict[str, Any], *, full: bool = False) -> JobRequest:
    """The demo's options with some changed; see `jobs.request`. `full`: on eight ranks."""
    layout = {} if "layout" not in changes else {"schedule": None, "microbatches": None}
    return request({**(FULL if full else QUICK), **layout, **changes})


def demo(
    wanted: JobRequest,
    *,
    full: bool = False,
    on_event: Listener | None = None,
    show: Callable[[str], None] = print,
    width: int = 100,
    color: bool = False,
) -> DemoOutcome:
    """Run all of it.

    Args:
        wanted, full: see `demo_options`; the data is the standard library's text.
        on_event: called with each event of the training run.
        show: called with each part of what there is to tell afterwards, as soon as it is known.
        width, color: of the terminal.
    """
    from hocket.launch import Launcher
    from hocket.models.source import resolve_model

    prepare.device_checked(wanted.options)
    validate_layout(resolve_model(wanted.model).dimensions, wanted.layout, wanted.workload)
    folder = prepare.train_folder(dataclasses.replace(wanted, model="demo"))
    corpus = folder.path / "corpus.jsonl"
    record = JobRecorder(on_event)
    with (
        lock.locked(folder.path, "demo"),
        Launcher(wanted.options.device, wanted.options.threads, preload=PRELOAD) as launcher,
    ):
        write_corpus(corpus, LARGEST if full else QUICK_TEXT)
        wanted = dataclasses.replace(wanted, data=(str(corpus),), run=folder.path)
        job = prepare.prepare_job(wanted)
        spec = prepare_run(job, folder, record, "demo")
        with unstarted_is_no_run(folder):
            summary = launch_ranks(launcher, folder, spec, record)
        show(losses(summary, folder, width))
        pictures, equal = _step_report(launcher, folder, width=width, color=color)
        for picture in pictures:
            show(picture)
        alone = _alone(launcher, folder, wanted)
        show("\n".join(comparison(summary, alone, spec.layout.axes_text())))
        show(_too_small(launcher, folder, summary, alone))
        sample = _sample(launcher, folder.model)
        show(f"{folder.model} is an ordinary Hugging Face directory; from it, after {PROMPT!r}:\n")
        show("\n".join("    " + line for line in sample.splitlines()))
    return DemoOutcome(
        summary=summary,
        pictures=pictures,
        alone=alone,
        equal=equal,
        model=folder.model,
        sample=sample,
    )


def losses(summary: Summary, folder: RunFolder, width: int) -> str:
    """How the loss fell, in one line and as a curve."""
    from hocket.reporting import curve_text

    rows = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    return (
        f"loss {summary.first_loss:.3f} at the first step, {summary.loss:.3f} at step "
        f"{summary.steps}, {summary.held_out_loss:.3f} on held-out text\n\n"
        + curve_text([row["loss"] for row in rows], width)
    )


def _step_report(
    launcher: Launcher, folder: RunFolder, *, width: int, color: bool
) -> tuple[list[str], bool]:
    """The recorded step: its timeline, what it predicts, its collectives compared with theory."""

    from hocket.reporting import collectives_text, timeline_text
    from hocket.simulation import measured_prices, simulate, theoretical_bubble
    from hocket.spec.schedule import Schedule
    from hocket.spec.timeline import Timeline

    measured = Timeline.from_json(folder.timeline_file.read_text())
    schedule = Schedule.parse(folder.schedule_file.read_text())
    predicted = simulate(schedule, measured_prices(measured, schedule.num_stages))
    step = json.loads(folder.communication_file.read_text())["step"]
    rows = compare_communication(launcher, folder)
    pictures = [
        timeline_text(
            measured,
            width,
            theoretical=theoretical_bubble(schedule),
            title=f"step {step} as measured",
            color=color,
        ),
        timeline_text(
            predicted,
            width,
            title=f"the {schedule.name} schedule simulated with the measured times",
            color=color,
        ),
        "all ranks of that step together\n" + collectives_text(rows),
    ]
    return pictures, all(row["equal"] for row in rows)


def _alone(launcher: Launcher, folder: RunFolder, wanted: JobRequest) -> Summary:
    """A few steps of the same batch in one process, in a folder of their own."""
    values = dataclasses.replace(
        wanted,
        run=folder.path / "one-process",
        layout=dataclasses.replace(
            wanted.layout, dp=1, pp=1, tp=1, schedule="1f1b", pipeline_split="balanced",
            microbatches=wanted.layout.dp * (wanted.layout.microbatches or 1),
        ),
        options=dataclasses.replace(
            wanted.options, steps=ALONE_STEPS, eval_every=0, eval_fraction=0.0, save_every=0,
            timeline_step=None, warmup=None,
        ),
    )  # fmt: skip
    alone = RunFolder(folder.path / "one-process")
    shutil.copytree(folder.data, alone.data)
    job = prepare.prepare_job(values)
    spec = prepare.write_run(job, alone, folder.load().config, "demo")
    return launch_ranks(launcher, alone, spec, JobRecorder())


def comparison(summary: Summary, alone: Summary, layout: str) -> list[str]:
    """What splitting bought on this machine, and what it cost."""
    from hocket.reporting import table_text
    from hocket.runtime.host_cores import usable_cores
    from hocket.spec.units import format_bytes, format_seconds

    assert summary.step_seconds is not None
    assert alone.step_seconds is not None
    most, one = (max(s.memory, key=lambda rank: rank["total"]) for s in (summary, alone))
    rows = [
        [
            name,
            str(len(found.memory)),
            format_bytes(rank["total"] - rank["activations"]),
            format_bytes(rank["activations"]),
            format_seconds(found.step_seconds or 0.0),
            f"{found.tokens_per_second:,.0f}",
        ]
        for name, found, rank in (("one process", alone, one), (layout, summary, most))
    ]
    ratio = summary.step_seconds / alone.step_seconds
    cores = usable_cores()
    slower = f"{ratio:.1f} times slower" if ratio > 1 else f"{1 / ratio:.1f} times faster"
    share = most["total"] / one["total"]
    return [
        "peak memory per rank, and speed",
        table_text(
            ["", "ranks", "weights, gradients, AdamW", "activations", "a step", "tokens/s"], rows
        ),
        "",
        f"What this machine can show: {len(summary.memory)} ranks compute together what one",
        f"process does, each with at most {share:.0%} of its memory, and every "
        f"collective is counted.",
        f"What it cannot show: speed. The ranks share {cores} cores, and a step is {slower}",
        "than in one process; splitting pays where each rank has a device of its own.",
    ]


def _too_small(launcher: Launcher, folder: RunFolder, summary: Summary, alone: Summary) -> str:
    """What a rank of less memory makes of one process, and of the layout: refused, and enough."""
    import textwrap

    from hocket.jobs import memory
    from hocket.spec.errors import LayoutError
    from hocket.spec.units import format_bytes

    peak, one = (max(row["total"] for row in s.memory) for s in (summary, alone))
    limit = f"{round((peak + one) / 2e6)}MB"
    lines = [f"a model that does not fit: --memory-per-rank {limit}"]

    def asked(run: RunFolder) -> list[dict[str, int]] | None:
        spec = run.load()
        options = dataclasses.replace(spec.options, memory_per_rank=limit)
        limited = dataclasses.replace(spec, options=options)
        return memory.require_memory(launcher, limited, run.schedule_file.read_text())

    try:
        asked(RunFolder(folder.path / "one-process"))
        lines.append("one process fits as well: this layout saves too little to show it")
    except LayoutError as error:
        lines += textwrap.wrap(f"one process is rejected before it starts: {error.message}", 90)
    layout = folder.load().layout.axes_text()
    try:
        predicted = asked(folder)
    except LayoutError as error:
        return "\n".join([*lines, f"{layout} is rejected too: {error.message}"])
    verdict = (
        f"{layout} may start: its predicted peak memory per rank was "
        f"{format_bytes(max(row['total'] for row in predicted))}, measured {format_bytes(peak)}"
        if predicted is not None
        else f"the memory of {layout} cannot be predicted; measured peak {format_bytes(peak)}"
    )
    return "\n".join([*lines, verdict])


def _sample(launcher: Launcher, model: Path) -> str:
    from hocket.jobs.generate import generate_texts

    (found,) = generate_texts(
        str(model), [PROMPT], max_new_tokens=80, temperature=0.7, top_k=40, launcher=launcher
    )
    return PROMPT + found.text


LARGEST = 6_000_000
"""Characters taken; enough for a tokenizer and some thousand steps of a small model."""

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
            "encodings", "idlelib", "lib2to3", "ensurepip", "turtledemo"}  # fmt: skip


def standard_library() -> Iterator[tuple[str, str]]:
    """(relative path, text) of the library's files: its docs first, then its sources by name.

    Tables of characters, tests and bundled packages are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*")
        if file.suffix in (".py", ".txt", ".rst")
        and not _SKIPPED & set(file.relative_to(root).parts)
    ]
    for file in sorted(files, key=lambda f: (f.parent.name != "pydoc_data", str(f))):
        try:
            yield file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def write_corpus(to: Path, largest: int = LARGEST) -> int:
    """Write the text as JSON lines, one file of the library each; the characters written.

    Raises:
        DataError: this Python has no library sources, as in a frozen application.
    """
    count = 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with named(to), to.open("w", encoding="utf-8") as out:
        for path, text in standard_library():
            if count >= largest:
                break
            out.write(json.dumps({"path": path, "text": text}) + "\n")
            count += len(text)
    if count < 100_000:
        raise DataError(
            f"this Python's standard library holds only {count} characters of source text",
            hint="hocket train tiny-llama --data FOLDER_OF_TEXT --tokenizer train",
        )
    return count


Row = dict[str, Any]


def expected_communication(launcher: Launcher, folder: RunFolder) -> list[list[Row]]:
    """Per rank, every collective of one training step: name, axis, phase, count and bytes."""
    found: list[Row] = []

    def listen(event: Row) -> None:
        if event["event"] == "theory":
            found.append(event)

    launcher.run(
        "hocket.ranks.expected_communication:main",
        1,
        {"run": str(folder.path.resolve())},
        listen,
        startup_timeout=300.0,
    )
    ranks: list[list[Row]] = found[0]["ranks"]
    return ranks


def compare_communication(launcher: Launcher, folder: RunFolder) -> list[Row]:
    """Recorded and expected collectives of a step, summed over ranks; `equal`: all ranks agree.

    Rows of name, axis, phase, count, bytes, expected_count, expected_bytes, equal.
    """
    from hocket.cost.communication import differences

    recorded = json.loads(folder.communication_file.read_text())["ranks"]
    expected = expected_communication(launcher, folder)
    assert len(recorded) == len(expected)
    sums: dict[tuple[str, str, str], Row] = {}
    for measured, theory in zip(recorded, expected, strict=True):
        for row in differences(measured, theory):
            key = (row["name"], row["axis"], row["phase"])
            into = sums.setdefault(key, {**dict.fromkeys(_COUNTS, 0), "equal": True})
            for name in _COUNTS:
                into[name] += row[name]
            into["equal"] = into["equal"] and row["equal"]
    return [
        {"name": name, "axis": axis, "phase": phase, **row}
        for (name, axis, phase), row in sorted(sums.items(), key=lambda item: _order(item[0]))
    ]


_COUNTS = ("count", "bytes", "expected_count", "expected_bytes")


def _order(key: tuple[str, str, str]) -> tuple[bool, str, str]:
    """What is sent each microbatch before what is sent once a step; then by axis and name."""
    name, axis, phase = key
    return phase != "microbatch", axis, name
