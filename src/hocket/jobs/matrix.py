"""The matrix: a tiny model of every type of the installed transformers, at every layout.

    batch of types   small, and run by one process             two ranks, each by itself
                     its proxy models, as `hocket train` does  one world of two ranks
                     its cases, by size of their world         one world a size, one mesh a shape

A case that kills or hangs its world is said to have crashed, and the cases after it go on in the
next world. What the legality rules or the proxy checks reject is never started. Where losses and
norms agree and a gradient does not, the case runs again with both sides in fp64, at the same
bounds: what rounding explains is then equal, and what a layout leaves out is still missing.

Each type has a second configuration where its class has optional switches (`samples.switches`):
the same type with as many of them reversed as its class takes together, named with a `+`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, OptionError, RankFailure, unknown
from hocket.spec.layout import Layout
from hocket.spec.matrix import CRASHED, EQUAL, LAYOUTS, REJECTED, SWITCHED, Cell, Matrix, TypeRow
from hocket.spec.proxy_verdict import verdict_fields

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.dimensions import Dimensions

Event = dict[str, Any]

RANKS = "hocket.ranks.matrix"
"""The module that the ranks run."""

BATCH = 8
"""Types whose references lie on the disk at the same time."""

ROUNDING = "differs in fp32 by rounding alone: equal in fp64"
"""The reason of a cell that is equal in fp64."""

SILENCE = 150.0
"""Seconds without a sign of a case's end that count as a hang."""


@dataclasses.dataclass
class _Type:
    """What is known of one type so far."""

    kind: str
    config: dict[str, Any]
    wanted: dict[str, Any] = dataclasses.field(default_factory=dict)
    switches: str = ""
    note: str = ""
    inferred: bool = False
    parameters: int = 0
    verdict: dict[str, str] = dataclasses.field(default_factory=dict)
    """Part of a `ProxyVerdict` to why layouts that need it are rejected; empty: they are not."""
    failure: Cell | None = None
    cells: dict[str, Cell] = dataclasses.field(default_factory=dict)


def check_matrix(
    kinds: Sequence[str] = (),
    layouts: Sequence[str] = (),
    *,
    on_row: Callable[[TypeRow], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Matrix:
    """Compare every type at every layout with one process.

    Args:
        kinds: model types, `+` for the second configuration of one. Empty: all that have a causal
            language model, in both.
        layouts: their texts. Empty: `spec.matrix.LAYOUTS`.
        on_row: called with each type's row as soon as it is whole.
        on_event: called with what goes on: `{"event": "phase", "name", "done", "of"}`.

    Raises:
        OptionError: a type that transformers does not have.
        LayoutError: a layout that cannot be.
    """
    from hocket.launch import Launcher
    from hocket.models import registry
    from hocket.models.samples import switches

    known = registry.causal_classes()
    for kind in kinds:
        if kind.removesuffix(SWITCHED) not in known:
            message, hint = unknown("model type", kind, known)
            raise OptionError(message, hint=hint)
        if kind.endswith(SWITCHED) and not switches(kind.removesuffix(SWITCHED)):
            raise OptionError(
                f"the configuration of {kind.removesuffix(SWITCHED)} has no optional switches",
                hint=f"--types {kind.removesuffix(SWITCHED)}",
            )
    every = sorted([*known, *(f"{kind}{SWITCHED}" for kind in known if switches(kind))])
    chosen = list(dict.fromkeys(kinds)) or every
    texts = tuple(dict.fromkeys(str(Layout.parse(text)) for text in layouts or LAYOUTS))
    preload = ("hocket.ranks.matrix", "hocket.training.check", "hocket.training.build")
    rows: list[TypeRow] = []
    with (
        Launcher("cpu", 1, preload=preload) as launcher,
        tempfile.TemporaryDirectory(prefix="hocket-matrix-") as folder,
    ):
        for first in range(0, len(chosen), BATCH):
            work = _Batch(launcher, Path(folder), texts, on_event)
            for row in work.run(chosen[first : first + BATCH], first, len(chosen)):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    return Matrix(layouts=texts, rows=tuple(rows), versions=versions())


def versions() -> dict[str, str]:
    """What the matrix depends on, by package."""
    found = {}
    for name in ("hocket", "transformers", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


class _Batch:
    """Some types, from their configurations to their rows."""

    def __init__(
        self,
        launcher: Launcher,
        folder: Path,
        layouts: tuple[str, ...],
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.launcher = launcher
        self.folder = folder
        self.layouts = {text: Layout.parse(text) for text in layouts}
        self.on_event = on_event
        self.types: dict[str, _Type] = {}
        self.tipped: list[tuple[str, str]] = []  # in the run before

    def run(self, kinds: list[str], done: int, total: int) -> Iterator[TypeRow]:
        """The rows of `kinds`; `done` of `total` types came before them."""
        from hocket.models import registry
        from hocket.ranks.matrix import tidy

        def say(name: str) -> None:
            if self.on_event is not None:
                self.on_event({"event": "phase", "name": name, "done": done, "of": total})

        where = f"{kinds[0]} to {kinds[-1]}"
        say(f"{where}: one process")
        self._resolve(kinds)
        modules = [registry.modeling_module(kind.removesuffix(SWITCHED)) for kind in kinds]
        self.launcher.preload([name for name in modules if name is not None])
        self._prepare()
        self._try()
        for size in sorted({layout.world_size for layout in self.layouts.values()}):
            say(f"{where}: {size} ranks")
            self._compare(size, self._cases(size))
        if self.tipped:
            say(f"{where}: in fp64")
            self._widen()
        tidy(self.folder, kinds)
        for kind in kinds:
            yield self._row(self.types[kind])

    def _row(self, one: _Type) -> TypeRow:
        from hocket.models import registry

        cells = one.cells
        if one.failure is not None:
            cells = {t: dataclasses.replace(one.failure, layout=t) for t in self.layouts}
        return TypeRow(
            kind=one.kind,
            architecture=registry.causal_classes()[one.kind.removesuffix(SWITCHED)],
            num_parameters=one.parameters,
            note=one.note,
            inferred=one.inferred,
            switches=one.switches,
            cells=tuple(cells[text] for text in self.layouts),
        )

    # --- one process ---------------------------------------------------------------------------

    def _resolve(self, kinds: list[str]) -> None:
        """The configurations, as a user's directory would bring them."""
        from hocket.models.samples import sample_config, switches
        from hocket.models.source import resolve_model

        for kind in kinds:
            name = kind.removesuffix(SWITCHED)
            one = self.types[kind] = _Type(kind, sample_config(name))
            if kind != name:
                one.wanted = switches(name)
            file = self.folder / f"{kind}.json"
            file.write_text(json.dumps(one.config))
            try:
                one.config = resolve_model(file).config
            except HocketError as error:
                one.failure = _cell(REJECTED, error.message.replace(str(file), kind))

    def _prepare(self) -> None:
        waiting = [one.kind for one in self.types.values() if one.failure is None]
        begun: dict[int, str] = {}

        def listen(event: Event) -> None:
            if event["event"] == "begin":
                begun[event["rank"]] = event["what"]
            elif event["event"] == "type":
                waiting.remove(event["kind"])
                self._know(event)

        while waiting:
            begun.clear()
            payload = {
                "folder": str(self.folder),
                "types": [(k, self.types[k].config, self.types[k].wanted) for k in waiting],
            }
            error = self._world(f"{RANKS}:prepare_cases", min(2, len(waiting)), payload, listen)
            if error is None:
                break
            hung = getattr(error, "rank", None)
            for rank, kind in begun.items():
                if kind in waiting and hung in (None, rank):
                    waiting.remove(kind)
                    self.types[kind].failure = _cell(CRASHED, _short(error))

    def _know(self, event: Event) -> None:
        one = self.types[event["kind"]]
        for outcome in (REJECTED, CRASHED):
            if event.get(outcome):
                one.failure = _cell(outcome, event[outcome])
                return
        one.config, one.parameters = event["config"], event["parameters"]
        one.verdict = event["verdict"]
        one.switches, one.note, one.inferred = event["switches"], event["note"], event["inferred"]

    def _try(self) -> None:
        """Every part of a verdict that these layouts need: what `hocket train` tries first."""
        waiting = [
            (one.kind, part)
            for one in self.types.values()
            if one.failure is None
            for part in sorted(
                {p for layout in self.layouts.values() for p in verdict_fields(layout)}
            )
            if part not in one.verdict
        ]

        def listen(event: Event) -> None:
            if event["event"] == "tried":
                kind, part = waiting.pop(0)
                self.types[kind].verdict[part] = event["reason"]

        while waiting:
            rows = [[k, self.types[k].config, part] for k, part in waiting]
            error = self._world(f"{RANKS}:try_parts", 2, {"trials": rows}, listen)
            if error is None:
                assert not waiting, waiting
                break
            kind, part = waiting.pop(0)
            self.types[kind].verdict[part] = f"its proxy model ends its ranks: {_short(error)}"

    # --- layouts -------------------------------------------------------------------------------

    def _cases(self, size: int) -> list[tuple[str, str]]:
        """Types and layouts that a world of this size is to run."""
        return [
            (one.kind, text)
            for one in self.types.values()
            if one.failure is None
            for text, layout in self.layouts.items()
            if layout.world_size == size and not self._refused(one, text, layout)
        ]

    def _widen(self) -> None:
        """Run again in fp64 what may differ by rounding alone."""
        cases, self.tipped = self.tipped, []
        configs = {kind: self.types[kind].config for kind, _ in cases}
        payload = {"folder": str(self.folder), "types": list(configs.items())}
        if (
            self._world(f"{RANKS}:widen", min(2, len(configs)), payload, lambda event: None)
            is not None
        ):
            return  # the outcome in fp32 stays
        for size in sorted({self.layouts[text].world_size for _, text in cases}):
            same = [case for case in cases if self.layouts[case[1]].world_size == size]
            self._compare(size, same, dtype="fp64")
        for kind, text in cases:
            cell = self.types[kind].cells[text]
            if cell.outcome == EQUAL:
                self.types[kind].cells[text] = dataclasses.replace(cell, reason=ROUNDING)

    def _compare(self, size: int, cases: list[tuple[str, str]], dtype: str = "fp32") -> None:
        waiting = dict(enumerate(cases))
        begun: dict[int, int] = {}
        raised: list[Event] = []

        def listen(event: Event) -> None:
            if event["event"] == "begin":
                begun[event["rank"]] = event["what"]
            elif event["event"] == "raised":
                raised.append(event)
            elif event["event"] == "case":
                kind, text = waiting.pop(event["case"])
                cell = {key: event[key] for key in ("outcome", "reason", "ratio", "seconds")}
                self.types[kind].cells[text] = Cell(layout=text, **cell)
                if event["tipped"]:
                    self.tipped.append((kind, text))

        while waiting:
            begun.clear()
            raised.clear()
            payload = {
                "folder": str(self.folder),
                "dtype": dtype,
                "cases": [
                    [number, kind, self.types[kind].config, text]
                    for number, (kind, text) in waiting.items()
                ],
            }
            error = self._world(f"{RANKS}:compare_cases", size, payload, listen)
            if error is None:
                assert not waiting, waiting
                break
            number, cell = self._blame(error, begun, raised, waiting)
            kind, text = waiting.pop(number)
            self.types[kind].cells[text] = dataclasses.replace(cell, layout=text)

    def _blame(
        self,
        error: HocketError,
        begun: dict[int, int],
        raised: list[Event],
        waiting: dict[int, tuple[str, str]],
    ) -> tuple[int, Cell]:
        """The case that ended a world, and what it came to."""
        for event in raised:
            if event["case"] in waiting:
                outcome = REJECTED if event["refused"] else CRASHED
                return event["case"], _cell(outcome, event["reason"])
        culprit = begun.get(getattr(error, "rank", 0), min(begun.values(), default=-1))
        if culprit not in waiting:
            culprit = next(iter(waiting))
        return culprit, _cell(CRASHED, _short(error))

    def _refused(self, one: _Type, text: str, layout: Layout) -> bool:
        """Whether a layout is refused before ranks start; its cell is then written."""
        from hocket.jobs.validate import validate_layout
        from hocket.models.dimensions import dimensions
        from hocket.ranks.matrix import workload

        try:
            model: Dimensions = dimensions(one.config)
            validate_layout(model, layout, workload(one.config))
        except HocketError as error:
            one.cells[text] = _cell(REJECTED, error.message, text)
            return True
        for part in verdict_fields(layout):
            if text not in one.cells and one.verdict[part]:
                one.cells[text] = _cell(REJECTED, one.verdict[part], text)
        return text in one.cells

    def _world(
        self, entry: str, size: int, payload: Event, listen: Callable[[Event], None]
    ) -> HocketError | None:
        """Run one world to its end; what ended it, if it was not the last case."""
        try:
            self.launcher.run(
                entry,
                size,
                payload,
                listen,
                on_output=lambda rank, line: None,
                startup_timeout=180.0,
                silence_timeout=SILENCE,
            )
        except HocketError as error:
            if not self.launcher.alive:
                raise
            return error
        return None


def _cell(outcome: str, reason: str, layout: str = "") -> Cell:
    return Cell(layout=layout, outcome=outcome, reason=" ".join(reason.split()))


def _short(error: HocketError) -> str:
    """The first lines of what ended a world: the rest is a traceback."""
    assert isinstance(error, HocketError)
    text = error.message if isinstance(error, RankFailure) else f"{error.message}"
    return text.split("\n\n")[0][:400]
