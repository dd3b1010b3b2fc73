"""The forecast of a server on the machine it runs on, and the layout for `--layout auto`.

    CPU cores    the model's traced shape x what `hocket probe` measured here
    GPUs         the service planner's constants, for this machine's GPUs or a --cluster

No prediction that fails keeps a server from starting: forecast.json then says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hocket.jobs import forecast, forecast_policy, gpu_run, links
from hocket.jobs.serving import request as serve_request
from hocket.jobs.serving.request import PreparedServer
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.layout import Layout, divisors
from hocket.spec.serving import BLOCK_SIZE, num_replicas
from hocket.spec.serving_forecast import Need, ServiceLoad, ServingForecast, ServingMeasured
from hocket.spec.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.launch import Launcher
    from hocket.planning.machine_serving import EngineSizes, Servers
    from hocket.spec.model_shape import ModelShape

TOP = 8
"""Layouts that are shown with the one that runs."""

SHOWN = 64
"""Layouts that are shown with one that was chosen."""


def settle_layout(
    server: PreparedServer, launcher: Launcher, record: JobRecorder
) -> tuple[PreparedServer, ServingForecast]:
    """The server with its layout, and what it is expected to do.

    Raises:
        HocketError: a layout was to be chosen, and none can be.
    """
    forecast_policy.reject_cluster(server.request.cluster, server.request.options)
    if server.request.options.emulate_links is not None:
        server = _with_scaled_links(server, launcher)
    if server.request.auto:
        server, predicted = _chosen(server, launcher, record)
    else:
        predicted = _predicted(server, launcher)
    wanted, longest = server.options.cache_memory, server.options.max_model_len
    assert longest is not None
    if predicted.known and wanted is not None and predicted.cache_tokens < longest:
        least = predicted.cache_bytes * longest
        raise OptionError(
            f"a cache of {wanted} a rank holds {predicted.cache_tokens} tokens "
            f"({format_bytes(predicted.cache_bytes)} each); one request may have "
            f"{server.options.max_model_len}",
            hint=f"--cache-memory {format_bytes(least).replace(' ', '')}, or "
            f"--max-model-len {max(2, predicted.cache_tokens)}",
        )
    if predicted.known and server.request.cluster in (forecast_policy.AUTO, forecast_policy.NONE):
        _require_room(server, predicted)
    if predicted.known and (threads := forecast.unmeasured_threads(server.request.options)):
        predicted = ServingForecast.none(predicted.layout, f"{threads} was not measured here")
    return server, predicted


def _require_room(server: PreparedServer, predicted: ServingForecast) -> None:
    """Refuse what is larger than this machine.

    Raises:
        OptionError: weights, a step and the cache that was asked for are more than a rank's part of
            the machine's memory.
    """
    peak = max(predicted.memory, key=lambda row: row["total"])
    if not predicted.capacity or peak["total"] <= predicted.capacity:
        return
    options, ranks = server.options, server.layout.world_size
    left = predicted.capacity - peak["weights"] - peak["step"]
    each = max(1, peak["cache"] // max(1, predicted.cache_tokens))
    block_size = options.block_size or BLOCK_SIZE
    blocks = left // (each * block_size)
    assert options.max_model_len is not None
    if blocks > 0:
        size = f"--cache-memory {left // 10**6}MB" if left >= 10**6 else f"--cache-memory {left}B"
        hint = size if options.num_blocks is None else f"--num-blocks {blocks}"
        if blocks * block_size < options.max_model_len:
            hint += f" --max-model-len {blocks * block_size}"
    else:
        hint = _smaller(server, peak, predicted.capacity)
    raise OptionError(
        f"the peak rank needs {format_bytes(peak['total'])}: "
        f"{format_bytes(peak['weights'])} weights, {format_bytes(peak['step'])} for a step, "
        f"{format_bytes(peak['cache'])} cache; each of {ranks} rank{'s' if ranks > 1 else ''} "
        f"may use {format_bytes(predicted.capacity)} of this machine",
        hint=hint,
    )


def _smaller(server: PreparedServer, peak: Mapping[str, int], capacity: int) -> str:
    """What makes room for the weights and a step of a rank that may use `capacity` bytes."""
    weights, step, tokens = peak["weights"], peak["step"], server.options.max_num_batched_tokens
    if server.request.workload.dtype == "fp32" and weights // 2 + step < capacity:
        return "--dtype bf16"
    ranks = server.replica.world_size
    if weights + step < capacity * server.layout.world_size // ranks:
        return f"--layout {server.replica.axes_text()}"
    if tokens is not None and (fewer := tokens * (capacity - weights) // (2 * max(1, step))) > 0:
        return f"--max-num-batched-tokens {fewer}"
    return f"hocket plan {server.source.name} --serve --cluster H100"


def bill(server: PreparedServer, predicted: ServingForecast) -> list[str]:
    """What the server takes and is expected to give, in sentences."""
    layout, options = server.layout, server.options
    count = num_replicas(layout)
    replicas = f"{count} replicas of " if count > 1 else ""
    ranks = server.replica.world_size
    lines = [
        f"{server.name} in {layout.axes_text()}: {replicas}{ranks} "
        f"rank{'s' if ranks > 1 else ''}, {server.request.workload.dtype}; a step of up to "
        f"{options.max_num_batched_tokens} tokens, {options.max_num_seqs} requests at once, "
        f"{options.max_model_len} tokens each"
    ]
    if not predicted.known:
        assert server.source.weights is not None
        size = sum(f.stat().st_size for f in server.source.weights.glob("*.safetensors"))
        lines.append(f"memory: {format_bytes(size)} of weights as they are stored")
        lines.append(f"no prediction: {predicted.why}")
        return lines
    peak = max(predicted.memory, key=lambda row: row["total"])
    of = f" of {format_bytes(predicted.capacity)}" if predicted.capacity else ""
    lines.append(
        f"peak memory per rank: {format_bytes(peak['weights'])} weights, "
        f"{format_bytes(peak['step'])} for a step, {format_bytes(peak['cache'])} cache "
        f"({format_count(predicted.cache_tokens)} tokens a replica), "
        f"{format_bytes(peak['total'])} in all{of}"
    )
    alone = next((one.seconds for one in predicted.decode if one.batch == 1), None)
    first = next((o.seconds for o in predicted.prefill if o.tokens == predicted.prompt_len), None)
    if alone is not None and first is not None:
        lines.append(
            f"predicted: prefill of a {predicted.prompt_len}-token prompt in "
            f"{format_seconds(first)}, then "
            f"a token in {format_seconds(alone)}; up to "
            f"{predicted.tokens_per_second * layout.dp:,.0f} tokens/s with many requests"
        )
    return lines


# --- a layout that was given ----------------------------------------------------------------------


def _predicted(server: PreparedServer, launcher: Launcher) -> ServingForecast:
    """The forecast of a layout that was given."""
    from hocket.planning import machine_serving as planning

    layout = str(server.layout)
    if server.request.cluster == forecast_policy.NONE:
        return ServingForecast.none(layout, "--cluster none")
    try:
        found = _servers(server, launcher, server.request.cluster)
        if found is None:
            unknown = server.device == "cuda"
            why = forecast.UNKNOWN_GPU if unknown else forecast.UNMEASURED
            return ServingForecast.none(layout, why)
        servers, others = found
        sizes = sizes_of(server)
        mine = planning.server_forecast(servers, server.layout, sizes)
        layouts = {str(one): one for one in [server.layout, *_legal(server, others)]}
        rows = [one for _, one in planning.evaluate_servers(servers, sizes, layouts.values())]
        return planning.with_servers(
            mine, [one for one in rows if one.layout == mine.layout or one in rows[:TOP]]
        )
    except HocketError as error:
        return ServingForecast.none(layout, error.message)


def _servers(
    server: PreparedServer, launcher: Launcher, cluster: str
) -> tuple[Servers, list[Layout]] | None:
    """The model's servers on this machine, and layouts of it; None: nothing is known of it."""
    from hocket.planning.enumeration import meshes

    spec = server.spec()
    if server.device == "cuda":
        from hocket.planning.gpu_servers import GpuServers

        gpus = gpu_run.gpu_cluster(cluster)
        if gpus is None:
            return None
        shape = gpu_run.planner_shape(spec, launcher)
        dtype = server.request.workload.dtype
        of_weights = server.options.quantization or ("bf16" if dtype == "fp32" else dtype)
        copied = shape.with_copies(server.options.redundant_experts)
        share = server.options.gpu_memory_utilization or GpuServers.usable
        servers = GpuServers(copied, gpus, precision=of_weights, usable=share)
        return servers, list(_over_experts(meshes(shape, gpus.num_gpus), shape))
    measured = forecast.measurements(cluster, server.device)
    if measured is None:
        return None
    from hocket.planning.measured_servers import MeasuredServers

    machine = forecast.run_machine(spec, measured)
    shape = forecast.run_shape(spec, launcher)
    copied = shape.with_copies(server.options.redundant_experts)
    return MeasuredServers(copied, machine), meshes(shape, max(1, measured.host.cores))


def _over_experts(layouts: Iterable[Layout], shape: ModelShape) -> Iterator[Layout]:
    """Layouts, and those whose data ranks have a part of the experts each."""
    for layout in layouts:
        yield layout
        for ep in divisors(layout.dp) if shape.experts else ():
            if ep > 1 and shape.experts % ep == 0:
                yield dataclasses.replace(layout, ep=ep)


def sizes_of(server: PreparedServer) -> EngineSizes:
    """The engine's sizes, as a forecast takes them."""
    from hocket.planning.machine_serving import EngineSizes

    options = server.options
    assert options.max_num_batched_tokens is not None
    assert options.max_num_seqs is not None
    assert options.max_model_len is not None
    return EngineSizes(
        batch_tokens=options.max_num_batched_tokens,
        rows=options.max_num_seqs,
        longest=options.max_model_len,
        block_size=options.block_size or BLOCK_SIZE,
        cache=0 if options.cache_memory is None else int(parse_bytes(options.cache_memory)),
        tokens=(options.num_blocks or 0) * (options.block_size or BLOCK_SIZE),
        dtype=server.request.workload.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def _legal(server: PreparedServer, layouts: list[Layout]) -> list[Layout]:
    found = []
    for layout in layouts:
        try:
            found.append(serve_request.legal_server_layout(server.source, layout, server.device))
        except HocketError:
            continue
    return found


# --- a layout to choose ---------------------------------------------------------------------------


def _chosen(
    server: PreparedServer, launcher: Launcher, record: JobRecorder
) -> tuple[PreparedServer, ServingForecast]:
    from hocket.jobs import machine as machines
    from hocket.planning import machine_serving as planning

    request = server.request
    cluster = forecast_policy.AUTO
    if request.cluster != forecast_policy.NONE:
        cluster = request.cluster
    if threads := forecast.unmeasured_threads(request.options):
        raise forecast_policy.unchosen(threads)
    if server.device != "cuda" and cluster == forecast_policy.AUTO:
        if machines.kept(request.options.device) is None:
            record.note(f"measuring this machine, once: up to {forecast_policy.LONGEST:.0f} s")
        machines.named_cluster(cluster, device=request.options.device)
    record.phase("choosing a layout")
    found = _servers(server, launcher, cluster)
    if found is None:
        raise OptionError(forecast.UNKNOWN_GPU, hint="--layout tp2")
    servers, meshes = found
    layouts = [
        layout
        for layout in meshes
        if all(
            layout.degree(axis) == request.layout.degree(axis)
            for axis in ("dp", "tp", "pp")
            if axis in request.given
        )
    ]
    best = planning.choose_server(servers, sizes_of(server), _legal(server, layouts))
    for line in server_reasons(best):
        record.note(line)
    layout = serve_request.legal_server_layout(
        server.source, Layout.parse(best.layout), server.device
    )
    best = dataclasses.replace(best, alternatives=best.alternatives[:SHOWN])
    return dataclasses.replace(server, layout=layout), best


def server_reasons(predicted: ServingForecast) -> list[str]:
    """What was chosen among what, and why, in sentences."""
    mine = next(one for one in predicted.alternatives if one.chosen)
    lines = [
        f"layout {mine.layout}: up to {mine.tokens_per_second:,.0f} tokens/s; alone a request of "
        f"{predicted.prompt_len} tokens begins after {format_seconds(mine.ttft)} and continues "
        f"with {format_seconds(mine.tpot)} a token"
    ]
    others = [one for one in predicted.alternatives if one.fits and not one.chosen]
    if others:
        near = others[0]
        lines.append(
            f"of {len(predicted.alternatives)} layouts the next is {near.layout}: "
            f"{near.tokens_per_second:,.0f} tokens/s"
        )
        quick = min((mine, *others), key=lambda one: one.tpot)
        if quick.layout != mine.layout and quick.tpot < 0.9 * mine.tpot:
            lines.append(
                f"for one request at a time {quick.layout} is faster: "
                f"{format_seconds(quick.tpot)} a token"
            )
    return lines


def _with_scaled_links(server: PreparedServer, launcher: Launcher) -> PreparedServer:
    """The server with its links as slow as this machine's ranks make them feel."""
    links.checked_links(server.request.options, server.layout)
    spec = links.settled(launcher, server.spec(replica=True))
    options = dataclasses.replace(server.request.options, emulate_links=spec.options.emulate_links)
    return dataclasses.replace(server, request=dataclasses.replace(server.request, options=options))


# --- after it has run -----------------------------------------------------------------------------


def load_curve(
    predicted: ServingForecast | None, measured: ServingMeasured, sizes: dict[str, Any]
) -> tuple[tuple[ServiceLoad, ...], tuple[Need, ...]]:
    """One replica under load and the replicas for a load, from the steps that were measured.

    Empty where too few were.

    Args:
        sizes: `max_num_batched_tokens` and `max_num_seqs` of the engine.
    """
    from hocket.planning.machine_serving import EngineSizes, MeasuredSteps, under_load, usual
    from hocket.spec.service import Service

    decode = [row for one in measured.replicas for row in one.decode]
    prefill = [row for one in measured.replicas for row in one.prefill]
    tokens = min((one.cache_tokens for one in measured.replicas), default=0)
    if not decode or not tokens:
        return (), ()
    longest = int(sizes["max_model_len"])
    service = usual(longest)
    if predicted is not None and predicted.known:
        service = Service(
            prompt_len=predicted.prompt_len,
            output_len=predicted.output_len,
            ttft_ms=predicted.ttft_ms,
            tpot_ms=predicted.tpot_ms,
            percentile=predicted.percentile,
        )
    engine = EngineSizes(
        batch_tokens=int(sizes["max_num_batched_tokens"]),
        rows=int(sizes["max_num_seqs"]),
        longest=longest,
    )
    loads, needs, _ = under_load(MeasuredSteps(decode, prefill), engine, service, tokens)
    return loads, needs
