"""`hocket models`: the models that come with hocket, and the GPUs that plans know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hocket.cli.flags import parse
from hocket.cli.next import show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the models that come with hocket, or the GPUs that --cluster takes.

    Attributes:
        gpus: list GPUs instead, for --cluster 8xNAME.
        json: print one JSON object per model or GPU.
    """

    gpus: bool = False
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """List. Returns 0."""
    flags = parse(Models, "models", arguments, Models())
    import json

    from hocket.jobs import models
    from hocket.reporting.table import table_text

    found = models.gpus() if flags.gpus else models.known()
    if flags.json:
        for row in found:
            print(json.dumps(row))
        return 0
    print(table_text(*(_gpus(found) if flags.gpus else _models(found))))
    name = "H200-SXM-141" if flags.gpus else "H100"
    show(["plan", "llama-3-8b", "--cluster", f"8x{name}", "--global-batch", "64"])
    return 0


def _models(found: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    from hocket.spec.units import format_count

    return ("model", "type", "parameters", "layers", "context", "source"), [
        (
            row["name"],
            row["type"],
            format_count(row["parameters"]),
            row["layers"],
            row["positions"] or "any",
            row["hub_id"] or row["note"].partition(":")[0],
        )
        for row in found
    ]


def _gpus(found: Sequence[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    return ("GPU", "memory GB", "TB/s", "bf16 TFLOP/s", "NVLink", "$/hour"), [
        (
            row["name"],
            round(row["memory"] / 1e9),
            f"{row['bandwidth'] / 1e12:.2f}",
            "-" if row["flops"] is None else f"{row['flops'] / 1e12:.0f}",
            row["nvlink"] or "-",
            "-" if row["dollars_per_hour"] is None else f"{row['dollars_per_hour']:.2f}",
        )
        for row in found
    ]
