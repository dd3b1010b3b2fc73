"""The check: the same steps on one process and on a layout, from the same weights and data."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hocket.jobs.memory import free_memory, reject_too_large
from hocket.jobs.precision import device_kind
from hocket.jobs.prepare import job_spec
from hocket.jobs.request import JobRequest
from hocket.jobs.validate import validate_layout
from hocket.spec.capabilities import CHECKED
from hocket.spec.check import CheckReport
from hocket.spec.errors import OptionError
from hocket.spec.expert_dispatch import DEEPEP
from hocket.spec.layout import Layout
from hocket.spec.precision import QUANTIZED_BASES
from hocket.spec.run import TrainOptions

if TYPE_CHECKING:
    from hocket.models.source import ModelSource

Event = dict[str, Any]


def reject_unchecked(
    source: ModelSource, layout: Layout, dtype: str, options: TrainOptions, *, served: bool = False
) -> None:
    """Reject a model of which this machine cannot hold the one process that a layout, or a server
    (`served`), is compared with. Raises LayoutError, with the check of a tiny model of its type."""
    each, what = 16.0, "weights, gradients and optimizer state"
    if served or options.lora_rank is not None:
        base = None if served else options.quantize_base
        each, what = 4.0 if base is None else QUANTIZED_BASES[base], "the weights"
    kind, serve = source.config.get("model_type"), "--serve " * served
    fix = f"hocket check {serve}--matrix --types {kind} --layouts {layout.axes_text()}"
    each *= 2 if dtype == "fp64" else 1
    reject_too_large(source, each, what, fix, free_memory(options))


def check_layout(
    request: JobRequest, *, on_event: Callable[[Event], None] | None = None
) -> CheckReport:
    """Compare a layout with one process on seeded tokens; see `training.check` for how.

    Dropout is off, and `request.data` is not looked at. In fp64 both sides compute in it, with the
    same bounds: what differs in fp32 alone is rounding.

    Raises:
        HocketError: the layout does not fit the model, or the model breaks when it is cut;
            RankFailure with a rank's own traceback.
    """
    from hocket.jobs import adapters
    from hocket.jobs.proxy import require_equal
    from hocket.launch import Launcher, joined_context
    from hocket.models.source import resolve_model
    from hocket.schedules.registry import build_schedule

    if joined_context() is not None:
        raise OptionError(
            "check starts its own ranks; it was started as one of another launcher's",
            hint="run it without torchrun",
        )
    dtype = request.workload.dtype
    if dtype not in CHECKED:
        raise OptionError(
            f"dtype is {dtype}; equality is checked in {' or '.join(CHECKED)}", hint="--dtype fp32"
        )
    if request.options.expert_dispatch == DEEPEP:
        raise OptionError(
            f"--expert-dispatch {DEEPEP} moves rows of bf16, and equality is checked in "
            f"{' or '.join(CHECKED)}",
            hint="hocket doctor --gpu --only experts-deepep",
        )
    if dtype == "fp64" and request.options.lora_rank is not None:
        raise OptionError("peft's adapters are not made in fp64", hint="--dtype fp32")
    device_kind(request.options)
    options = dataclasses.replace(request.options, dropout=0.0, grad_dtype=dtype)
    request = dataclasses.replace(request, data=(), options=options)
    options = request.options
    trusted = options.trust_remote_code
    source = resolve_model(request.model, trust_remote_code=trusted, weights=False)
    layout = validate_layout(source.dimensions, request.layout, request.workload)
    reject_unchecked(source, layout, dtype, options)
    source = resolve_model(source.repo or request.model, trust_remote_code=trusted)
    assert layout.microbatches is not None
    schedule = build_schedule(layout, layout.microbatches)
    spec = job_spec(source, request, layout, source.config, "check")

    def say(text: str) -> None:
        if on_event is not None:
            on_event({"event": "phase", "name": text})

    reports: list[Event] = []

    def listen(event: Event) -> None:
        if event["event"] == "check":
            reports.append(event["report"])
        elif on_event is not None:
            on_event(event)

    preload = ("hocket.training.check", "hocket.training.build")
    with (
        Launcher(options.device, options.threads, preload=preload) as launcher,
        tempfile.TemporaryDirectory(prefix="hocket-check-") as folder,
    ):
        say("checking that the architecture can be split")
        require_equal(
            launcher,
            source,
            layout,
            attention=options.attention,
            packed=options.packing == "documents",
        )
        adapters.adapted_layers(launcher, spec, str(schedule))
        payload = {
            "spec": spec.to_json(),
            "folder": folder,
            "steps": options.steps,
            "schedule": str(schedule),
        }
        say("one process")
        launcher.run(
            "hocket.training.check:run_reference",
            1,
            payload,
            listen,
            startup_timeout=300.0,
            silence_timeout=max(600.0, options.timeout),
        )
        say(f"{layout.axes_text()}, {layout.world_size} ranks")
        launcher.run(
            "hocket.training.check:compare_steps",
            layout.world_size,
            payload,
            listen,
            startup_timeout=300.0,
            silence_timeout=max(600.0, options.timeout),
        )
    assert len(reports) == 1, reports
    return CheckReport.from_json(json.dumps(reports[0]))
