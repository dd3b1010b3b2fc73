"""Adapters: a process that looks up what `--lora-targets` names in the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.launch import RankContext


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """The process's side of `require`."""
    from hocket.models.lora import targets_of
    from hocket.models.skeleton import build
    from hocket.models.source import of_run
    from hocket.spec.run import RunSpec

    spec = RunSpec.from_json(payload["spec"])
    source = of_run(spec)
    skeleton = build(source.config, attention="sdpa", code=source.code)
    layers = targets_of(skeleton, spec.options.lora_targets)
    context.emit({"event": "adapters", "layers": len(layers)})
