"""Pipeline checks: every schedule at several depths, its seconds and its memory, and served stages.

One world of ranks executes all schedules of one depth: each is built over the same process
group, and compared with the same model on one rank, which every rank computes for itself.

Not executed on a GPU yet.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import WIDE, catalogue, spec
from hocket.doctor.place import Place
from hocket.doctor.world import gradient_difference, place_of, ranks, tell

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.spec.run import RunSpec

_HERE = "hocket.doctor.pipelines:"

SCHEDULES = {"sequential": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zb-v": 2}
"""Name to virtual stages."""
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "second_loss": 1e-4, "held_out_loss": 1e-4}
"""Largest difference from one rank: of losses relative to themselves, of a gradient relative to its
largest entry. The second loss is that after an optimizer step."""
SIMULATED = 0.03
GROWTH = 1.02
SERVED = 1.05
FEW, MANY = 8, 64
"""Microbatches of a step, between which the peak of 1F1B does not grow."""


_row = row_of(
    "hocket.doctor.pipelines", group="multi-gpu", gpus=2, seconds=25.0, timeout=240.0, slow=True,
)  # fmt: skip


CHECKS = (
    *(
        _row(
            f"pipeline-pp{stages}", f"{', '.join(SCHEDULES)} at pp{stages}: two steps and an "
            "evaluation, compared with one rank", "compare_schedules",
            "losses within 1e-5, after the step 1e-4, each gradient within 1e-4 of its largest "
            "entry; one communicator", arguments={"stages": stages}, gpus=stages, seconds=seconds,
            # Eight ranks are more than a small machine's cores.
            rehearsals=(CPU, FAKE) if stages <= 4 else (FAKE,),
            fake="hocket.doctor.fake:fake_schedules",
        )
        for stages, seconds in ((2, 25.0), (4, 30.0), (8, 35.0))
    ),
    _row(
        "pipeline-seconds", "a 1F1B step at pp2, against the same schedule simulated with its "
        "measured durations", "seconds", f"within {SIMULATED:.0%}", capability=(8, 0), seconds=20.0,
    ),
    _row(
        "pipeline-memory", f"peak of a 1F1B step at pp2 of {FEW} and of {MANY} microbatches",
        "pipeline_memory", f"at most {GROWTH:g} times on every rank", capability=(8, 0),
        seconds=20.0,
        rehearsals=(FAKE,), fake="hocket.doctor.fake:fake_microbatches",
    ),
    *(
        _row(
            f"serve-{layout}", f"greedy answers of 8 layers of Llama 3.2 1B at {layout}: tokens "
            "and seconds, compared with one GPU, which computes the same stages in turn",
            "time_pipeline_answer",
            f"the same tokens, and at most {SERVED:g} times the seconds of each",
            arguments={"layout": layout}, gpus=gpus, capability=(8, 0), seconds=45.0,
            rehearsals=(CPU, FAKE), fake="hocket.doctor.fake:fake_server",
        )
        for layout, gpus in (("pp2", 2), ("pp3", 3))
    ),
)  # fmt: skip


# --- every schedule --------------------------------------------------------------------------


def pipeline_job(
    schedule: str, stages: int, device: str, *, layers: int = 0, microbatches: int = 0
) -> RunSpec:
    """A small Llama, by default of two layers a rank, and twice as many microbatches as ranks."""
    virtual, count = SCHEDULES[schedule], microbatches or 2 * stages
    return spec(
        {**BASE, "num_hidden_layers": layers or 2 * stages}, dtype="fp32", seq_len=16, rows=count,
        layout=f"pp{stages}:schedule={schedule},microbatches={count},virtual_stages={virtual}",
        device=device, seed=3,
    )  # fmt: skip


def compare_schedules(place: Place, *, stages: int) -> CheckOutcome:
    """Differences of each schedule from one rank."""
    found = ranks(place, _HERE + "schedules_rank", stages, {"stages": stages})
    for schedule in SCHEDULES:
        for name, limit in LIMITS.items():
            worst = max(values["differences"][schedule][name] for values in found)
            place.values[f"{schedule}_{name}_difference"] = worst
            if not worst <= limit:  # infinite where NaN was found
                place.failures.append(f"{schedule}: {name} differs by {worst:.2g} ({limit:g})")
    most = max(values["communicators"] for values in found)
    place.equal("communicators of a rank", most, 1)
    return place.outcome(ranks=stages, communicators=most)


def schedules_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: executes every schedule, and the whole model by itself."""
    import torch.distributed as dist

    from hocket.doctor.model import TrainedModel, batches
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.layout import Layout
    from hocket.training.build import build_model, build_optimizer, join_world

    place, stages = place_of(context), payload["stages"]
    first = pipeline_job("gpipe", stages, place.kind)
    joined = join_world(first, context)
    alone = dataclasses.replace(first, layout=Layout(microbatches=2 * stages))
    expected = _losses(TrainedModel(place, alone), batches(alone, joined.device))
    differences = {}
    for name in SCHEDULES:
        context.beat()
        job = pipeline_job(name, stages, place.kind)
        mesh = Mesh(job.layout, context.rank, joined.device, joined.recorder)
        schedule = build_schedule(job.layout, 2 * stages)
        _, _, _, parallel = build_model(job, mesh, schedule)
        made = _Steps(parallel, build_optimizer(parallel, job.options))
        differences[name] = _differences(_losses(made, batches(job, mesh.device)), expected)
    world: Any = dist.distributed_c10d._world
    tell(context, differences=differences, communicators=len(world.pg_map))


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What is stepped: `parallel` and its `optimizer`, as `TrainedModel` has them."""

    parallel: Any
    optimizer: Any


def _losses(made: Any, microbatches: list[Any]) -> dict[str, Any]:
    """Losses of two steps and of an evaluation, and the gradients of the first."""
    found: dict[str, Any] = {"loss": float(made.parallel.forward_backward(microbatches))}
    found["gradients"] = {n: g.detach().clone() for n, g in made.parallel.gradients().items()}
    made.optimizer.step(1e-3)
    found["second_loss"] = float(made.parallel.forward_backward(microbatches))
    total, tokens = made.parallel.evaluate(microbatches)
    found["held_out_loss"] = total / tokens
    return found


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative differences; infinite for what is not a number."""
    errors = {}
    for name in ("loss", "second_loss", "held_out_loss"):
        errors[name] = abs(found[name] - expected[name]) / abs(expected[name])
    errors["gradient"] = gradient_difference(
        found["gradients"], expected["gradients"], partial=True
    )
    return {k: math.inf if math.isnan(v) else v for k, v in errors.items()}


# --- seconds and memory ----------------------------------------------------------------------


def _timed_job(place: Place, microbatches: int) -> RunSpec:
    """A 1F1B step at pp2, of kernels of real sizes on a GPU."""
    config = {**WIDE, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128}
    return spec(
        config if place.on_gpu else BASE, layout=f"pp2:schedule=1f1b,microbatches={microbatches}",
        seq_len=place.size(512, 16), rows=microbatches, device=place.kind,
        dtype=place.size("bf16", "fp32"),
    )  # fmt: skip


def seconds(place: Place) -> CheckOutcome:
    """The span of a measured step's compute, and of the step that is simulated from it."""
    from hocket.schedules.registry import build_schedule
    from hocket.simulation.measured import measured_prices
    from hocket.simulation.simulate import simulate
    from hocket.spec.timeline import Event, Timeline

    job = _timed_job(place, FEW)
    found = ranks(place, _HERE + "seconds_rank", 2, {"spec": job.to_json()})
    events = [Event(**event) for values in found for event in values["events"]]
    measured = Timeline.of("measured", 2, events)
    schedule = build_schedule(job.layout, FEW)
    simulated = simulate(schedule, measured_prices(measured, schedule.num_stages))
    place.equal(
        "measured actions", sum(e.kind in ("F", "B") for e in events), 2 * FEW * schedule.num_stages
    )
    place.near("step_seconds", measured.pipeline_span, simulated.pipeline_span, SIMULATED)
    return place.outcome()


def seconds_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: a recorded step after three others."""
    from hocket.doctor.model import batches
    from hocket.schedules.registry import build_schedule
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_rank_job
    from hocket.training.timeline import recorded

    job = RunSpec.from_json(payload["spec"])
    made = build_rank_job(job, context, build_schedule(job.layout, job.layout.microbatches or 1))
    microbatches = batches(job, made.mesh.device)
    tokens = job.workload.global_batch * job.workload.seq_len
    for _ in range(3):
        made.parallel.forward_backward(microbatches, tokens)
    with recorded(made.mesh, one_machine=True):
        made.parallel.forward_backward(microbatches, tokens)
    events = [dataclasses.asdict(e) for e in made.mesh.recorder.timeline_events()]
    tell(context, events=[e for e in events if e["stage"] is not None])


def pipeline_memory(place: Place) -> CheckOutcome:
    """Peaks of a step above what was in use before it."""
    jobs = [_timed_job(place, count).to_json() for count in (FEW, MANY)]
    found = ranks(place, _HERE + "memory_rank", 2, {"specs": jobs})
    for rank, values in enumerate(found):
        few, many = values["peaks"]
        place.values |= {
            f"rank_{rank}_peak_bytes_{FEW}": few,
            f"rank_{rank}_peak_bytes_{MANY}": many,
        }
        place.at_most(f"rank_{rank}_growth", many / max(1, few), GROWTH)
    return place.outcome()


def memory_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: the peak of the second step of each job."""
    import gc

    import torch

    from hocket.doctor.model import batches
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, join_world

    jobs = [RunSpec.from_json(text) for text in payload["specs"]]
    joined = join_world(jobs[0], context)
    peaks = []
    for job in jobs:
        mesh = Mesh(job.layout, context.rank, joined.device, joined.recorder)
        schedule = build_schedule(job.layout, job.layout.microbatches or 1)
        _, _, _, parallel = build_model(job, mesh, schedule)
        microbatches = batches(job, mesh.device)
        tokens = job.workload.global_batch * job.workload.seq_len
        parallel.forward_backward(microbatches, tokens)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        parallel.forward_backward(microbatches, tokens)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del parallel
    tell(context, peaks=peaks)


# --- serving ---------------------------------------------------------------------------------


def time_pipeline_answer(place: Place, *, layout: str) -> CheckOutcome:
    """Tokens and seconds of one answer, of one GPU and of a pipeline."""
    import tempfile
    from pathlib import Path

    from hocket.doctor.speed import saved_model
    from hocket.jobs.serving.llm import LLM
    from hocket.serving.request import SamplingParams

    new = place.size(128, 8)
    prompt = [5, 9, 33, 12, 60, 7]
    answers, each = [], []
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        config = catalogue("llama-3.2-1b", 8) if place.on_gpu else BASE
        saved_model(Place("cpu"), config, Path(folder))
        for split in ("dp1", layout):
            with LLM(
                folder, split, device=place.kind, dtype="fp32", max_model_len=place.size(256, 64)
            ) as llm:
                found = {}
                for count in (new, 1, new):  # the first warms up
                    sampling = SamplingParams(
                        max_new_tokens=count, temperature=0.0, ignore_eos=True
                    )
                    begun = time.perf_counter()
                    (answer,) = llm.generate([prompt], sampling)
                    found[count] = time.perf_counter() - begun
                answers.append(answer.tokens)
                each.append(max(1e-9, found[new] - found[1]) / (new - 1))
    place.equal(f"the answer at {layout}", answers[1], answers[0])
    place.values |= {"token_seconds": each[1], "one_gpu_token_seconds": each[0]}
    place.at_most("share_of_one_gpu", each[1] / each[0], SERVED)
    return place.outcome()
