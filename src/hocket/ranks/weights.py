"""Weights: a process that holds names and shapes of a model's files against the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import RankContext


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side of `require`."""
    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import run_source
    from hocket.models.weight_files import WeightFiles
    from hocket.spec.run import RunFolder

    spec = RunFolder(payload["run"]).load(trust_remote_code=payload["trust_remote_code"])
    source = run_source(spec)
    assert source.weights is not None
    WeightFiles(source.weights, build_skeleton(source.config, attention="sdpa", code=source.code))
