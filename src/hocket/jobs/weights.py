"""Weights: names and shapes of a model's files against the model, before its ranks start.

Only headers are read. One process of the warm server does it: shapes need the model, and so torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.jobs import prepare

if TYPE_CHECKING:
    from hocket.launch import Launcher, RankContext
    from hocket.spec.run import RunFolder, RunSpec


def require(launcher: Launcher, folder: RunFolder, spec: RunSpec) -> None:
    """Refuse weight files whose names or shapes do not fit. Raises WeightsError, listing them."""
    if spec.weights is not None:
        launcher.run("hocket.jobs.weights:main", 1, prepare.payload(folder, spec))


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side of `require`."""
    from hocket.models.skeleton import build
    from hocket.models.source import of_run
    from hocket.models.weight_files import WeightFiles
    from hocket.spec.run import RunFolder

    spec = RunFolder(payload["run"]).load(trust_remote_code=payload["trust_remote_code"])
    source = of_run(spec)
    assert source.weights is not None
    WeightFiles(source.weights, build(source.config, attention="sdpa", code=source.code))
