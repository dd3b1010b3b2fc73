"""What `hocket plan --serve` prints: the answer and how it comes about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hocket.jobs.serving.deployment import served_here
from hocket.spec.service import Service
from hocket.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hocket.planning.forecast import Range
    from hocket.planning.service.forecast import ServiceForecast
    from hocket.planning.service.need import NeedMap
    from hocket.planning.service.plan import KindAnswer, ServicePlan


def plans_text(plans: Sequence[ServicePlan]) -> str:
    if len(plans) == 1:
        return "\n".join(_single(plans[0]))
    name = plans[0].model.partition(" as ")[0]
    lines = [
        f"The size of {name} is not public: each hypothesis about it has its own plan below.",
        _asked(plans[0].service),
        "",
    ]
    for plan in plans:
        lines += [*_hypothesis(plan), ""]
    lines += [
        *_legend(plans[0]),
        _emit_line(plans[0]),
        "hold n: GPUs for the weights and n requests at once; in brackets by their memory alone.",
        "The last columns: GPUs by requests/s and TPOT.",
    ]
    return "\n".join(lines)


def to_json(plans: Sequence[ServicePlan]) -> dict[str, Any]:
    """One object: the plan, or the hypotheses with a plan each."""
    if len(plans) == 1:
        return plans[0].to_json()
    name = plans[0].model.partition(" as ")[0]
    return {"model": name, "hypotheses": [plan.to_json() for plan in plans]}


# --- one model -----------------------------------------------------------------------------------


def _single(plan: ServicePlan) -> Iterator[str]:
    from hocket.planning.service.pools import pools_sentence

    yield f"{plan.model}, {plan.stored.title}: {_model(plan)}"
    if plan.claim:
        yield f"Assumed: {plan.claim}."
    yield _asked(plan.service, plan.trace_requests)
    yield ""
    answered = [kind for kind in plan.kinds if kind.best is not None]
    if len(plan.kinds) > 1:
        bests = [kind.best for kind in answered if kind.best is not None]
        labels = [
            f"{kind.gpu}: {one.num_gpus} as {one.title}; {_holds(kind)} hold it"
            for kind, one in zip(answered, bests, strict=True)
        ]
        yield from _rows(_HEADERS, labels, [_row(one, plan) for one in bests])
        yield from (f"{kind.gpu}: {kind.reason}." for kind in plan.kinds if kind.reason)
    else:
        (kind,) = plan.kinds
        yield from _memory(kind, plan)
        yield ""
        labels = [
            f"{one.title}  {one.num_gpus} GPU" + "s" * (one.num_gpus > 1)
            for one in kind.deployments
        ]
        yield from _rows(_HEADERS, labels, [_row(one, plan) for one in kind.deployments])
        missed = [one for one in kind.deployments if one.misses]
        yield from (f"! {one.layout}: {', '.join(one.misses)}" for one in missed)
        if kind.pools is not None and kind.best and kind.pools.num_gpus < kind.best.num_gpus:
            yield from ("", pools_sentence(kind.pools, plan.service.percentile))
    yield ""
    if plan.best is not None and plan.best.ttft is not None:
        yield _percentiles(plan.best)
        yield from _unsure(plan.best, plan.service)
    yield from _legend(plan)
    yield _emit_line(plan)
    yield from _others(plan)
    for need in plan.need:
        yield ""
        yield from _need(need, plan.service)
        if need.gpu in plan.memory_map:
            yield ""
            yield from _memory_map(plan, need.gpu)
    if plan.notes:
        yield ""
        yield from plan.notes
    if plan.explanation:
        yield ""
        yield from plan.explanation


_HEADERS = ("batch", "TTFT", "TPOT", "load", "tokens/s", "$/h", "$/M tokens")

INDENT = "    "


def _unsure(one: ServiceForecast, service: Service) -> Iterator[str]:
    """Goals that are met as expected, and missed at the far end of the range."""
    for name, goal, values in (
        ("TTFT", service.ttft_ms, one.ttft_range),
        ("TPOT", service.tpot_ms, one.tpot_range),
    ):
        if (
            goal is not None
            and values is not None
            and values.median * 1e3 <= goal < values.high * 1e3
        ):
            yield (
                f"Its {name} meets the goal as expected, and would miss it at the far end of its "
                "range; --explain shows a deployment that meets it."
            )


def _rows(
    headers: Sequence[str], labels: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Two lines for each: what it is, and below it what it gives."""
    from hocket.reporting.table import table_text

    head, rule, *numbers = table_text(headers, rows).splitlines()
    yield INDENT + head
    yield INDENT + rule
    for label, below in zip(labels, numbers, strict=True):
        yield label
        yield INDENT + below


def _row(one: ServiceForecast, plan: ServicePlan) -> tuple[str, ...]:
    at = plan.service.percentile
    if one.ttft is None or one.tpot is None:
        latency = ("-", "-")
    else:
        latency = (
            _with_range(one.ttft.at(at), one.ttft_range),
            _with_range(one.tpot.at(at), one.tpot_range),
        )
    cost, hourly = one.dollars_per_million_output_tokens, one.dollars_per_hour
    full = one.full_dollars_per_million_output_tokens
    return (
        f"{one.batch:.0f} of {one.max_sequences}",
        *latency,
        f"{one.load:.0%}" + ("" if one.meets else " !"),
        f"{format_count(one.output_tokens_per_second)} of {_count_range(one)}",
        "unknown" if hourly is None else f"{hourly:,.2f}",
        "unknown" if cost is None or full is None else f"{cost:,.2f} ({full:,.2f} full)",
    )


def _percentiles(one: ServiceForecast) -> str:
    """Every latency at its 50th, 90th and 99th percentile."""
    assert one.ttft is not None
    assert one.tpot is not None
    assert one.end_to_end is not None
    percentiles = ", ".join(
        f"{name} {' / '.join(format_seconds(x) for x in (values.p50, values.p90, values.p99))}"
        for name, values in (("TTFT", one.ttft), ("TPOT", one.tpot), ("answer", one.end_to_end))
    )
    rates = one.request_tokens_per_second
    speed = (
        ""
        if rates is None
        else (
            "; tokens/s within an answer, reached by as many: "
            f"{rates.p50:.3g} / {rates.p90:.3g} / {rates.p99:.3g}"
        )
    )
    return f"{one.title} on {one.gpu}, 50th / 90th / 99th percentile: {percentiles}{speed}."


def _holds(kind: KindAnswer) -> str:
    memory = kind.memory
    return f"{memory.gpus or '-'} ({memory.pool})"


def _memory(kind: KindAnswer, plan: ServicePlan) -> Iterator[str]:
    memory = kind.memory
    request = (
        f"{format_bytes(memory.weight_bytes)} of weights and {format_bytes(memory.cache_bytes)} "
        f"for a request of {plan.service.tokens:,} tokens"
    )
    pool = f"{_gpus(memory.pool, kind.gpu)} by their memory alone"
    if not memory.gpus:
        yield f"Memory: {request}: {pool}."
        return
    yield (
        f"Memory: {request}: {_gpus(memory.gpus, kind.gpu)} as pp{memory.pp}.tp{memory.tp}, with "
        f"capacity for {memory.requests:,} at once ({pool})."
    )


def _need(need: NeedMap, service: Service) -> Iterator[str]:
    from hocket.reporting.table import table_text

    first = "" if service.ttft_ms is None else f", first token within {service.ttft_ms:g} ms"
    yield f"{need.gpu} needed, by requests/s and TPOT{first}:"
    goals = ["any" if goal is None else f"{goal:g} ms" for goal in need.tpots]
    rows = [
        (f"{rate:g}", *(_cell(gpus, layout) for gpus, layout in zip(*both, strict=True)))
        for rate, *both in zip(need.rates, need.gpus, need.layouts, strict=True)
    ]
    yield table_text(("requests/s", *goals), rows)


def _emit_line(plan: ServicePlan) -> str:
    """How the first deployment is run."""
    tools = "hocket, vllm or sglang" if served_here(plan) else "vllm or sglang"
    return f"--emit {tools} prints the command of the first deployment."


def _others(plan: ServicePlan) -> Iterator[str]:
    """The cheapest deployments with weights that are stored otherwise."""
    from hocket.reporting.table import table_text

    if not plan.others:
        return
    yield ""
    yield (
        "Weights stored otherwise (--quantization); fewer bits change the answers, so measure them:"
    )
    rows = []
    for one in plan.others:
        best = one.best
        cells: tuple[str, ...] = ("-", "none meets the goals", "-", "-", "-")
        if best is not None:
            cells = (
                str(best.num_gpus),
                str(best.layout),
                *(_row(best, plan)[i] for i in (2, 4, 6)),
            )
        rows.append((one.stored.quantization, format_bytes(one.weight_bytes), *cells))
    yield table_text(("weights", "bytes", "GPUs", "layout", "TPOT", "tokens/s", "$/M tokens"), rows)


def _memory_map(plan: ServicePlan, gpu: str) -> Iterator[str]:
    from hocket.reporting.table import table_text

    yield f"{gpu} needed to hold requests at once, by tokens of each, at any latency:"
    rows = [
        (f"{count}", *("-" if n is None else f"{n}" for n in row))
        for count, row in zip(plan.concurrent, plan.memory_map[gpu], strict=True)
    ]
    yield table_text(("at once", *(f"{context:,}" for context in plan.contexts)), rows)


# --- a model of unknown size ---------------------------------------------------------------------


def _hypothesis(plan: ServicePlan) -> Iterator[str]:
    yield f"HYPOTHESIS {plan.model}: {plan.claim}."
    yield f"  source: {plan.source}."
    yield f"  {_model(plan)}."
    need = {one.gpu: one for one in plan.need}
    answered = [kind for kind in plan.kinds if kind.best is not None]
    labels, rows = [], []
    for kind in answered:
        best = kind.best
        assert best is not None
        cost = best.dollars_per_million_output_tokens
        dollars = "price unknown" if cost is None else f"${cost:,.2f} a million output tokens"
        labels.append(f"{kind.gpu}: {best.num_gpus} as {best.layout}, {dollars}")
        cells = ["-" if n is None else f"{n}" for row in need[kind.gpu].gpus for n in row]
        rows.append((*(f"{held.split or '-'} ({held.pool})" for held in kind.held), *cells))
    if answered:
        first = need[answered[0].gpu]
        columns = [
            f"{rate:g}/s" + ("" if goal is None else f" {goal:g} ms")
            for rate in first.rates
            for goal in first.tpots
        ]
        holds = [f"hold {held.requests}" for held in answered[0].held]
        yield from _rows((*holds, *columns), labels, rows)
    for kind in plan.kinds:
        if kind.reason:
            yield f"{kind.gpu}: holds it {_holds(kind)}; {kind.reason}."
    memory = plan.kinds[0].memory
    yield (
        f"  memory: {format_bytes(memory.weight_bytes)} and {format_bytes(memory.cache_bytes)} for "
        f"each request of {plan.service.tokens:,} tokens, in {plan.usable:.0%} of each GPU's."
    )
    if plan.explanation:
        best = plan.best
        yield f"  service{'' if best is None else f' on {best.gpu}'}:"
        yield from (f"  {sentence}" for sentence in plan.explanation)
    yield from (f"  {note}" for note in plan.notes)


# --- words ---------------------------------------------------------------------------------------


def _asked(service: Service, trace: int = 0) -> str:
    goals = [
        f"{name} {goal:g} ms"
        for name, goal in (("TTFT", service.ttft_ms), ("TPOT", service.tpot_ms))
        if goal is not None
    ]
    within = f"; {service.percentile}% of them within {' and '.join(goals)}" if goals else ""
    cached = service.prefix_cache_hit_rate
    known = f" ({cached:.0%} of them in the cache)" if cached else ""
    mean = " on average" if trace else ""
    rate = f"{service.requests_per_second:{'.3g' if trace else 'g'}}"
    first = f"{trace:,} requests of a trace, " if trace else ""
    return (
        f"{first}{rate} request{'' if rate == '1' else 's'}/s of {service.prompt_len:,} tokens"
        f"{known}, answers of {service.output_len:,}{mean}{within}"
    )


def _model(plan: ServicePlan) -> str:
    weights, cache = format_bytes(plan.weight_bytes), format_bytes(plan.cache_bytes_per_token)
    count = format_count(plan.parameters)
    return f"{count} parameters, {weights} of weights, {cache} of cache a token"


def _legend(plan: ServicePlan) -> Iterator[str]:
    best = plan.best
    at = plan.service.percentile
    yield (
        f"TTFT and TPOT are the {at}th percentile of "
        + (
            "the trace's requests."
            if plan.trace_requests
            else "requests simulated as a Poisson stream."
        )
        + (
            " Ranges: the 10th to the 90th percentile of measured over predicted."
            if best is not None and best.tpot_range is not None
            else ""
        )
    )
    yield (
        "batch: sequences that decode together on a replica, of those that fit; load: of the rate "
        f"at which it saturates. Predicted for {plan.engine}, in {plan.usable:.0%} of each GPU's "
        "memory."
    )
    if len(plan.kinds) > 1 and not plan.claim:
        yield (
            "hold it: GPUs for weights and one request in a legal split; in brackets by the sum of "
            "their memory."
        )
    for kind in plan.kinds:
        if kind.best is None:
            continue
        if kind.best.price is None:
            yield f"dollars: no price for {kind.gpu}: {kind.best.price_source}."
            continue
        what = "; a million output tokens at this load, and where the GPUs are full"
        yield (
            f"dollars: {kind.gpu} at {kind.best.price:g} an hour, {kind.best.price_source}"
            f"{what if kind.best is best else ''}."
        )


def _with_range(seconds: float, values: Range | None) -> str:
    """`22.9 ms (19-28)`: the range in the unit of the value."""
    text = format_seconds(seconds)
    if values is None or seconds <= 0:
        return text
    unit = {"ms": 1e-3, "us": 1e-6, "s": 1.0}.get(text.rpartition(" ")[2])
    if unit is None:
        return text
    return f"{text} ({_short(values.low / unit)}-{_short(values.high / unit)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _count_range(one: ServiceForecast) -> str:
    text = format_count(one.most_output_tokens_per_second)
    values = one.most_range
    if values is None:
        return text
    unit = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}.get(text[-1], 1.0)
    return f"{text} ({_short(values.low / unit)}-{_short(values.high / unit)})"


def _cell(gpus: int | None, layout: str | None) -> str:
    return "-" if gpus is None else f"{gpus} {layout}"


def _gpus(count: int, name: str) -> str:
    return f"{count} {name}"
