"""Trackers: a run's metrics to TensorBoard, Weights & Biases or MLflow, each through its library.

A tracker is rank 0's. The run's id there is kept in `trackers.json` of the run folder, so that a
resumed run continues the same curve. A tracker that fails once the run is under way is left out
with a warning: it never ends a run.

Where data goes is the library's own setting: `WANDB_PROJECT`, `WANDB_MODE=offline`,
`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`. Without them Weights & Biases takes the project
`hocket`, and MLflow a database in the run folder.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.spec.errors import OptionError, unknown
from hocket.spec.files import read_object, write_text
from hocket.spec.install import install_line
from hocket.spec.run import RunSpec

SCALARS = (
    "loss", "held_out_loss", "held_out_perplexity", "lr", "grad_norm", "tokens_per_second",
    "step_seconds", "mfu", "num_input_tokens_seen",
)  # fmt: skip
"""Keys of a row of metrics that are tracked."""

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Trackers by name, and the module of each."""

IDS = "trackers.json"


def tracker_names(text: str | None) -> list[str]:
    """The trackers that an option lists, separated by commas.

    Raises:
        OptionError: an unknown one, or its library is not installed.
    """
    found = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in found:
        if name not in LIBRARIES:
            message, hint = unknown("tracker", name, LIBRARIES)
            raise OptionError(message, hint=hint)
        if importlib.util.find_spec(LIBRARIES[name]) is None:
            raise OptionError(
                f"the tracker {name} needs the package {LIBRARIES[name]}",
                hint=install_line("trackers"),
            )
    return found


class Trackers:
    """The trackers of one run.

    Args:
        text: of the option, see `tracker_names`.
        folder: the run folder. config: what the run is, flat, by option.
        done: steps of an earlier start.
    """

    def __init__(
        self, text: str | None, folder: Path, config: Mapping[str, Any], *, done: int = 0
    ) -> None:
        ids = _ids(folder) if done else {}
        self._log: dict[str, Callable[[dict[str, float], int], None]] = {}
        self._close: dict[str, Callable[[], None]] = {}
        for name in tracker_names(text):
            start = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[name]
            try:
                self._log[name], self._close[name], ids[name] = start(
                    folder, config, ids.get(name), done
                )
            except Exception as error:
                _warn(name, "was not started", error)
        if ids:
            write_text(folder / IDS, json.dumps(ids))

    def write(self, row: Mapping[str, Any]) -> None:
        values = {name: float(row[name]) for name in SCALARS if row.get(name) is not None}
        for name, log in list(self._log.items()):
            try:
                log(values, int(row["step"]))
            except Exception as error:
                _warn(name, "is left out from here on", error)
                del self._log[name]

    def close(self) -> None:
        """Have every tracker write what it still has."""
        for name, close in self._close.items():
            try:
                close()
            except Exception as error:
                _warn(name, "was not closed", error)


Started = tuple[Callable[[dict[str, float], int], None], Callable[[], None], str]


def _tensorboard(folder: Path, config: Mapping[str, Any], known: str | None, done: int) -> Started:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)  # type: ignore[no-untyped-call]

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close, "tensorboard"


def _wandb(folder: Path, config: Mapping[str, Any], known: str | None, done: int) -> Started:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "hocket"),
        name=folder.name,
        id=known,
        resume="allow",
        dir=str(folder),
        config=dict(config),
        settings=wandb.Settings(silent=True),
    )
    return lambda values, step: run.log(values, step=step), run.finish, str(run.id)


def _mlflow(folder: Path, config: Mapping[str, Any], known: str | None, done: int) -> Started:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
        mlflow.set_experiment("hocket")
    run = mlflow.start_run(run_id=known, run_name=None if known else folder.name)
    if known is None:
        mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(values: dict[str, float], step: int) -> None:
        mlflow.log_metrics(values, step=step)

    def close() -> None:
        mlflow.end_run()

    return log, close, str(run.info.run_id)


def _ids(folder: Path) -> dict[str, str]:
    """The runs' ids of an earlier start; empty where there are none to be read."""
    found = read_object(folder / IDS)
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _warn(name: str, what: str, error: Exception) -> None:
    warnings.warn(f"tracker {name} {what}: {type(error).__name__}: {error}", stacklevel=3)


def run_trackers(spec: RunSpec, folder: Path, *, done: int) -> Trackers | None:
    """The trackers that a run asks for; None: none. `done`: steps taken before this start."""
    if spec.options.tracker is None:
        return None
    flat = {**dataclasses.asdict(spec.workload), **dataclasses.asdict(spec.options)}
    flat |= {"model": spec.model, "layout": str(spec.layout)}
    return Trackers(spec.options.tracker, folder, flat, done=done)
