"""Weights: names and shapes of a model's files against the model, before its ranks start.

Only headers are read. One process of the warm server does it: shapes need the model, and so torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import Launcher, RankContext
    from hocket.spec.run import RunFolder


def require(launcher: Launcher, folder: RunFolder) -> None:
    """Refuse weight files whose names or shapes do not fit. Raises WeightsError, listing them."""
    if folder.load().weights is not None:
        launcher.run("hocket.jobs.weights:main", 1, {"run": str(folder.path.resolve())})


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side of `require`."""
    from hocket.models.skeleton import build
    from hocket.models.source import of_run
    from hocket.models.weight_files import WeightFiles
    from hocket.spec.run import RunFolder

    spec = RunFolder(payload["run"]).load()
    source = of_run(spec)
    assert source.weights is not None
    WeightFiles(source.weights, build(source.config, attention="sdpa", code=source.code))
