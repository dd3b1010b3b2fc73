"""The models and the GPUs that can be named without a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def known() -> list[dict[str, Any]]:
    """Every model of the catalogue: its name, a note with the source, type, parameters, layers and
    positions (None where the configuration sets no limit)."""
    from hocket.catalogue import models, shapes

    found = []
    for name in models.names():
        entry, shape = models.entry(name), shapes.shape(name)
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
                "hub_id": entry.hub_id,
                "note": models.note(name),
            }
        )
    return found


def gpus() -> list[dict[str, Any]]:
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


def table(found: Sequence[dict[str, Any]]) -> str:
    """The models of `known` as text."""
    from hocket.reporting.table import table_text
    from hocket.spec.units import format_count

    return table_text(
        ("model", "type", "parameters", "layers", "context", "source"),
        [
            (
                row["name"],
                row["type"],
                format_count(row["parameters"]),
                row["layers"],
                row["positions"] or "any",
                row["hub_id"] or row["note"].partition(":")[0],
            )
            for row in found
        ],
    )


def gpu_table(found: Sequence[dict[str, Any]]) -> str:
    """The GPUs of `gpus` as text."""
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
