"""What ranks run: plans over split models, held to the logits of the whole one."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from tests.families import PROMPTS, SERVED, whole_model
from tests.serving.paged import ToyScheduler, compare


def serve(context: Any, folder: str, cases: list[list[str]], dtype: str = "fp32") -> list[Any]:
    """Per case: family, layout, worst difference of a logit from the whole model's in fp64, as a
    share of the largest (None where this rank holds no logits), the key/value heads of this rank,
    and by how much the whole model in fp32 differs (None likewise). In bf16 the weights are
    rounded, of the whole model too, and nothing else is."""
    from hocket.serving.engine.gemm_select import exactly

    with exactly():
        return _serve(context, folder, cases, dtype)


def _serve(context: Any, folder: str, cases: list[list[str]], dtype: str) -> list[Any]:
    import torch

    from hocket.runtime.collectives import irecv, isend
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build
    from hocket.serving.engine import attention
    from hocket.serving.engine.runner import StageRunner
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.training.build import build_model

    found: list[Any] = []
    mesh: Any = None
    for family, text in cases:
        spec = RunSpec(
            model=family,
            config=SERVED[family],
            layout=Layout.parse(text),
            options=TrainOptions(dropout=0.0, attention=attention.NAME),
            weights=str(Path(folder) / family),
            workload=Workload(dtype=dtype),
            command="serve",
        )
        mesh = mesh or Mesh(spec.layout, context.rank)
        try:
            schedule = build(spec.layout, 1) if spec.layout.num_stages > 1 else None
            _, skeleton, _, parallel = build_model(spec, mesh, schedule)
            (stage,) = parallel.stages
            runner = StageRunner(
                stage, mesh, skeleton.config, block_size=4, max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=64,
            )  # fmt: skip
            runner.allocate(64)
            axis = mesh.axis("pp")

            def run(plan: Any, runner: Any = runner, stage: Any = stage, axis: Any = axis,
                    mesh: Any = mesh) -> Any:  # fmt: skip
                hidden = None
                if not stage.is_first:
                    shape = (1, len(plan.tokens), stage.hidden_size)
                    hidden = torch.empty(shape, dtype=runner.dtype)
                    irecv(hidden, axis, axis.index - 1, mesh.recorder).wait()
                output = runner.run(plan, hidden)
                if not stage.is_last:
                    isend(output.contiguous(), axis, axis.index + 1, mesh.recorder).wait()
                return output

            scheduler = ToyScheduler(PROMPTS, block_size=4, num_blocks=64, every_logit=True)
            heads = sorted({layer.num_kv_heads for layer in runner.layers})
            worst = own = None
            if stage.is_last:
                part = Vocabulary.of(stage, mesh)
                width = part.sizes[mesh.axis("tp").index] if part.sizes else None
                with torch.no_grad():
                    plain, exact = whole_model(family), whole_model(family)
                    if dtype == "bf16":
                        assert runner.half
                        for parameter in (*plain.parameters(), *exact.parameters()):
                            parameter.copy_(parameter.bfloat16())
                    exact = exact.double()
                    exact.set_experts_implementation("eager")  # the grouped product has no fp64
                    logits = [exact(torch.tensor([tokens])).logits[0] for tokens in PROMPTS]
                    own = max(
                        float((plain(torch.tensor([tokens])).logits[0] - row).abs().max())
                        for tokens, row in zip(PROMPTS, logits, strict=True)
                    )
                scale = max(float(row.abs().max()) for row in logits)
                if width is not None:
                    logits = [row[:, part.start : part.start + width] for row in logits]
                worst, own = compare(scheduler, run, logits) / scale, own / scale
            else:
                while (plan := scheduler.plan()) is not None:
                    run(plan)
        except Exception:
            raise RuntimeError(f"{family} {text}:\n{traceback.format_exc()}") from None
        found.append([family, text, worst, heads, own])
    return found
