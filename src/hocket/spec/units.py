"""Bytes, seconds and counts as a person writes them, and back."""

from __future__ import annotations

import math
import re

from hocket.spec.errors import OptionError

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def format_bytes(count: float) -> str:
    """1234567 -> `1.23 MB` (decimal units)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(count) >= size:
            return (
                f"{count / size:.3g} {unit}"
                if abs(count) < 999.5 * size
                else f"{count / size:.0f} {unit}"
            )
    return f"{count:.0f} B"


def parse_bytes(text: str) -> int:
    """`1.2GB`, `80 GiB`, `4096` -> bytes. Raises OptionError for anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is not None and re.fullmatch(r"[KMGT]i?b", match[2]):
        raise OptionError(f"{text!r} counts bits", hint=f"{match[1]}{match[2][:-1]}B for bytes")
    if match is None or match[2].upper() not in _BYTES:
        raise OptionError(f"{text!r} is not a size in bytes", hint="1.2GB, 512MB or 80GiB")
    return round(float(match[1]) * _BYTES[match[2].upper()])


_RATES = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
          "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8,
          "GiB/s": 2.0**30, "TiB/s": 2.0**40}  # fmt: skip
_OPERATIONS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}


def parse_bandwidth(text: str) -> float:
    """`450 GB/s` (bytes), `400 Gb/s` (bits) -> bytes/s. Raises OptionError without a unit."""
    return _rate(text, _RATES, "a bandwidth", "450 GB/s for bytes, 400 Gb/s for bits")


def parse_flops(text: str) -> float:
    """`989 TFLOP/s` -> operations/s. Raises OptionError without a unit."""
    return _rate(text, _OPERATIONS, "a rate of operations", "989 TFLOP/s")


def _rate(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]+/s)\s*", str(text))
    if match is None or match[2] not in units:
        raise OptionError(f"{text!r} is not {what} with its unit", hint=example)
    try:
        return float(match[1]) * units[match[2]]
    except ValueError:
        raise OptionError(f"{text!r} is not {what}", hint=example) from None


def format_seconds(seconds: float) -> str:
    """0.0123 -> `12.3 ms`; 75 -> `1m15s`; infinity and no number as they are called."""
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds < 999.5e-6:  # what rounds to 1000 is one of the next unit
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def format_count(count: float) -> str:
    """3950000 -> `3.95M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


_TIMES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h` or `1d`.

    Raises:
        OptionError: another text.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) ?(s|m|min|h|d)", text)
    if found is None or not float(found[1]) > 0:
        raise OptionError(
            f"{text[:60]!r} is neither a number of steps nor a time such as 30m, 2h or 90s",
            hint="--save-every 30m",
        )
    return float(found[1]) * _TIMES[found[2]]
