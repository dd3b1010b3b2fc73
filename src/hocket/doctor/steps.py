"""Training-step checks: waits of the host, skipped steps, packed inputs, buckets, overlap.

Where the host waits, and what overlaps, is read off torch's profiler (Kineto): runtime calls by
name, kernels with their begin and end.

Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import WIDE, TrainedModel, spec
from hocket.doctor.place import Place
from hocket.doctor.world import gradient_difference, place_of, ranks, tell, timed

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext
    from hocket.spec.run import RunSpec
    from hocket.training.inputs import Inputs

_HERE = "hocket.doctor.steps:"
STEPS = 20
BUCKETS = (25.0, 100.0, 160.0)
"""MB of gradients that are reduced at once."""
SLOWER = 1.05
HIDDEN = 0.3
"""Share of the collectives' seconds during which a matmul runs."""
PACKED = 50
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
"""Runtime calls in which the host waits for the device; cudaMemcpyAsync is none of them."""


_row = row_of("hocket.doctor.steps", group="equality", seconds=3.0, timeout=120.0)
_two_ranks = row_of(
    "hocket.doctor.steps", group="multi-gpu", gpus=2, capability=(8, 0), seconds=20.0,
    timeout=120.0, slow=True,
)  # fmt: skip


CHECKS = (
    _row(
        "train-host-waits", f"{STEPS} steps with the loop's inputs, readings and optimizer under "
        "torch's profiler", "host_waits", "no call that waits for a stream, an event or the device",
        group="speed", capability=(8, 0), seconds=4.0, rehearsals=(CPU, FAKE),
        fake="hocket.doctor.fake:fake_host_waits",
    ),
    _row(
        "train-not-finite", "a NaN in the weights' gradient of the third of five steps",
        "not_finite", "parameters and optimizer state are as before it, bit for bit, and the error "
        "names step 3", seconds=2.0,
    ),
    _row(
        "train-packed-inputs", f"{PACKED} steps on packed rows, with and without the next batch "
        "being copied meanwhile", "packed_inputs", "every loss is equal bit for bit",
        capability=(8, 0),
    ),
    _row(
        "memory-pinned", "offloaded activations: bytes of page-locked memory after each of six "
        "steps", "pinned_offload",
        "constant from the second step on, more than 0; losses within 1e-4 of "
        "those without", group="memory", capability=(8, 0),
    ),
    _two_ranks(
        "train-bucket-sizes", "a step at dp2 with gradient buckets of "
        f"{', '.join(f'{size:g}' for size in BUCKETS)} MB and of the default size",
        "time_bucket_sizes", f"the default takes at most {SLOWER:g} times the fastest; gradients "
        "within 2e-2 of their largest entry (bf16)",
    ),
    _two_ranks(
        "overlap-tp2", "a step at tp2: collectives that overlap with matmuls, and gradients in the "
        "order of autograd and in that which overlaps", "overlap_tensor",
        f"{HIDDEN:.0%} or more of the collectives' seconds; gradients within 2e-2 of their "
        "largest entry (bf16)",
    ),
    _two_ranks(
        "sanitizer-zero3", "three steps at dp2:zero=3 under TORCH_CUDA_SANITIZER=1", "sanitizer",
        "no access of two streams without an order",
        rehearsals=(FAKE,), fake="hocket.doctor.fake:stream_order",
    ),
)  # fmt: skip


# --- the host --------------------------------------------------------------------------------


def host_waits(place: Place) -> CheckOutcome:
    """Runtime calls of some steps that end before the host reads what they gave."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from hocket.models.rows import one_sequence_each
    from hocket.training.reading import LossReading, Readings

    rows, count = 8, place.size(STEPS, 3)
    job = spec(
        place.size(WIDE, BASE), seq_len=place.size(256, 16), rows=rows, layout="dp1:microbatches=2",
        device=place.kind, dtype=place.size("bf16", "fp32"),
    )  # fmt: skip
    trained = TrainedModel(place, job)
    tokens = rows * job.workload.seq_len
    activities = [ProfilerActivity.CPU]
    if place.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with _inputs(trained, 4 + STEPS) as inputs, one_sequence_each():

        def step(index: int) -> LossReading:
            loss = trained.parallel.forward_backward(inputs.step(index), tokens)
            norm = trained.parallel.clip_grad_norm(1.0)
            reading = LossReading(index + 1, 1e-3, loss, norm, tokens)
            trained.optimizer.step(1e-3, reading.skip() if place.on_gpu else None)
            trained.parallel.begin_unshard()
            inputs.prefetch(index + 1)
            return reading

        for index in range(3):
            step(index)
        place.synchronize()
        with profile(activities=activities) as profiled:
            readings = [step(3 + index) for index in range(count)]
            names = "end of the steps"
            with torch.profiler.record_function(names):
                pass
        losses = [loss for _, loss, _ in Readings(readings).rows()]
    # Ending a profile waits for the device itself: what follows the mark is not counted.
    events: list[Any] = list(profiled.events())
    end = max(event.time_range.start for event in events if event.name == names)
    waits = [e.name for e in events if e.name in _WAITS and e.time_range.start < end]
    place.equal("calls that wait for the device", sorted(set(waits)), [])
    return place.outcome(waits=len(waits), first_loss=losses[0], last_loss=losses[-1])


@contextlib.contextmanager
def _inputs(trained: TrainedModel, steps: int, *, packed: bool = False) -> Iterator[Inputs]:
    """The loop's inputs over random tokens: whole rows, or packed ones of several documents."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from hocket.training.dataset import BatchOrder, RowDataset, TokenDataset
    from hocket.training.inputs import Inputs
    from hocket.training.packed_files import BEGINS, LEARNED, flags_file

    job = trained.job
    rows, length = job.workload.global_batch, job.workload.seq_len
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        path = Path(folder) / "tokens.bin"
        count = rows * length * (steps + 1) + 1
        draw = np.random.default_rng(3)
        draw.integers(job.config["vocab_size"], size=count, dtype=np.uint16).tofile(path)
        flags = np.full(count, LEARNED, np.uint8)
        flags[draw.random(count) < 4 / length] |= BEGINS
        flags[::length] |= BEGINS
        flags.tofile(flags_file(path))
        kind = RowDataset if packed else TokenDataset
        dataset = kind(path, "uint16", length, flags=packed)
        order = BatchOrder(rows, 1, job.layout.microbatches or 1)
        yield Inputs(dataset, order, 0, trained.place.device)


def packed_inputs(place: Place) -> CheckOutcome:
    """Losses of two equal models, of which one has its next batch brought while it steps."""
    import torch

    from hocket.models.rows import packed_rows

    job = spec(
        place.size(WIDE, BASE), seq_len=place.size(256, 32), rows=4, device=place.kind, seed=3,
        dtype=place.size("bf16", "fp32"), packing="documents",
    )  # fmt: skip
    results = []
    for ahead in (True, False):
        trained = TrainedModel(place, job)
        found = []
        known = packed_rows() if place.on_gpu else contextlib.nullcontext()
        with _inputs(trained, PACKED, packed=True) as inputs, known:
            for index in range(PACKED):
                tokens = inputs.num_tokens(index)
                loss = trained.parallel.forward_backward(inputs.step(index), tokens)
                # Rate 0: flash attention's backward adds in no fixed order, and losses are to
                # depend on the inputs alone.
                trained.optimizer.step(0.0)
                if ahead:
                    inputs.prefetch(index + 1)
                found.append(loss.detach().clone())
        results.append(torch.stack(found))
    place.equal("whether all losses are equal", torch.equal(*results), True)
    place.equal("whether they are finite", bool(results[0].isfinite().all()), True)
    return place.outcome(first_loss=float(results[0][0]), last_loss=float(results[0][-1]))


def not_finite(place: Place) -> CheckOutcome:
    """Five steps, of which the third has a gradient that is not a number."""
    import torch

    from hocket.training.reading import LossReading

    job = spec(place.size(WIDE, BASE), seq_len=16, rows=4, device=place.kind)
    trained = TrainedModel(place, job)
    batches, readings = trained.batches(), []
    for step in range(1, 6):
        loss = trained.parallel.forward_backward(batches)
        if step == 3:
            gradient = next(iter(trained.parallel.gradients().values()))
            gradient.view(-1)[0] = math.nan
        norm = trained.parallel.clip_grad_norm(1.0)
        reading = LossReading(step, 1e-3, loss, norm, 1)
        before = _state(trained)
        trained.optimizer.step(1e-3, reading.skip())
        after = _state(trained)
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        place.equal(f"whether step {step} changes tensors", bool(changed), step != 3)
        readings.append(reading)
    found = ((reading, *reading.values.tolist()) for reading in readings)
    wrong = (row for row in found if not all(map(math.isfinite, row[1:])))
    message = next((reading.not_finite(*values).message for reading, *values in wrong), "")
    if not message.startswith("step 3:"):
        place.failures.append(f"the error does not name step 3: {message!r}")
    return place.outcome(error=message)


def _state(trained: TrainedModel) -> dict[str, Tensor]:
    """Copies of parameters and of the optimizer's state."""
    found = {name: p.detach().clone() for name, p in trained.parallel.named_parameters()}
    for name, state in trained.optimizer.state_tensors().items():
        found |= {f"{name} {key}": value.clone() for key, value in state.items()}
    return found


def pinned_offload(place: Place) -> CheckOutcome:
    """Losses and page-locked bytes of steps whose layers' activations go to the host."""
    from hocket.training.build import offloaded_to_host

    job = spec(
        place.size(WIDE, BASE), seq_len=place.size(256, 32), rows=8, device=place.kind,
        dtype=place.size("bf16", "fp32"), layout="dp1:microbatches=2",
    )  # fmt: skip
    plain, moved = TrainedModel(place, job), TrainedModel(place, job)
    # The CPU's tensors are in host memory already: there they are copied all the same.
    saved = offloaded_to_host(
        moved.parallel, **({} if place.on_gpu else {"host": True, "least": 256})
    )
    held = []
    for step in range(6):
        batches = plain.batches(seed=step)
        expected, found = (float(each.step(batches)) for each in (plain, moved))
        held.append(sum(each._pool.bytes for each in saved))
        if not abs(found - expected) <= 1e-4 * abs(expected):
            place.failures.append(f"step {step + 1}: loss {found:.6f}, expected {expected:.6f}")
    place.equal("bytes after steps 3 to 6", held[2:], [held[1]] * 4)
    place.equal("whether anything is offloaded", all(each.bytes for each in saved), True)
    return place.outcome(pinned_bytes=held[1], moved_bytes=sum(each.bytes for each in saved))


# --- two ranks -------------------------------------------------------------------------------


def step_job(place: Place, layout: str, **options: Any) -> RunSpec:
    """A job of two ranks, of kernels of real sizes on a GPU."""
    config = {**WIDE, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128}
    return spec(
        config if place.on_gpu else BASE, layout=layout, seq_len=place.size(1024, 16),
        rows=place.size(8, 4), device=place.kind, dtype=place.size("bf16", "fp32"), seed=3,
        **options,
    )  # fmt: skip


def time_bucket_sizes(place: Place) -> CheckOutcome:
    """Seconds of a step by the size of buckets."""
    jobs = {f"{size:g}": step_job(place, "dp2", bucket_mb=size).to_json() for size in BUCKETS}
    jobs["default"] = step_job(place, "dp2").to_json()
    found = ranks(place, _HERE + "buckets_rank", 2, {"specs": jobs})
    seconds = {name: max(values["seconds"][name] for values in found) for name in jobs}
    place.values |= {f"{name}_mb_step_seconds": value for name, value in seconds.items()}
    worst = max(values["difference"] for values in found)
    place.values["gradient_difference"] = worst
    limit = 2e-2 if place.on_gpu else 1e-5
    if not worst <= limit:
        place.failures.append(f"gradients differ by {worst:.2g} of their largest entry ({limit:g})")
    place.at_most("default_beside_fastest", seconds["default"] / min(seconds.values()), SLOWER)
    return place.outcome()


def buckets_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: each job's step, and its gradients compared with the first job's."""
    from hocket.doctor.model import batches
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, join_world

    mesh: Any = None
    seconds, expected, worst = {}, None, 0.0
    for name, text in payload["specs"].items():
        context.beat()
        job = RunSpec.from_json(text)
        mesh = mesh or join_world(job, context)
        _, _, _, parallel = build_model(job, mesh, None)
        own = [
            {key: value.chunk(2)[context.rank] for key, value in part.items()}
            for part in batches(job, mesh.device)
        ]
        tokens = job.workload.global_batch * job.workload.seq_len

        def step(parallel: Any = parallel, own: Any = own, tokens: int = tokens) -> None:
            parallel.forward_backward(own, tokens)

        step()
        seconds[name] = timed(step, place_of(context).size(8, 2), mesh.device)
        gradients = {n: g.clone() for n, g in parallel.gradients().items()}
        expected = expected or gradients
        worst = max(worst, gradient_difference(gradients, expected))
    tell(context, seconds=seconds, difference=worst)


def overlap_tensor(place: Place) -> CheckOutcome:
    """Share of the collectives' seconds that overlap with matmuls, and gradients of both orders."""
    job = step_job(place, "tp2:sequence_parallel=true")
    found = ranks(place, _HERE + "tensor_overlap_rank", 2, {"spec": job.to_json()})
    worst = max(values["difference"] for values in found)
    place.values["gradient_difference"] = worst
    limit = 2e-2 if place.on_gpu else 1e-5
    if not worst <= limit:
        place.failures.append(f"gradients differ by {worst:.2g} of their largest entry ({limit:g})")
    hidden = [values["hidden"] for values in found]
    place.values["collective_seconds"] = max(values["seconds"] for values in found)
    place.at_least("hidden_share", min(hidden), HIDDEN)
    return place.outcome()


def tensor_overlap_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: a step in the order of autograd, one in that which overlaps, and its profile."""
    from torch.profiler import ProfilerActivity, profile

    from hocket.doctor.model import batches
    from hocket.runtime.tensor_parallel import overlap
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_model, join_world

    job = RunSpec.from_json(payload["spec"])
    mesh = join_world(job, context)
    own, tokens = batches(job, mesh.device), job.workload.global_batch * job.workload.seq_len
    results = []
    for overlaps in (False, True):
        overlap.overlaps = lambda x, on=overlaps: on  # type: ignore[assignment, misc]
        _, _, _, parallel = build_model(job, mesh, None)
        parallel.forward_backward(own, tokens)
        results.append({n: g.clone() for n, g in parallel.gradients().items()})
    spans: list[tuple[float, float, str]] = []
    if mesh.device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            parallel.forward_backward(own, tokens)
        spans = [
            (e.time_range.start, e.time_range.end, e.name)
            for e in profiled.events()
            if str(e.device_type).endswith("CUDA")
        ]
    total, hidden = overlapped([(a, b) for a, b, n in spans if "nccl" in n.lower()],
                           [(a, b) for a, b, n in spans if "nccl" not in n.lower()])  # fmt: skip
    tell(
        context, difference=gradient_difference(results[1], results[0]), seconds=total / 1e6,
        hidden=hidden / total if total else 0.0,
    )  # fmt: skip


def overlapped(
    these: list[tuple[float, float]], others: list[tuple[float, float]]
) -> tuple[float, float]:
    """The length of the union of some spans, and how much of it lies inside of other spans."""
    edges = [(at, 0, step) for a, b in these for at, step in ((a, 1), (b, -1))]
    edges += [(at, 1, step) for a, b in others for at, step in ((a, 1), (b, -1))]
    total = shared = last = 0.0
    open_ = [0, 0]
    for at, kind, step in sorted(edges):
        if open_[0]:
            total += at - last
            shared += at - last if open_[1] else 0.0
        last = at
        open_[kind] += step
    return total, shared


def sanitizer(place: Place) -> CheckOutcome:
    """Steps of two ranks that torch's stream sanitizer watches."""
    job = step_job(place, "dp2:zero=3")
    found = ranks(
        place, _HERE + "sanitized_rank", 2, {"spec": job.to_json()}, {"TORCH_CUDA_SANITIZER": "1"}
    )
    place.equal("whether the sanitizer was on", [v["enabled"] for v in found], [True, True])
    return place.outcome(losses=str([values["losses"] for values in found]))


def sanitized_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: steps; the sanitizer raises where an access has no order."""
    from torch.cuda import _sanitizer

    from hocket.doctor.model import batches
    from hocket.spec.run import RunSpec
    from hocket.training.build import build_rank_job

    job = RunSpec.from_json(payload["spec"])
    made = build_rank_job(job, context)
    losses = []
    for index in range(3):
        own = [
            {key: value.chunk(2)[context.rank] for key, value in part.items()}
            for part in batches(job, made.mesh.device, seed=index)
        ]
        loss = made.parallel.forward_backward(own, job.workload.global_batch * job.workload.seq_len)
        made.parallel.clip_grad_norm(1.0)
        made.optimizer.step(1e-3)
        made.parallel.begin_unshard()
        losses.append(float(loss))
    tell(context, losses=losses, enabled=bool(_sanitizer.cuda_sanitizer.enabled))
