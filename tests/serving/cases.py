"""What ranks run: generation for many families in one world."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions
from tests.families import FAMILIES


def generate(
    context: Any, folder: str, cases: list[list[str]], prompts: list[list[int]], **options: Any
) -> list[Any]:
    """One [family, layout, tokens per prompt, collectives] per case."""
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.serving.padded import Engine
    from hocket.serving.request import SamplingParams
    from hocket.serving.row_trial import trial_rows
    from hocket.training.build import build_model

    found: list[Any] = []
    meshes: dict[str, Any] = {}
    for family, text in cases:
        spec = RunSpec(
            model=family,
            config=FAMILIES[family],
            layout=Layout.parse(text),
            options=TrainOptions(dropout=0.0),
            weights=str(Path(folder) / family),
            command="generate",
        )
        key = spec.layout.axes_text()
        if key not in meshes:
            meshes[key] = Mesh(spec.layout, context.rank)
        mesh = meshes[key]
        schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
        try:
            _, skeleton, _, parallel = build_model(spec, mesh, schedule)
            rows = trial_rows(skeleton.config, parallel.stages[0].dtype)
            engine = Engine(
                parallel.stages, mesh, skeleton.config, stage_ranks=schedule.stage_ranks, rows=rows
            )
            before = {tuple(row[k] for k in ("name", "axis")): row["count"] for row in
                      mesh.recorder.collectives()}  # fmt: skip
            tokens = engine.generate(prompts, SamplingParams(**options))
            moved = {
                f"{row['name']} {row['axis']}": row["count"]
                - before.get((row["name"], row["axis"]), 0)
                for row in mesh.recorder.collectives()
            }
        except Exception:
            raise RuntimeError(f"{family} {text}:\n{traceback.format_exc()}") from None
        found.append([family, text, tokens, moved])
    return found
