"""The job behind `hocket plan --serve`: how many GPUs of which kind a service needs, and its text.

A model is a name of the catalogue, a directory, bytes of weights, or one whose size is not public;
that one is answered for every hypothesis about it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import LayoutError, ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.service import Service
from hocket.spec.units import parse_bytes

if TYPE_CHECKING:
    from hocket.planning.service.plan import KindAnswer, ServicePlan
    from hocket.planning.service.problem import ServiceProblem
    from hocket.planning.service.stored import StoredWeights
    from hocket.spec.cluster import Cluster
    from hocket.spec.model_shape import ModelShape

KINDS = ("A100-SXM-40", "A100-SXM-80", "H100-SXM-80", "H100-SXM-96", "H200-SXM-141", "L40S-48")
"""Kinds of GPU that are compared where none is named."""

ASKED = KINDS[:4]
"""Those that are compared for a model whose size is not public."""

CONCURRENT = (1, 8, 32, 128)
CONTEXTS = (2048, 8192, 32768)
"""Rows and columns of the memory map: requests held at once, and tokens of each."""

RATES = (1.0, 4.0, 16.0)
"""Rows of the map of GPUs over load, relative to the rate that was asked."""

GOALS = (0.5, 1.0, 2.0)
"""Its columns, relative to the goal for a token."""


def serve_plan(
    model: str | os.PathLike[str] = "",
    *,
    cluster: str | None = None,
    prompt_len: int | None = None,
    output_len: int | None = None,
    requests_per_second: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    percentile: int | None = None,
    prefix_cache_hit_rate: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    weights: str | None = None,
    top: int = 10,
    layout: str | Layout | None = None,
    pin: Sequence[str] = (),
    explain: bool = False,
    precision: str | None = None,
    quantization: str | None = None,
    price_list: str | None = None,
    cache_precision: str | None = None,
    engine: str | None = None,
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int | None = None,
    expert_imbalance: float | None = None,
) -> tuple[ServicePlan, ...]:
    """GPUs for a service: one plan, or one for each hypothesis about a model of unknown size.

    Args:
        model: a name of the catalogue, a Hugging Face directory, `gpt-4`, or any name with
            `weights`.
        cluster: kinds of GPU, `A100-40,A100-80,H100`, as many as are needed; or GPUs that are
            there, `2x8xH100-SXM` or a TOML file. None: the kinds of `KINDS`.
        prompt_len ... prefix_cache_hit_rate: of `Service`; None: its default.
        trace: a file of requests (`planning.service.trace`), simulated instead of equal requests at
            random times; it has their lengths and rate.
        weights: `180GB`: a dense model of which only the bytes are known.
        precision: of weights that are not quantized, and of products. None: bf16, fp16 where a
            kind of GPU lacks it. fp8: as `quantization="fp8"`.
        quantization: of weights, one of `planning.service.stored.QUANTIZATIONS`. None: as the
            checkpoint is published.
        price_list: as `jobs.plan.plan_training`.
        layout: price this one alone: `dp2.tp4` is two replicas.
        pin: `tp=8`, `pp=1`, `dp=2`, `max_num_batched_tokens=2048`.
        engine: whose constants price it. None: a tuned server's.
        gpu_memory_utilization: fraction of GPU memory that the engine may fill.
        max_num_seqs: requests that a data rank runs at once. None: as many as fit.
        expert_imbalance: tokens of the expert rank that gets most, over the mean. None: 1.5.

    Raises:
        HocketError: what the caller can mend: unknown names with the nearest, numbers that cannot
            be, and a service that none of the kinds can give, with the floor and what would do.
    """
    from hocket.catalogue.hardware import with_prices
    from hocket.planning.problem import EXPERT_IMBALANCE
    from hocket.planning.service.plan import service_pins
    from hocket.planning.service.stored import stored_weights
    from hocket.planning.service.trace import read_trace

    asked = {
        "prompt_len": prompt_len,
        "output_len": output_len,
        "requests_per_second": requests_per_second,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "percentile": percentile,
        "prefix_cache_hit_rate": prefix_cache_hit_rate,
    }
    requests = None
    if trace is not None:
        for name in ("prompt_len", "output_len", "requests_per_second"):
            if asked[name] is not None:
                raise OptionError(
                    f"--trace has every request's arrival and lengths, and "
                    f"--{name.replace('_', '-')} {asked[name]:g} is given as well",
                    hint="one of the two",
                )
        requests = read_trace(os.fspath(trace))
        asked["prompt_len"], asked["output_len"] = requests.prompt_len, requests.output_len
        asked["requests_per_second"] = requests.rate
    if top < 1:
        raise OptionError(f"top is {top}; it must be at least 1", hint="--top 10")
    service = Service(**{k: v for k, v in asked.items() if v is not None})  # type: ignore[arg-type]
    pins = service_pins(list(pin))
    if layout is not None and set(pins) - {"max_num_batched_tokens"}:
        raise OptionError("--layout prices one layout, and --pin searches", hint="one of the two")
    given = cluster.split(",") if cluster is not None else None
    kinds = [_cluster(name.strip()) for name in given or KINDS]
    dtype = precision or _common_precision([found for found, _ in kinds])
    published = _published(os.fspath(model), weights)
    models = _models(os.fspath(model), weights, dtype, quantization)
    names = given or (ASKED if len(models) > 1 else KINDS)
    asked_for = [_cluster(name.strip()) for name in names]
    if price_list is not None:
        asked_for = [(with_prices(found, price_list), bounded) for found, bounded in asked_for]
    clusters = list(
        {(found.name, bounded): (found, bounded) for found, bounded in asked_for}.values()
    )
    if layout is not None and len(clusters) > 1:
        raise OptionError(
            "--layout prices one layout on one kind of GPU", hint=f"--cluster {names[0]}"
        )
    _known_context(os.fspath(model), service, None if requests is None else requests.longest)
    one = None if layout is None else layout if isinstance(layout, Layout) else Layout.parse(layout)
    return tuple(
        _plan(
            shape,
            claim,
            source,
            clusters,
            service=service,
            top=top,
            layout=one,
            pins=pins,
            explain=explain,
            stored=stored_weights(
                shape, dtype=dtype, quantization=quantization, published=published
            ),
            published=published,
            options={
                "cache_precision": cache_precision,
                "engine": engine,
                "usable": gpu_memory_utilization,
                "max_num_seqs": max_num_seqs,
                "trace": requests,
                "expert_imbalance": EXPERT_IMBALANCE
                if expert_imbalance is None
                else expert_imbalance,
            },
            small=len(models) > 1,
        )
        for shape, claim, source in models
    )


def _common_precision(clusters: Sequence[Cluster]) -> str:
    """The first of bf16 and fp16 that all devices compute in; bf16 where there is none."""
    rates = [found.node.gpu.flops for found in clusters]
    return next((n for n in ("bf16", "fp16") if all(n in one for one in rates)), "bf16")


def _plan(
    shape: ModelShape,
    claim: str,
    source: str,
    clusters: Sequence[tuple[Cluster, bool]],
    *,
    service: Service,
    top: int,
    layout: Layout | None,
    pins: dict[str, int],
    explain: bool,
    stored: StoredWeights,
    published: str,
    options: dict[str, Any],
    small: bool,
) -> ServicePlan:
    from hocket.planning.service import plan as planning
    from hocket.planning.service.explain import explain_deployment as sentences
    from hocket.planning.service.explain import winner
    from hocket.planning.service.memory import memory_map
    from hocket.planning.service.need import need_map
    from hocket.planning.service.problem import ServiceProblem

    options = {
        **options, "precision": stored.precision, "expert_precision": stored.expert_precision,
    }  # fmt: skip
    problems = [
        ServiceProblem(shape=shape, cluster=found, service=service, bounded=bounded, **options)
        for found, bounded in clusters
    ]
    several = len(problems) > 1
    kinds: list[KindAnswer] = []
    for problem in problems:
        if layout is not None:
            kinds.append(planning.answer_one(problem, layout, pins.get("max_num_batched_tokens")))
        else:
            kinds.append(planning.answer(problem, top=1 if several else top, pins=pins))
    of = {kind.cluster: problem for kind, problem in zip(kinds, problems, strict=True)}
    kinds.sort(key=planning.cost_key)
    first = kinds[0]
    if first.best is None and not small:
        if several:
            reasons = "; ".join(f"{kind.gpu}: {kind.reason}" for kind in kinds)
            raise LayoutError(f"{shape.name}: none of these meets the goals: {reasons}")
        problem = of[first.cluster]
        others = planning.other_weights(problem, stored, published, pins) if not claim else ()
        raise planning.impossible(problem, first, _would_do(problem, pins), pins, others)
    maps = [kind for kind in kinds if kind.best is not None][: len(kinds) if small else 1]
    chosen = [] if layout is not None or options["trace"] is not None else maps
    rates = tuple(float(f"{service.requests_per_second * x:.3g}") for x in RATES)
    columns = GOALS[:2] if small else GOALS
    goals = (None,) if service.tpot_ms is None else tuple(service.tpot_ms * x for x in columns)
    first_problem = of[first.cluster]
    explanation: tuple[str, ...] = ()
    if explain and first.best is not None:
        explanation = sentences(first_problem, first.best, kinds, pins=pins)
    elif small and first.best is not None:
        explanation = tuple(winner(first_problem, first.best))
    return planning.ServicePlan(
        model=shape.name,
        service=service,
        stored=stored,
        engine=first_problem.engine_name,
        cache_precision=first_problem.cached_in,
        usable=first_problem.usable,
        parameters=shape.num_parameters,
        weight_bytes=first_problem.weights,
        cache_bytes_per_token=first_problem.cache_per_token,
        kinds=tuple(kinds),
        heads=shape.heads,
        layers=len(shape.layers),
        experts=shape.experts,
        request_tokens=first_problem.longest,
        trace_requests=0 if options["trace"] is None else len(options["trace"]),
        claim=claim,
        source=source,
        need=tuple(
            need_map(of[kind.cluster], rates=rates, tpots=goals, pins=pins, known=kind.best)
            for kind in chosen
        ),
        concurrent=CONCURRENT,
        contexts=CONTEXTS,
        memory_map={
            kind.gpu: memory_map(of[kind.cluster].unbounded(), CONCURRENT, CONTEXTS)
            for kind in chosen
        },
        others=()
        if several or claim or layout is not None or options["trace"] is not None
        else planning.other_weights(first_problem, stored, published, pins),
        explanation=explanation,
        notes=_notes([kind.gpu for kind in kinds if kind.best is not None]),
    )


# --- names ---------------------------------------------------------------------------------------


def _models(
    model: str, weights: str | None, dtype: str, quantization: str | None
) -> tuple[tuple[ModelShape, str, str], ...]:
    """(shape, claim, source) of every model that a name can mean."""
    from hocket.cost.serving import WEIGHT_BYTES
    from hocket.planning.service import models
    from hocket.planning.service.stored import QUANTIZATIONS
    from hocket.spec.errors import unknown

    if dtype not in WEIGHT_BYTES:
        message, hint = unknown("precision", dtype, WEIGHT_BYTES)
        raise OptionError(message, hint=hint)
    precision = QUANTIZATIONS.get(quantization or "", ("", ""))[0] or dtype
    if weights is not None:
        size = parse_bytes(weights)
        name = f"{model} as {weights}" if model else f"{weights} of weights"
        shape = models.of_bytes(size, precision=precision, name=name)
        return ((shape, models.claim_of(shape, size, precision), "--weights"),)
    if model.lower() in models.hypothesis_names():
        return tuple(
            (one.shape, one.claim, one.source)
            for one in models.hypotheses(model.lower(), precision=precision)
        )
    from hocket.jobs.planner_problem import model_shape

    try:
        return ((model_shape(model), "", ""),)
    except ModelError as error:
        if error.hint and "gpt-4" not in error.message and model.lower().startswith("gpt4"):
            raise ModelError(error.message, hint="did you mean 'gpt-4'?") from None
        raise


def _published(model: str, weights: str | None) -> str:
    """How the checkpoint's weights are quantized; empty where they are not."""
    from hocket.jobs.planner_problem import published_quantization
    from hocket.planning.service import models

    if weights is not None or model.lower() in models.hypothesis_names():
        return ""
    return published_quantization(model)


def _cluster(text: str) -> tuple[Cluster, bool]:
    """A kind of GPU on whole nodes, or the GPUs that are there, and whether they are all."""
    from hocket.catalogue import hardware
    from hocket.jobs import machine
    from hocket.jobs.probe import present_machine

    if not text:
        raise OptionError("--cluster names no GPU", hint="--cluster A100-40,A100-80,H100")
    auto = text == machine.AUTO
    if auto and present_machine().kind == "cpu":  # asked before anything is measured
        raise _no_cores("this machine has no GPU that torch can use")
    found = machine.named_cluster(text)
    if found.is_cpu:
        raise _no_cores(f"{found.name} is CPU cores")
    if auto or hardware.is_file(text) or re.match(r"\d+x", text):
        return found, True
    node = hardware.node(found.node.name, found.node.gpu)
    count = f"{node.num_gpus}x{node.gpu.name}"
    return hardware.cluster(f"1x{count}@{node.name}"), False


def _no_cores(why: str) -> OptionError:
    return OptionError(f"services are planned for GPUs; {why}", hint="--cluster A100-40,H100")


def _known_context(model: str, service: Service, longest: int | None) -> None:
    """Raises OptionError where a request is longer than the model's positions; `longest`: tokens of
    the longest request of a trace."""
    from hocket.jobs.planner_problem import positions_of

    positions = positions_of(model)
    if positions is not None and longest is not None and longest > positions:
        raise OptionError(
            f"the longest request of the trace has {longest:,} tokens; {model} is made for "
            f"{positions:,} positions",
            hint="a trace without it, or a model made for more positions",
        )
    if positions is not None and service.tokens > positions:
        rest = positions - service.output_len
        raise OptionError(
            f"a prompt of {service.prompt_len:,} and an answer of {service.output_len:,} tokens "
            f"are {service.tokens:,}; {model} is made for {positions:,} positions",
            hint=f"--prompt-len {rest}" if rest > 0 else f"--output-len {positions // 4}",
        )


def _would_do(problem: ServiceProblem, pins: dict[str, int]) -> list[str]:
    """Kinds of GPU that would meet the goals, cheapest first, those without a price last."""
    from hocket.planning.service.search import search_deployments

    found: list[tuple[float, str]] = []
    for name in KINDS:
        if name == problem.gpu.name:
            continue
        other = dataclasses.replace(problem, cluster=_cluster(name)[0], bounded=False)
        (best,) = search_deployments(other, top=1, pins=pins) or (None,)
        if best is not None:
            found.append((best.gpus * (other.gpu.price or math.inf), name))
    return [name for _, name in sorted(found)]


def size_is_public(model: str) -> bool:
    """Whether a name is not one of those that only hypotheses answer."""
    from hocket.catalogue import shapes

    if model in shapes.shape_names():  # planning a training step need not load what prices serving
        return True
    from hocket.planning.service import models

    return model.lower() not in models.hypothesis_names()


def _notes(gpus: Sequence[str]) -> tuple[str, ...]:
    from hocket.cost.serving_constants import gpu_entry

    notes = []
    borrowed = {name: gpu_entry(name) for name in gpus}
    borrowed = {
        n: kind for n, kind in borrowed.items() if kind.partition("-")[0] != n.partition("-")[0]
    }
    if borrowed:
        said = ", ".join(f"{name} is predicted with {of}'s" for name, of in borrowed.items())
        notes.append(f"No measured serving was fitted for these GPUs: {said}.")
    return tuple(notes)
