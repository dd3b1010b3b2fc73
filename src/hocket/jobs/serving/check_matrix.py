"""The serving matrix: the proxy model of every type, served at every layout, and its answers.

    type, its defaults      -> prepare -> server at dp1, tp2, pp2 ... -> plain transformers -> row
    type, switches reversed -> the same, in a row of its own

Types are those of `hocket check --matrix`, at the same small configurations. A cell is rejected if
the server, or the checks that `hocket serve` makes before ranks start, does not accept the type at
that layout; a case whose ranks die or hang is crashed, and the next one goes on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs.serving import check
from hocket.spec.errors import HocketError, ModelError, OptionError, RankFailure, unknown
from hocket.spec.layout import Layout
from hocket.spec.matrix import (
    CRASHED,
    DIFFERENT,
    EQUAL,
    REJECTED,
    SERVED_LAYOUTS,
    SWITCHED,
    Cell,
    TypeRow,
)
from hocket.spec.matrix import Matrix as Table
from hocket.spec.serving import replica_layout

if TYPE_CHECKING:
    from hocket.launch import Launcher


def served_matrix(
    kinds: Sequence[str] = (),
    layouts: Sequence[str] = (),
    *,
    on_row: Callable[[TypeRow], None] | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Table:
    """Compare every type, served at every layout, with plain transformers.

    Args:
        kinds: model types; `TYPE+` is its row of reversed switches alone. Empty: both rows of all
            types that have a causal language model.
        layouts: their texts. Empty: `spec.matrix.SERVED_LAYOUTS`.
        on_row: called with each row as soon as it is complete.
        on_event: called with `{"event": "phase", "name", "done", "of"}`.

    Raises:
        OptionError: a type that transformers does not have.
        LayoutError: a layout that cannot be.
    """
    from hocket.jobs.matrix import versions
    from hocket.models import registry
    from hocket.models.samples import switches

    known = registry.causal_classes()
    rows = list(dict.fromkeys(kinds))
    for name in rows:
        if name.removesuffix(SWITCHED) not in known:
            message, hint = unknown("model type", name, known)
            raise OptionError(message, hint=hint)
    if not rows:
        rows = [name for kind in sorted(known) for name in (kind, kind + SWITCHED)]
    rows = [n for n in rows if not n.endswith(SWITCHED) or switches(n.removesuffix(SWITCHED))]
    texts = tuple(dict.fromkeys(str(Layout.parse(text)) for text in layouts or SERVED_LAYOUTS))
    made: list[TypeRow] = []
    with _Warm() as warm:
        for number, name in enumerate(rows):
            if on_event is not None:
                on_event({"event": "phase", "name": name, "done": number, "of": len(rows)})
            with tempfile.TemporaryDirectory(prefix="hocket-check-") as folder:
                row = _Row(warm, name, texts, Path(folder)).run()
            made.append(row)
            if on_row is not None:
                on_row(row)
    return Table(layouts=texts, rows=tuple(made), versions=versions())


class _Warm:
    """A launcher that is replaced where its server has died."""

    def __init__(self) -> None:
        self._launcher: Launcher | None = None

    def __enter__(self) -> _Warm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            self._launcher.close()

    @property
    def launcher(self) -> Launcher:
        if self._launcher is not None and not self._launcher.alive:
            self._launcher.close()
            self._launcher = None
        if self._launcher is None:
            self._launcher = check.launcher_of("cpu", 1)
        return self._launcher


class _Row:
    """One type at one set of switches, from its configuration to its cells."""

    def __init__(self, warm: _Warm, name: str, layouts: tuple[str, ...], folder: Path) -> None:
        self.warm, self.name, self.layouts, self.folder = warm, name, layouts, folder
        self.kind = name.removesuffix(SWITCHED)
        self.cells: dict[str, Cell] = {}
        self.parameters = 0
        self.switches = ""

    def run(self) -> TypeRow:
        """The complete row."""
        from hocket.models import registry

        try:
            self._fill(self.layouts, seed=0)
        except HocketError as error:
            outcome = CRASHED if isinstance(error, RankFailure) else REJECTED
            for text in self.layouts:
                self.cells.setdefault(text, _cell(text, outcome, self._reason(error)))
        return TypeRow(
            kind=self.name,
            architecture=registry.causal_classes()[self.kind],
            num_parameters=self.parameters,
            switches=self.switches,
            cells=tuple(self.cells[text] for text in self.layouts),
        )

    def _fill(self, layouts: Sequence[str], seed: int) -> None:
        from hocket.models import registry
        from hocket.models.samples import sample_config, switches
        from hocket.models.source import resolve_model

        module = registry.modeling_module(self.kind)
        self.warm.launcher.preload([module] if module else [])
        file = self.folder / f"{self.kind}.json"
        file.write_text(json.dumps(sample_config(self.kind)))
        directory = self.folder / "model"
        made = check.prepare_checked_model(
            self.warm.launcher, resolve_model(file), directory, proxy=True, seed=seed,
            switches=switches(self.kind) if self.name.endswith(SWITCHED) else None,
        )  # fmt: skip
        self.parameters = made["parameters"]
        self.switches = ", ".join(f"{name}={value}" for name, value in made["switches"].items())
        answers: dict[str, list[check.Answer]] = {}
        for text in layouts:
            try:
                source = resolve_model(directory)
                layout = Layout.parse(text)
                longest = check.longest_of(layout)
                longest = min(longest, made["longest"] or longest)
                size = check.checked_sizes(source, layout.cp, longest, "cpu")
                answers[text] = check.answers_of(self.warm.launcher, directory, text, size)
            except HocketError as error:
                crashed = isinstance(error, RankFailure)
                self._unequal(directory, text, CRASHED if crashed else REJECTED, error)
        if not answers:
            return
        try:
            reports = check.layout_reports(self.warm.launcher, directory, answers, self.folder)
        except ModelError as error:  # nothing to compare with: why `serve` rejects it, if it does
            for text in answers:
                self._unequal(directory, text, REJECTED, error)
            return
        again = []
        for text, report in reports.items():
            if report.ok:
                self.cells[text] = Cell(layout=text, outcome=EQUAL, ratio=report.ratio)
            elif report.amplified and seed + 1 < check.SEEDS:
                again.append(text)
            else:
                reason = "; ".join(report.failures[:2])
                self._unequal(directory, text, DIFFERENT, HocketError(reason), report.ratio)
        shutil.rmtree(directory, ignore_errors=True)
        if again:
            self._fill(again, seed + 1)

    def _unequal(
        self,
        directory: Path,
        text: str,
        outcome: str,
        error: HocketError,
        ratio: float | None = None,
    ) -> None:
        """A cell that is not equal: rejected where `hocket serve` says so before ranks start."""
        from hocket.jobs.proxy import require_equal
        from hocket.models.source import resolve_model

        reason = self._reason(error)
        launcher, source = self.warm.launcher, resolve_model(directory)
        try:  # all that is checked before ranks start, but for the server's check at this layout
            require_equal(launcher, source, replica_layout(Layout.parse(text)), loss=False)
            require_equal(launcher, source, Layout(), loss=False, pages=True)
        except RankFailure:
            pass
        except HocketError as said:
            outcome, reason = REJECTED, self._reason(said)
        self.cells[text] = _cell(text, outcome, reason, ratio)

    def _reason(self, error: HocketError) -> str:
        """Why, with the type's name in place of the files that the matrix wrote."""
        reason = check.reason_of(error)
        for file in (f"{self.kind}.json", "model"):
            reason = reason.replace(str(self.folder / file), self.kind)
        return reason


def _cell(layout: str, outcome: str, reason: str, ratio: float | None = None) -> Cell:
    return Cell(layout=layout, outcome=outcome, reason=reason, ratio=ratio)
