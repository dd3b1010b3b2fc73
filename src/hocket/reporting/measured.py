"""What was measured, in the terminal: devices, compute, and the links' fits with their error."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.reporting.table import table_text
from hocket.reporting.topology import matrix_text
from hocket.spec.measured import Curve, MachineMeasurements, MeasuredMatmul, MeasuredStream
from hocket.spec.units import format_bytes, format_count, format_seconds


def measured_text(measured: MachineMeasurements) -> str:
    """All of it, a screen or two."""
    parts = [_machine(measured), matrix_text(measured), _compute(measured), _shared(measured)]
    parts += [_links(measured), _notes(measured)]
    return "\n\n".join(part for part in parts if part)


def _machine(measured: MachineMeasurements) -> str:
    host = measured.host
    words = [
        f"{host.cores} core{'s' if host.cores > 1 else ''} of {host.cpu}",
        f"{format_bytes(host.memory)} of memory",
    ]
    if host.limit:
        words.append(f"limited to {host.limit:g} cores' time")
    caches = [format_bytes(size) for size in host.caches if size]
    if caches:
        words.append(f"caches {', '.join(caches)}")
    if host.numa_nodes > 1:
        words.append(f"{host.numa_nodes} NUMA nodes")
    lines = [f"{host.name}: {'; '.join(words)}"]
    if measured.device == "cuda":
        for device in measured.devices:
            said = [device.name, format_bytes(device.memory)]
            if device.links_total:
                to = " to an NVSwitch" if device.switch else ""
                said.append(
                    f"NVLink {device.nvlink}, {device.links} of {device.links_total} links "
                    f"active{to}"
                )
            if device.pcie:
                rate = f"{format_bytes(device.pcie_rate)}/s each way"
                said.append(f"PCIe {device.pcie} x{device.width}, {rate}")
            lines.append(f"GPU{device.index}: {'; '.join(said)}")
    return "\n".join(lines)


def _compute(measured: MachineMeasurements) -> str:
    """The best and the least rate of matmuls, memory by size, overheads."""
    rows: list[tuple[str, str, str]] = []
    for dtype in dict.fromkeys(one.dtype for one in measured.products):
        products = sorted((p for p in measured.products if p.dtype == dtype), key=_rate)
        for what, one in (("slowest", products[0]), ("fastest", products[-1])):
            shape = f"[{one.m}, {one.k}] x [{one.k}, {one.n}] {one.form}"
            rows.append((f"matmuls {dtype}, {what} of {len(products)}", shape, _flops(one)))
    copies = [one for one in measured.streams if one.operation == "copy"]
    for stream in copies:
        rows.append(("memory, copy", f"{format_bytes(stream.bytes / 2)} tensor", _bytes(stream)))
    ways = ([s for s in measured.streams if s.operation == way] for way in ("forward", "backward"))
    for there, back in zip(*ways, strict=False):
        texts = [format_seconds(there.seconds), format_seconds(back.seconds)]
        size = f"{format_bytes(there.bytes)} a call; forward, backward"
        rows.append(("between matmuls", size, ", ".join(texts)))
    for small in measured.dispatch:
        texts = [format_seconds(s) for s in (small.forward, small.recorded, small.backward) if s]
        rows.append(
            (f"small operation, {small.operation}", "plain, recorded, backward", ", ".join(texts))
        )
    for update in measured.updates:
        each = update.seconds / update.elements
        rows.append(
            (
                f"optimizer, {update.name}",
                f"{format_count(update.elements)} in {update.tensors} tensors",
                f"{format_seconds(update.seconds)}, {each * 1e9:.3g} ns each",
            )
        )
    return table_text(("one rank alone", "size", "measured"), rows) if rows else ""


def _shared(measured: MachineMeasurements) -> str:
    if not measured.sharing:
        return ""
    rows = [
        (one.ranks, f"{one.product:.2f}", f"{one.stream:.2f}", f"{one.dispatch:.2f}")
        for one in measured.sharing
    ]
    head = ("ranks at once, times slower", "matmuls", "memory", "small operations")
    return table_text(head, rows)


def _links(measured: MachineMeasurements) -> str:
    """Each curve by its fit: latency of small messages, bandwidth of large ones, the error."""
    if not measured.curves:
        return ""
    rows = [
        (
            curve.backend,
            curve.operation,
            f"{curve.ranks} of {curve.world}",
            _regimes(curve),
            f"{curve.error:.0%}",
            f"{curve.worst:.0%}",
        )
        for curve in measured.curves
    ]
    head = ("backend", "operation", "ranks", "latency + bandwidth, by regime", "error", "worst")
    legend = "error: median and worst, at sizes excluded from the fit"
    return f"{table_text(head, rows)}\n{legend}"


def _regimes(curve: Curve) -> str:
    texts = []
    for number, line in enumerate(curve.lines):
        last = number + 1 == len(curve.lines)
        upto = "above" if last else f"to {format_bytes(line.bytes)}"
        texts.append(f"{upto}: {format_seconds(line.latency)} + {format_bytes(line.rate)}/s")
    return "; ".join(texts)


def _notes(measured: MachineMeasurements) -> str:
    lines = [*_listed("Taken from the catalogue:", measured.catalogue)]
    lines += _listed("Not measured:", measured.unknown)
    return "\n".join(lines)


def _listed(title: str, sentences: Sequence[str]) -> list[str]:
    return [title, *(f"  {one}" for one in sentences)] if sentences else []


def _rate(one: MeasuredMatmul) -> float:
    return one.rate


def _flops(one: MeasuredMatmul) -> str:
    return f"{format_count(one.rate)}FLOP/s".replace("BFLOP", " GFLOP").replace("TFLOP", " TFLOP")


def _bytes(one: MeasuredStream) -> str:
    return f"{format_bytes(one.rate)}/s"
