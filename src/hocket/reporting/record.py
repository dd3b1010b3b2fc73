"""Record: what a run folder tells of its run, as far as it goes.

A run that died leaves files that are missing or torn. Whatever can be read is kept; what cannot is
named in `notes`, and nothing is made up for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hocket.spec import run_names
from hocket.spec.errors import HocketError, RunFolderError, nearest
from hocket.spec.files import MALFORMED, parse_json
from hocket.spec.forecast import KINDS, Forecast
from hocket.spec.layout import Layout
from hocket.spec.ledger import DISTURBED as DISTURBED_RUN
from hocket.spec.measured import MachineMeasurements
from hocket.spec.renamed import layout_text
from hocket.spec.rows import LARGEST
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import Event, Timeline

PREDICTED = "timeline.predicted.json"
EARLIER = "earlier"

DISTURBED = 0.1
"""Cores' worth of other programs' time from which a probe was disturbed."""

Read = TypeVar("Read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        path: of its folder.
        spec: what was asked for; None where run.json is gone.
        metrics: a row a step, in their order.
        experts: under ep and etp, of each layer with experts its name and rows of each expert.
        schedule: what was executed.
        measured, predicted: timelines of one step, of all ranks.
        later: further steps that were recorded, by their number.
        forecast: predicted before the run; None where nothing was.
        traffic: collectives of the measured step, all ranks together: rows of name, axis, phase,
            count and bytes.
        recorded_step: whose timeline and traffic they are; 0 if unknown.
        attention: on CUDA, a row for each kind of attention layer: layer, layers, kernel, reason.
        memory: peak bytes by kind, a row a rank; of replicas under threads.
        machine: its devices and what joins them, where it was probed.
        notes: sentences about what is missing or could not be read.
    """

    path: Path
    spec: RunSpec | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    experts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    schedule: Schedule | None = None
    measured: Timeline | None = None
    predicted: Timeline | None = None
    later: tuple[tuple[int, Timeline], ...] = ()
    forecast: Forecast | None = None
    traffic: tuple[Mapping[str, Any], ...] = ()
    recorded_step: int = 0
    attention: tuple[Mapping[str, Any], ...] = ()
    memory: tuple[Mapping[str, int], ...] = ()
    machine: MachineMeasurements | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def layout(self) -> Layout | None:
        return None if self.spec is None else self.spec.layout

    @property
    def steps_done(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def finished(self) -> bool:
        """Whether the last step that was asked for was taken."""
        return self.spec is not None and self.steps_done >= self.spec.options.steps

    @property
    def stretches(self) -> tuple[tuple[str, int, int], ...]:
        """Layout, first and last step of each part of the run that kept one layout: a run that is
        resumed may go on in another. The layout is empty where its steps do not name it."""
        found: list[tuple[str, int, int]] = []
        for row in self.metrics:
            layout, step = layout_text(str(row.get("layout", ""))), int(row["step"])
            if found and found[-1][0] == layout:
                found[-1] = (layout, found[-1][1], step)
            else:
                found.append((layout, step, step))
        return tuple(found)

    @property
    def own_metrics(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of the steps that were taken last in the layout that the run has now."""
        if not self.metrics:
            return ()
        layout, first, _ = self.stretches[-1]
        if layout and self.layout is not None and layout != str(self.layout):
            return ()
        return tuple(row for row in self.metrics if int(row["step"]) >= first)

    def column(self, name: str, *, own: bool = False) -> list[float]:
        """The finite numbers of one metric, in order of the steps; `own`: of those alone that were
        taken in the layout that the run has now."""
        values = (row.get(name) for row in (self.own_metrics if own else self.metrics))
        return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]

    @property
    def step_seconds(self) -> float | None:
        """Median over the steps in the layout that the run has now; those that warm up or compile
        only where there is no other."""
        values = self.column("step_seconds", own=True)
        first = 2 if self.spec is not None and self.spec.options.compile else 1  # which compile
        values = sorted(values[first:] or values[-1:])
        if not values:
            return None
        middle = len(values) // 2
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


class PartReader(Protocol):
    """Reads one file of a run folder; None, and a note, where it cannot be read."""

    def __call__(self, file: Path, parse: Callable[[str], Read], absent: str) -> Read | None: ...


def reader(notes: list[str]) -> PartReader:
    """A reader that adds to `notes` what cannot be read, and `absent` of a file that is missing."""

    def take(file: Path, parse: Callable[[str], Read], absent: str) -> Read | None:
        try:
            return parse(file.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            if absent:
                notes.append(absent)
        except OSError as error:
            notes.append(f"{file.name} cannot be read: {error.strerror}")
        except HocketError as error:
            named = error.message.startswith(file.name)
            notes.append(error.message if named else f"{file.name} cannot be read: {error.message}")
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
            notes.append(f"{file.name} is damaged and left out: {_short(error)}")
        return None

    return take


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder, complete or not.

    Raises:
        RunFolderError: there is no such folder, or it holds nothing of a run.
    """
    folder = RunFolder(path)
    _must_be_a_run(folder)
    notes: list[str] = []

    take = reader(notes)
    spec = take(folder.spec_file, RunSpec.from_json, "run.json is missing: the layout is unknown")
    torn: list[int] = []
    metrics = take(folder.metrics_file, lambda text: _metrics(text, torn), "")
    if not metrics:
        notes.append("no step was finished: there are no curves")
    if torn:
        notes.append(
            f"metrics.jsonl: line {', '.join(map(str, torn[:5]))} is torn or no row of numbers, "
            "and left out"
        )
    measured = take(
        folder.timeline_file,
        Timeline.from_json,
        "no timeline was recorded: the run ended before the step that would have been",
    )
    predicted = take(folder.path / PREDICTED, Timeline.from_json, "")
    later = take(folder.later_file, _later, "")
    forecast = take(folder.forecast_file, Forecast.from_json, "")
    if forecast is not None and not forecast.known:
        notes.append(f"nothing was predicted: {forecast.why}")
        forecast = None
    elif forecast is None and not any("forecast" in note for note in notes):
        notes.append("nothing was predicted: the folder holds no forecast.json")
    elif forecast is not None and predicted is None:
        notes.append(f"the predicted timeline is missing ({PREDICTED})")
    machine = take(folder.topology_file, MachineMeasurements.from_json, "")
    if machine is not None and predicted is not None and machine.host.load > DISTURBED:
        notes.append(
            f"other programs took {machine.host.load:.2g} of the {machine.host.cores} cores while "
            "the machine was probed: what was predicted is less certain (hocket probe measures "
            "again)"
        )
    others = take(folder.background_load_file, cores_of_others, "")
    if others is not None and others > DISTURBED_RUN:
        notes.append(disturbed(others))
    memory = take(folder.memory_file, _memory, "")
    attention = take(folder.attention_file, _attention, "")
    experts = take(folder.experts_file, _experts, "")
    traffic = take(folder.communication_file, _traffic, "")
    schedule = take(folder.schedule_file, _schedule, "")
    if spec is not None:
        predicted = None if predicted is None else on_all_ranks(predicted, spec.layout)
        if metrics and int(metrics[-1]["step"]) < spec.options.steps:
            notes.insert(
                0,
                f"the run has taken {metrics[-1]['step']} of {spec.options.steps} steps: "
                "it was ended, or is still going",
            )
    found = RunRecord(
        path=Path(path),
        spec=spec,
        metrics=metrics or (),
        schedule=schedule,
        measured=measured,
        predicted=predicted,
        later=later or (),
        forecast=forecast,
        traffic=traffic[1] if traffic else (),
        recorded_step=traffic[0] if traffic else 0,
        attention=attention or (),
        memory=memory or (),
        experts=experts or (),
        machine=machine,
    )
    return dataclasses.replace(found, notes=(*_layout_changes(found), *notes))


def _layout_changes(record: RunRecord) -> list[str]:
    """Which steps were taken in which layout, where that was more than one."""
    found = record.stretches
    now = "" if record.layout is None else str(record.layout)
    if found and now and found[-1][0] not in ("", now):
        return [f"no step was taken in {now} yet; {_spans(found)}"]
    if len(found) < 2:
        return []
    where = f" (recorded in {EARLIER}/)" if (record.path / EARLIER).is_dir() else ""
    return [f"{_spans(found[:-1])}{where}, {_spans(found[-1:])}: times and memory are of the last"]


def _spans(found: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(
        (f"step {first}" if first == last else f"steps {first} to {last}")
        + f" in {layout or 'a layout unknown'}"
        for layout, first, last in found
    )


def cores_of_others(text: str) -> float:
    """Of a folder's `background_load_file`. Raises ValueError for what it does not say."""
    found = parse_json(text)["cores"]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"cores is {found!r}")
    return float(found)


def disturbed(cores: float) -> str:
    """The note of a run during which background load took so many cores."""
    return (
        f"other programs took {cores:.2g} cores while it ran: times are those of a busy machine, "
        "and what was predicted is for a machine by itself"
    )


def on_all_ranks(timeline: Timeline, layout: Layout) -> Timeline:
    """A timeline of the pipeline's ranks alone, copied onto every rank at that place."""
    world = layout.world_size
    if timeline.num_ranks == world or timeline.num_ranks != layout.pp:
        return timeline
    lines: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        lines[event.rank].append(event)
    places = [layout.coordinate(rank)["pp"] for rank in range(world)]
    return dataclasses.replace(
        timeline,
        num_ranks=world,
        events=tuple(
            dataclasses.replace(event, rank=rank)
            for rank, place in enumerate(places)
            for event in lines[place]
        ),
        peak_bytes=tuple(timeline.peak_bytes[place] for place in places)
        if timeline.peak_bytes
        else (),
    )


def _must_be_a_run(folder: RunFolder) -> None:
    path = folder.path
    if path.is_file():
        raise RunFolderError(
            f"{path} is a file, not a run folder",
            hint=f"hocket report {path.parent}" if (path.parent / "run.json").exists() else None,
        )
    if not path.is_dir():
        there = path.absolute().parent
        names = [p.name for p in there.iterdir() if p.is_dir()] if there.is_dir() else []
        near = nearest(path.name, names)
        raise RunFolderError(
            f"there is no folder {path}",
            hint=f"did you mean {path.parent / near}?" if near else run_names.hint_of_runs(path),
        )
    if not any(
        file.exists() for file in (folder.spec_file, folder.metrics_file, folder.timeline_file)
    ):
        inside = sorted(file.parent for file in path.glob("*/run.json"))
        raise RunFolderError(
            f"{path} holds no run: none of run.json, metrics.jsonl, timeline.json is there",
            hint=f"hocket report {max(inside, key=lambda p: p.stat().st_mtime)}"
            if inside
            else run_names.hint_of_runs(path),
        )


def _metrics(text: str, torn: list[int]) -> tuple[Mapping[str, Any], ...]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            int(row["step"])
            if any(isinstance(v, int) and abs(v) >= 2**63 for v in row.values()):
                raise ValueError("a number that no metric has")
            rows.append(row)
        except MALFORMED:
            torn.append(number)
    return tuple(rows)


def _experts(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    data = parse_json(text)
    return tuple(
        (str(name), tuple(_count(rows) for rows in load))
        for name, load in zip(data["layers"], data["load"], strict=True)
        if load
    )


def _later(text: str) -> tuple[tuple[int, Timeline], ...]:
    return tuple(
        (_count(row["step"]), Timeline.from_json(json.dumps(row["timeline"])))
        for row in parse_json(text)
    )


def _schedule(text: str) -> Schedule:
    """Raises ScheduleError for what is none, ValueError for actions of stages that it lacks."""
    found = Schedule.parse(text)
    for _, action in found:
        if action.stage >= found.num_stages:
            raise ValueError(f"{action} is of a stage beyond its {found.num_stages}")
    return found


def _count(value: Any) -> int:
    """A whole number. Raises ValueError for one that no machine reaches."""
    found = int(value)
    if not abs(found) <= LARGEST:
        raise ValueError("a number is too large")
    return found


def _memory(text: str) -> tuple[Mapping[str, int], ...]:
    return tuple(
        {kind: _count(row[kind]) for kind in (*KINDS, "total")} for row in parse_json(text)
    )


def _attention(text: str) -> tuple[Mapping[str, Any], ...]:
    names = ("layer", "kernel", "reason")
    return tuple(
        {**{name: str(row[name]) for name in names}, "layers": _count(row["layers"])}
        for row in parse_json(text)
    )


def _traffic(text: str) -> tuple[int, tuple[Mapping[str, Any], ...]]:
    """The step that was recorded, and its collectives of all ranks."""
    data = parse_json(text)
    return _count(data.get("step", 0)), tuple(
        {
            **{name: str(row[name]) for name in ("name", "axis", "phase")},
            **{name: _count(row[name]) for name in ("count", "bytes")},
        }
        for row in data["total"]
    )


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 120 else text[:117] + "..."
