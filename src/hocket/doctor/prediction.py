"""Prediction checks: the planners' seconds and bytes on this GPU, compared with measurements.

Each takes another size than the speed checks, whose own lines carry predictions too.

Not executed on a GPU yet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, row_of
from hocket.doctor.families import BASE
from hocket.doctor.model import TrainedModel, catalogue, spec
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from hocket.spec.run import RunSpec

GB = 1e9
SECONDS = 0.25
"""Share by which predicted seconds may be off."""
REHEARSED = 0.1
"""Share by which rehearsed bytes may be off: a rehearsal does not see libraries' workspaces."""
BYTES = 0.15
"""Share by which predicted bytes may be off."""


_row = row_of(
    "hocket.doctor.prediction", prefix="predict-", group="prediction", seconds=8.0, timeout=120.0,
    capability=(8, 0),
)  # fmt: skip


CHECKS = (
    _row("step", "seconds of a training step of Llama 3.2 1B at sequence length 2,048",
    "predicted_step",
         f"predicted within {SECONDS:.0%}", memory=50 * GB, seconds=20.0, timeout=240.0),
    _row("memory", "peak bytes of a training step of Llama 3.2 1B: measured, predicted, and "
         "rehearsed on fake tensors", "predicted_memory",
         f"predicted within {BYTES:.0%}, rehearsed within "
         f"{REHEARSED:.0%}", memory=50 * GB, seconds=15.0),
    _row("decode", "seconds of a decode step of Llama 3.2 1B at batch 1", "predicted_decode",
         f"predicted within {SECONDS:.0%}", memory=8 * GB, seconds=6.0),
    _row("matmul", "seconds of the matrix multiplications of a layer of Llama 3 8B at 4,096 tokens",
         "predicted_matmul", f"predicted within {SECONDS:.0%}", seconds=4.0,
         rehearsals=(CPU, FAKE)),
)  # fmt: skip


def _job(place: Place, *, compile: bool) -> RunSpec:
    return spec(
        catalogue("llama-3.2-1b") if place.on_gpu else BASE, seq_len=place.size(2048, 16),
        rows=place.size(4, 2), compile=compile and place.on_gpu,
    )  # fmt: skip


def _trained(place: Place, *, compile: bool) -> tuple[TrainedModel, list[Any]]:
    trained = TrainedModel(place, _job(place, compile=compile))
    return trained, trained.batches()


def predicted_step(place: Place) -> CheckOutcome:
    """Seconds of a step."""
    from hocket.doctor.speed import predict_step

    trained, batches = _trained(place, compile=True)
    seconds = place.seconds(lambda: trained.step(batches), repeats=8, warmup=3)
    if not place.on_gpu:
        return place.outcome(step_seconds=seconds)
    found = predict_step(place, "llama-3.2-1b", 4, 2048)
    if found is None:
        raise Cannot(str(place.values["prediction"]))
    place.near("step_seconds", seconds, found[0], SECONDS)
    return place.outcome()


def predicted_memory(place: Place) -> CheckOutcome:
    """Bytes of a step."""
    import torch

    from hocket.doctor.rehearsed import rehearsal_result, rehearsing
    from hocket.doctor.speed import predict_step
    from hocket.models.rows import note_documents, one_sequence_each

    if not place.on_gpu:
        trained, batches = _trained(place, compile=False)
        trained.step(batches)
        return place.outcome()
    with rehearsing(place, _job(place, compile=False), "0") as future:
        trained, batches = _trained(place, compile=False)
        for each in batches:
            note_documents(each["position_ids"], None)
        with one_sequence_each():
            for _ in range(2):
                trained.step(batches)
        torch.cuda.synchronize()
        rehearsal = rehearsal_result(future)
    measured = float(torch.cuda.max_memory_allocated())
    rehearsed = float(rehearsal.report.peak_bytes[0]["total"])
    place.near("rehearsed_peak_bytes", measured, rehearsed, REHEARSED)
    found = predict_step(place, "llama-3.2-1b", 4, 2048)
    if found is None:
        raise Cannot(str(place.values["prediction"]))
    place.near("peak_bytes", measured, found[1], BYTES)
    return place.outcome()


def predicted_decode(place: Place) -> CheckOutcome:
    """Seconds of a decode step."""
    from hocket.doctor.speed import Decoding, predict_decode

    context = place.size(512, 16)
    decoding = Decoding(place, "llama-3.2-1b", 1, tokens=context)
    decoding.runner.run(decoding.plan(context))
    seconds = place.seconds(lambda: decoding.runner.run(decoding.plan(1)), repeats=32, warmup=10)
    if not place.on_gpu:
        return place.outcome(step_seconds=seconds)
    found = predict_decode(place, "llama-3.2-1b", 1, context)
    if found is None:
        raise Cannot(str(place.values["prediction"]))
    place.near("step_seconds", seconds, found, SECONDS)
    return place.outcome()


def predicted_matmul(place: Place) -> CheckOutcome:
    """Seconds of a layer's matrix multiplications, forward, as the cost model counts them."""
    import torch

    config = catalogue("llama-3-8b") if place.on_gpu else BASE
    tokens = place.size(4096, 32)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden // heads if "head_dim" not in config else config["head_dim"]
    shapes = [
        (hidden, (heads + 2 * kv) * width), (heads * width, hidden), (hidden, 2 * inner),
        (inner, hidden),
    ]  # fmt: skip
    kind = torch.bfloat16
    pairs = [
        (place.draw(tokens, k, dtype=kind, seed=1), place.draw(k, n, dtype=kind, seed=2))
        for k, n in shapes
    ]
    seconds = 0.0
    for a, b in pairs:
        seconds += place.kernel_seconds(functools.partial(torch.matmul, a, b))
    if not place.on_gpu:
        return place.outcome(seconds=seconds)
    place.near("seconds", seconds, predicted_matmuls(place, tokens, shapes), SECONDS)
    return place.outcome()


def predicted_matmuls(place: Place, tokens: int, shapes: list[tuple[int, int]]) -> float:
    """Seconds of `tokens` rows by each [k, n], by the planner's efficiency of this GPU."""
    import numpy as np

    from hocket.catalogue import hardware
    from hocket.cost.constants import Platform
    from hocket.cost.device import matmul_seconds
    from hocket.doctor.place import catalogue_name
    from hocket.jobs.planner_problem import model_shape, training_problem
    from hocket.spec.errors import OptionError

    try:
        gpu = hardware.gpu(catalogue_name(place.name)).name
    except OptionError as error:
        raise Cannot(error.message) from None
    problem = training_problem(
        model_shape("llama-3-8b"), hardware.cluster(f"1x{gpu}"), seq_len=tokens, global_batch=1
    )
    platform = Platform(problem.machine, problem.constants)
    rows = np.array([float(tokens)])
    each = [
        matmul_seconds(rows, np.array([float(n)]), np.array([float(k)]), platform)
        for k, n in shapes
    ]
    return float(sum(seconds[0] for seconds in each))
