"""The models and the GPUs that can be named without a file."""

from __future__ import annotations

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
