"""Equality checks: one GPU computes what the plain Hugging Face model computes on the CPU.

As `hocket check`: three fp32 steps, realigned after each; loss, gradients, gradient norm and
values after the optimizer step within the tolerances of `spec.check`. Here the reference is on the
CPU, so that every CUDA kernel of a step is compared with another implementation.

Not executed on a GPU yet.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, GpuCheck
from hocket.doctor.families import BASE, FAMILIES
from hocket.doctor.place import Place

STEPS = 3
_CRITERION = (
    "loss within 1e-5, each gradient within 1e-4 of its largest entry, values after each of 3 "
    "steps within 0.2 of the learning rate"
)


def _row(name: str, what: str, **arguments: Any) -> GpuCheck:
    return GpuCheck(
        id=f"equal-{name}", group="equality", what=what, criterion=_CRITERION,
        function="hocket.doctor.equality:equal", arguments=arguments, seconds=1.5, timeout=90.0,
        rehearsals=(CPU, FAKE), fake="hocket.doctor.fake:fake_step",
        packages=("peft",) if "lora_rank" in arguments else (),
    )  # fmt: skip


CHECKS = (
    *(
        _row(family, f"a tiny {family} on one GPU, compared with the plain model on the CPU",
             family=family)
        for family in FAMILIES
    ),
    _row("microbatches", "gradients accumulated over four microbatches", fields="microbatches=4"),
    _row("selective-recompute", "attention recomputed in backward", fields="recompute=selective"),
    _row("full-recompute", "every layer recomputed in backward", fields="recompute=full"),
    _row("offload-optimizer", "optimizer state in host memory", fields="offload=optimizer"),
    _row("eager-attention", "attention without a fused kernel", attention="eager"),
    _row("packed-documents", "documents packed into rows, compared with each document alone",
         packing="documents"),
    _row("lora", "LoRA adapters of rank 4, compared with peft's", lora_rank=4),
)  # fmt: skip


def equal(place: Place, *, family: str = "", fields: str = "", **options: Any) -> CheckOutcome:
    """Three steps of one rank, compared with one CPU process."""
    import dataclasses

    from hocket.doctor.model import TrainedModel, spec
    from hocket.training.check import compare_layout
    from hocket.training.reference import write_reference

    config = FAMILIES[family] if family else BASE
    job = spec(
        config, layout=f"dp1:{fields}" if fields else "dp1", dtype="fp32", seq_len=16, rows=8,
        seed=3, lr=1e-3, **options,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hocket-doctor-") as folder:
        write_reference(dataclasses.replace(job, options=job.options), Path(folder), STEPS, "cpu")
        trained = TrainedModel(place, job, labels_shifted=False)
        report = compare_layout(job, trained.parallel, trained.optimizer, Path(folder), STEPS)
    assert report is not None
    place.failures += report.failures[:3]
    ratio = report.worst_ratio
    return place.outcome(
        largest_difference_of_what_is_allowed=ratio if ratio < float("inf") else "infinite",
        loss=report.steps[-1].loss, reference_loss=report.steps[-1].reference_loss,
    )  # fmt: skip
