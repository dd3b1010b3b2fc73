"""Generation without a server: each rank builds its part of the model and generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.spec.run import RunSpec

if TYPE_CHECKING:
    from hocket.launch import RankContext


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """In each rank: build its part of the model and generate; rank 0 emits the tokens.

    Payload: `spec` (a RunSpec's JSON), `prompts` (token ids), `sampling` (a SamplingParams's
    fields).
    """
    from hocket.schedules.registry import build_schedule
    from hocket.serving.padded import Engine
    from hocket.serving.request import SamplingParams
    from hocket.serving.row_trial import trial_rows
    from hocket.training.build import build_model, join_world

    spec = RunSpec.from_json(payload["spec"])
    sampling = SamplingParams.from_json(payload["sampling"])
    schedule = build_schedule(spec.layout, 1) if spec.layout.num_stages > 1 else None
    mesh = join_world(spec, context)
    source, skeleton, _, parallel = build_model(spec, mesh, schedule)
    engine = Engine(
        parallel.stages,
        mesh,
        skeleton.config,
        stage_ranks=None if schedule is None else schedule.stage_ranks,
        positions=source.dimensions.max_positions,
        rows=trial_rows(skeleton.config, parallel.stages[0].dtype),
    )

    def tell(number: int, tokens: list[int | None]) -> None:
        if context.rank == 0:
            context.emit({"event": "tokens", "number": number, "tokens": tokens})

    engine.generate(payload["prompts"], sampling, tell)
