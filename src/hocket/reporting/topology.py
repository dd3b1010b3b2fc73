"""Topology: what joins each two devices, as a matrix in the terminal and as a drawing (SVG).

           GPU0             GPU1             NUMA  network cards
    GPU0   -                NV12 249 GB/s    0     mlx5_0
    GPU1   NV12 249 GB/s    -                0     mlx5_0

As `nvidia-smi topo -m`, with the rate of each link each way, in bytes per second: as it was
measured, or in brackets what it ought to be.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from hocket.spec.measured import DevicePair, MachineMeasurements
from hocket.spec.units import format_bytes, format_seconds

LEGEND = {
    "NV": "NV#   so many NVLinks, direct or through an NVSwitch",
    "PIX": "PIX   one PCIe switch",
    "PXB": "PXB   several PCIe switches",
    "PHB": "PHB   the host bridge of one CPU",
    "NODE": "NODE  bridges of one NUMA node",
    "SYS": "SYS   between NUMA nodes",
    "MEM": "MEM   the memory of one machine",
}

COLORS = {"NV": "#2a9d5c", "PIX": "#3b78c4", "PXB": "#3b78c4", "MEM": "#3b78c4"}
_PLAIN = "#8a8f98"


def matrix_text(measured: MachineMeasurements) -> str:
    """The matrix, and below it what its words mean. Empty with fewer than two devices."""
    names = labels(measured)
    if len(names) < 2:
        return ""
    gpus = measured.device == "cuda"
    rows = [["", *names, *(("NUMA", "network cards") if gpus else ())]]
    for i, name in enumerate(names):
        row = [name, *(_cell(pair_of(measured, i, j)) for j in range(len(names)))]
        if gpus:
            device = measured.devices[i]
            row += [str(device.numa) if device.numa_known else "?", " ".join(device.nics) or "-"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    used = {pair.path for pair in measured.pairs}
    lines += ["", *(text for key, text in LEGEND.items() if any(u.startswith(key) for u in used))]
    if any(pair.rate and not pair.measured for pair in measured.pairs):
        lines.append("Rates in brackets were not measured.")
    return "\n".join(lines)


def labels(measured: MachineMeasurements) -> list[str]:
    """GPU0, GPU1 ... or core0, core1 ...: whatever was tried two by two."""
    if measured.device == "cuda":
        return [f"GPU{device.index}" for device in measured.devices]
    count = max((pair.second + 1 for pair in measured.pairs), default=0)
    return [f"core{i}" for i in range(count)]


def pair_of(measured: MachineMeasurements, one: int, other: int) -> DevicePair | None:
    """What joins two of them."""
    ends = (min(one, other), max(one, other))
    return next((pair for pair in measured.pairs if (pair.first, pair.second) == ends), None)


def rate_text(pair: DevicePair) -> str:
    """`249 GB/s`, in brackets where it was not measured, or nothing."""
    if not pair.rate:
        return ""
    text = f"{format_bytes(pair.rate)}/s"
    return text if pair.measured else f"({text})"


def _cell(pair: DevicePair | None) -> str:
    return "-" if pair is None else f"{pair.path} {rate_text(pair)}".rstrip()


def svg(measured: MachineMeasurements, width: int = 720) -> str:
    """The devices on a circle, a line between each two: thick where it is fast, dashed where it
    was not measured, each with its figures as a tooltip. Up to 16 devices are distinguished.
    """
    names = labels(measured)
    host = measured.host
    title = f"{host.name}: {_what(measured)}"
    kinds = _kinds(measured)
    circle = 90 if len(names) <= 2 else round(width * 0.5)
    height = 130 + circle + 20 * len(kinds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{_escaped(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="28" font-size="16" fill="#1d2330">{_escaped(title)}</text>',
        f'<text x="20" y="48" fill="#5b6270">{_escaped(_when(measured))}</text>',
    ]
    places = _circle(len(names), width, circle)
    fastest = max((pair.rate for pair in measured.pairs), default=0.0)
    few = len(names) <= 4
    for pair in measured.pairs:
        (x, y), (u, v) = places[pair.first], places[pair.second]
        thick = 1.0 + 5.0 * math.sqrt(pair.rate / fastest) if fastest and pair.rate else 1.0
        color = _color(pair.path)
        dashes = "" if pair.measured else ' stroke-dasharray="5 4"'
        parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{u:.1f}" y2="{v:.1f}" stroke="{color}" '
            f'stroke-width="{thick:.1f}"{dashes}><title>{_escaped(_tooltip(names, pair))}</title>'
            "</line>"
        )
        if few:
            text = f"{pair.path} {rate_text(pair)}".strip()
            parts += [
                f'<text x="{(x + u) / 2:.1f}" y="{(y + v) / 2 - 8:.1f}" text-anchor="middle" '
                'stroke="#ffffff" stroke-width="4" paint-order="stroke" fill="#1d2330">'
                f"{_escaped(text)}</text>"
            ]
    for i, (name, (x, y)) in enumerate(zip(names, places, strict=True)):
        below = f"NUMA {measured.devices[i].numa}" if _numa(measured, i) else ""
        parts += [
            f'<g><title>{_escaped(_device(measured, i))}</title><rect x="{x - 34:.1f}" '
            f'y="{y - 18:.1f}" width="68" height="36" rx="7" fill="#f2f5fa" stroke="#30394a"/>',
            f'<text x="{x:.1f}" y="{y + (0 if below else 5):.1f}" text-anchor="middle" '
            f'fill="#1d2330">{name}</text>',
            f'<text x="{x:.1f}" y="{y + 13:.1f}" text-anchor="middle" font-size="10" '
            f'fill="#5b6270">{_escaped(below)}</text></g>',
        ]
    for i, text in enumerate(kinds):
        y = 110 + circle + 20 * i
        color = _color(text)
        parts += [
            f'<line x1="20" y1="{y - 4}" x2="48" y2="{y - 4}" stroke="{color}" stroke-width="5"/>',
            f'<text x="58" y="{y}" fill="#1d2330">{_escaped(text)}</text>',
        ]
    if not names:
        parts.append(
            '<text x="20" y="90" fill="#1d2330">One device: nothing that joins two.</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _circle(count: int, width: int, circle: int) -> list[tuple[float, float]]:
    middle, across, down = (width / 2, 72 + circle / 2), width / 2 - 70, circle / 2 - 20
    turn = math.pi if count == 2 else -math.pi / 2
    return [
        (
            middle[0] + across * math.cos(turn + 2 * math.pi * i / count),
            middle[1] + down * math.sin(turn + 2 * math.pi * i / count),
        )
        for i in range(count)
    ]


def _kinds(measured: MachineMeasurements) -> list[str]:
    """A line for each kind of path: how many pairs, and their rates."""
    found = []
    for path in dict.fromkeys(pair.path for pair in measured.pairs):
        pairs = [pair for pair in measured.pairs if pair.path == path]
        rates = sorted(pair.rate for pair in pairs if pair.rate)
        words = f"{path}: {len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
        if rates:
            low, high = (f"{format_bytes(rate)}/s" for rate in (rates[0], rates[-1]))
            words += f", {low}" if low == high else f", {low} to {high}"
        known = all(pair.measured for pair in pairs)
        found.append(words + (", measured" if known else ", not measured (dashed)"))
    return found


def _color(path: str) -> str:
    return next((color for key, color in COLORS.items() if path.startswith(key)), _PLAIN)


def _what(measured: MachineMeasurements) -> str:
    if measured.device == "cuda":
        return f"{len(measured.devices)} x {measured.devices[0].name}" if measured.devices else ""
    cores = measured.host.cores
    return f"{cores} core{'s' if cores > 1 else ''} of {measured.host.cpu}"


def _when(measured: MachineMeasurements) -> str:
    form = "quick form" if measured.quick else "full form"
    return f"measured {measured.date}, {form}; rates each way"


def _tooltip(names: Sequence[str], pair: DevicePair) -> str:
    words = [f"{names[pair.first]} - {names[pair.second]}: {pair.path}"]
    if pair.rate:
        words.append(rate_text(pair))
    if pair.latency:
        words.append(format_seconds(pair.latency))
    return ", ".join(words)


def _numa(measured: MachineMeasurements, index: int) -> bool:
    return measured.device == "cuda" and measured.devices[index].numa_known


def _device(measured: MachineMeasurements, index: int) -> str:
    if measured.device != "cuda":
        return measured.host.cpu
    device = measured.devices[index]
    words = [device.name, format_bytes(device.memory), device.bus]
    if device.links_total:
        words.append(f"NVLink {device.nvlink}: {device.links} of {device.links_total} links")
    if device.pcie:
        words.append(f"PCIe {device.pcie} x{device.width}")
    return ", ".join(word for word in words if word)


def _escaped(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "?" for c in text))
