"""The models and the GPUs that can be named without a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def known() -> list[dict[str, Any]]:
    """Every model of the catalogue: its name, a note with the source, type, parameters, layers,
    positions (None where the configuration sets no limit), and the axes under which its type trains
    and serves."""
    from hocket.catalogue import models, shapes
    from hocket.catalogue.families import families

    found = []
    for name in models.model_names():
        entry, shape = models.entry(name), shapes.shape(name)
        support = families().get(entry.config["model_type"])
        found.append(
            {
                "name": name,
                "type": entry.config["model_type"],
                "parameters": shape.num_parameters,
                "layers": len(shape.layers),
                "positions": next(
                    (
                        entry.config[key]
                        for key in ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
                        if entry.config.get(key)
                    ),
                    None,
                ),
                "trains": [] if support is None else list(support.trains),
                "serves": [] if support is None else list(support.serves),
                "hub_id": entry.hub_id,
                "note": models.model_note(name),
            }
        )
    return found


def known_gpus() -> list[dict[str, Any]]:
    """Every GPU of the catalogue: memory in bytes, bandwidth in bytes/s, dense bf16 (or fp16) rate
    in operations/s, NVLink's generation (0 without), dollars per hour (None: no quote was read)."""
    from hocket.catalogue import hardware

    found = []
    for name in hardware.gpu_names():
        gpu = hardware.gpu(name)
        found.append(
            {
                "name": name,
                "memory": gpu.memory,
                "bandwidth": gpu.bandwidth,
                "flops": gpu.flops.get("bf16") or gpu.flops.get("fp16"),
                "nvlink": gpu.nvlink,
                "dollars_per_hour": gpu.price,
            }
        )
    return found


def models_table(found: Sequence[dict[str, Any]]) -> str:
    from hocket.reporting.table import table_text
    from hocket.spec.units import format_count

    return table_text(
        ("model", "type", "parameters", "layers", "context", "trains", "serves", "source"),
        [
            (
                row["name"],
                row["type"],
                format_count(row["parameters"]),
                row["layers"],
                row["positions"] or "any",
                _axes(row["trains"]),
                _axes(row["serves"]),
                row["hub_id"] or row["note"].partition(":")[0],
            )
            for row in found
        ],
    )


def _axes(axes: Sequence[str]) -> str:
    """Axes in a column: those of the mesh."""
    return " ".join(axis for axis in ("dp", "pp", "tp", "cp", "ep") if axis in axes) or "no"


_NAMES = {"zero": "ZeRO", "sequence": "sequence parallelism"}


def model_support(name: str) -> dict[str, Any]:
    """What works for one model: its type, and the axes under which that trains and serves.

    Args:
        name: of the catalogue, a directory, a run folder or of the Hub; only the configuration is
            read.

    Raises:
        ModelError: it is not there, or not a causal language model.
    """
    from hocket.catalogue import models
    from hocket.catalogue.families import families

    if name in models.model_names():
        kind = str(models.entry(name).config["model_type"])
    else:
        from hocket.models.source import resolve_model

        kind = str(resolve_model(name, weights=False).config["model_type"])
    support = families().get(kind)
    return {
        "name": name,
        "type": kind,
        "checked": support is not None,
        **({} if support is None else dataclasses.asdict(support)),
    }


def checked_text(found: dict[str, Any]) -> str:
    """The answer of `model_support` in lines."""
    head = f"{found['name']} is of type {found['type']}"
    if not found["checked"]:
        return f"{head}, which was not checked"
    lines = [f"{head}: a tiny model of it was compared with one process"]
    for verb, why in (("trains", "why"), ("serves", "why_served")):
        axes = ", ".join(_NAMES.get(axis, axis) for axis in found[verb]) or "no"
        reason = f"{'; not otherwise' if found[verb] else ''}: {found[why]}" if found[why] else ""
        lines.append(f"{verb}: {axes}{reason}")
    return "\n".join(lines)


def gpu_table(found: Sequence[dict[str, Any]]) -> str:
    from hocket.reporting.table import table_text

    return table_text(
        ("GPU", "memory GB", "TB/s", "bf16 TFLOP/s", "NVLink", "$/hour"),
        [
            (
                row["name"],
                round(row["memory"] / 1e9),
                f"{row['bandwidth'] / 1e12:.2f}",
                "-" if row["flops"] is None else f"{row['flops'] / 1e12:.0f}",
                row["nvlink"] or "-",
                "-" if row["dollars_per_hour"] is None else f"{row['dollars_per_hour']:.2f}",
            )
            for row in found
        ],
    )
