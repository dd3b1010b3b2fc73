"""What ranks run: plans over split models, held to the logits of the whole one."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from tests.families import PROMPTS, SERVED, whole_model
from tests.serving.paged import ToyScheduler, compare_pages


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
    from hocket.schedules.registry import build_schedule
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
            schedule = build_schedule(spec.layout, 1) if spec.layout.num_stages > 1 else None
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
                worst, own = compare_pages(scheduler, run, logits) / scale, own / scale
            else:
                while (plan := scheduler.plan()) is not None:
                    run(plan)
        except Exception:
            raise RuntimeError(f"{family} {text}:\n{traceback.format_exc()}") from None
        found.append([family, text, worst, heads, own])
    return found


def experts_on_device(context: Any, folder: str, text: str, captured: bool) -> dict[str, Any]:
    """Two data ranks, of which one has fewer rows and is idle at the end, on the path of a GPU:
    the worst difference of this rank's logits from the whole model's, as a share of the largest;
    the sizes that are captured, and the steps that were replayed.

    Args:
        captured: decode steps are captured, by a stand-in that runs them again.
    """
    import torch

    from hocket.doctor.paged import _difference
    from hocket.runtime.mesh import Mesh
    from hocket.serving.engine import attention, graphs
    from hocket.serving.engine.runner import StageRunner
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.serving.scheduling.step import StepPlan
    from hocket.training.build import build_model
    from tests.serving.test_paged import by_reference

    spec = RunSpec(
        model="mixtral", config=SERVED["mixtral"], layout=Layout.parse(text),
        options=TrainOptions(dropout=0.0, attention=attention.NAME), weights=folder,
        workload=Workload(dtype="fp32"), command="serve",
    )  # fmt: skip
    mesh = Mesh(spec.layout, context.rank)
    _, skeleton, _, parallel = build_model(spec, mesh, None)
    (stage,) = parallel.stages
    graphs.DecodeGraphs._captured = _again if captured else _never  # type: ignore[method-assign]
    runner = StageRunner(
        stage, mesh, skeleton.config, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=64, chooser=by_reference, graphs=_Nothing(),
    )  # fmt: skip
    runner.allocate(64)
    ranks = spec.layout.dp
    every = [
        ToyScheduler(prompts, block_size=4, num_blocks=64, seed=number, chunks=(1, 1, 5))
        for number, prompts in enumerate((PROMPTS, PROMPTS[1:2])[:ranks])
    ]
    me = mesh.axis("dp").index
    plain = whole_model("mixtral")
    with torch.no_grad():
        wanted = [plain(torch.tensor([tokens])).logits[0] for tokens in every[me].sequences]
    part = Vocabulary.of(stage, mesh)
    if part.sizes:
        width = part.sizes[mesh.axis("tp").index]
        wanted = [row[:, part.start : part.start + width] for row in wanted]
    worst, number = 0.0, 0
    while any(plans := [scheduler.plan() for scheduler in every]):
        step = [plan or StepPlan(number, [], [0]) for plan in plans]
        mine = step[me]
        if ranks > 1:
            mine.widest = max(len(plan.tokens) for plan in step)
            mine.decoding = all(row.count == 1 for plan in step for row in plan.rows)
        logits = runner.run(mine)
        rows = [row for row in mine.rows if row.num_logits]
        assert len(logits) == len(rows)
        for row, found in zip(rows, logits, strict=True):
            worst = max(worst, _difference(wanted[row.slot][row.start + row.count - 1], found))
        number += 1
    assert runner.graphs is not None
    scale = max(float(row.abs().max()) for row in wanted)
    return {"worst": worst / scale, "replays": runner.graphs.replays, **runner.graphs_json()}


def longer_model(family: str) -> Any:
    """A tiny model of a type with 128 positions; equal on every call."""
    from hocket.doctor.families import spread_model
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of

    config = proxy_of(config_of(sample_config(family))).config.to_dict()
    return spread_model({**config, "max_position_embeddings": 128}, 0.1)


def context_on_device(context: Any, folder: str, cases: dict[str, bool]) -> list[dict[str, Any]]:
    """Prompts in chunks that are split, and rows that decode, on the path of a GPU over context
    ranks: by family the worst difference of this rank's logits from the whole
    model's, as a share of the largest; steps that were replayed, and that were split; and by how
    much the tokens that `_ahead` chose miss the largest logit.

    Args:
        cases: by type, whether decode steps are captured.
    """
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.serving.engine import attention, graphs
    from hocket.serving.engine.runner import StageRunner
    from hocket.training.build import build_model
    from tests.serving.test_paged import by_reference

    found = []
    mesh: Any = None
    for number, (family, captured) in enumerate(cases.items()):
        plain = longer_model(family)
        config = plain.config.to_dict()
        spec = RunSpec(
            model=family, config=config, layout=Layout(cp=2),
            options=TrainOptions(dropout=0.0, attention=attention.NAME),
            weights=str(Path(folder) / family), workload=Workload(dtype="fp32"), command="serve",
        )  # fmt: skip
        mesh = mesh or Mesh(spec.layout, context.rank)
        _, skeleton, _, parallel = build_model(spec, mesh, None)
        (stage,) = parallel.stages
        graphs.DecodeGraphs._captured = _again if captured else _never  # type: ignore[method-assign]
        runner = StageRunner(
            stage, mesh, skeleton.config, block_size=4, max_num_seqs=4, max_num_batched_tokens=128,
            max_model_len=128, chooser=by_reference, graphs=_Nothing(), lookahead=True,
        )  # fmt: skip
        runner.allocate(64)
        draw = torch.Generator().manual_seed(number)
        vocab = config["vocab_size"]
        prompts = [torch.randint(vocab, (n,), generator=draw).tolist() for n in (100, 9, 75)]
        scheduler = ToyScheduler(prompts, block_size=4, num_blocks=64, chunks=(1, 1, 5, 33))
        with torch.no_grad():
            wanted = [plain(torch.tensor([tokens])).logits[0] for tokens in prompts]
        split = 0

        def run(plan: Any, runner: StageRunner = runner) -> Any:
            nonlocal split
            split += runner.num_tokens(plan) < len(plan.tokens)
            return runner.run(plan)

        worst = compare_pages(scheduler, run, wanted) / max(float(x.abs().max()) for x in wanted)
        assert runner.graphs is not None
        found.append(
            {"family": family, "worst": worst, "split": split, "replays": runner.graphs.replays,
             "missed": _ahead(runner, plain, prompts[1:])}
        )  # fmt: skip
    return found


def _ahead(runner: Any, plain: Any, prompts: list[list[int]]) -> float | None:
    """Launch steps whose tokens no host knows, each after the one that samples them, over context
    ranks: by how much a token's logit is below the largest, as a share of it; None on ranks that do
    not sample."""
    import torch

    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.part import StagePart
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.serving.request import SamplingParams
    from hocket.serving.scheduling.admission import Admission
    from hocket.serving.scheduling.step import LAST, BatchRow, StepPlan

    mesh, last = runner.mesh, runner.last_tokens
    sampler = None
    if mesh.axis("cp").index == 0:
        whole = Vocabulary.of(runner.stage, mesh)
        sampler = DeviceSampler(
            whole, plain.config.vocab_size, "cpu", mesh.recorder, runner.max_num_seqs, last=last
        )  # fmt: skip
    part = StagePart(
        runner, sampler, mesh, hidden_size=0, dtype=runner.dtype, depth=2, last=last
    )  # fmt: skip
    greedy = SamplingParams(max_new_tokens=8, seed=0, temperature=0.0)
    for number in range(8):
        rows = []
        for slot, prompt in enumerate(prompts):
            start, count = (len(prompt) + number - 1, 1) if number else (0, len(prompt))
            first, end = -(-start // 4), -(-(start + count) // 4)
            rows.append(
                BatchRow(slot, start, count, LAST, [32 * slot + b for b in range(first, end)])
            )
        known = [token for prompt in prompts for token in prompt]
        slots = range(0 if number else len(prompts))
        admitted = [
            Admission(slot=slot, sampling=greedy, prompt_length=len(prompts[slot]))
            for slot in slots
        ]
        tokens = [-1] * len(rows) if number else known
        part.run(StepPlan(number, rows, tokens, admitted, [*slots]))
    if sampler is None:
        return None
    chosen = [result.tokens for _ in range(8) if (result := part.collect()) is not None]
    assert len(chosen) == 8
    missed = 0.0
    for prompt, answer in zip(prompts, zip(*chosen, strict=True), strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        missed = max(missed, float((logits.amax(1) - own).max() / logits.abs().max()))
    return missed


class _Nothing:
    """A device of graphs whose captures are stood for."""

    def begin(self) -> None:
        return None

    def failed(self) -> None:
        return None


def _never(self: Any, rows: int) -> Any:
    raise RuntimeError("not here")


def _again(self: Any, rows: int) -> Any:
    """A captured step that is replayed by running it, from the addresses of the capture."""
    from hocket.serving.engine.device_step import HostStep
    from hocket.serving.engine.graphs import _Graph

    step = HostStep.padding(rows, self.tables.max_num_seqs, self.tables.spare_place)
    self.tables.copied(step, ([], []))
    output = self._step(rows, step)

    class Replay:
        def replay(_self) -> None:
            output.copy_(self._step(rows, step))

    return _Graph(Replay(), output)
