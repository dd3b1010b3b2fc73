"""Cases of the models' tests that run inside ranks."""

from __future__ import annotations

from typing import Any


def tensors(
    context: Any, configs: dict[str, dict[str, Any]], slices: bool = False
) -> dict[str, tuple[str, str]]:
    """The twin's verdict on splitting tensors (with `slices`, sequences too), of many models."""
    from hocket.jobs.twin import try_tensors
    from hocket.models.skeleton import config_of

    return {
        name: try_tensors(
            config_of(config, dropout=0.0),
            "sdpa",
            index=context.rank,
            degree=context.world_size,
            slices=slices,
        )
        for name, config in configs.items()
    }


def said(context: Any, texts: list[str]) -> list[str]:
    """What every rank hears when each says its own text."""
    import torch.distributed as dist

    from hocket.jobs.twin import _said
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder

    size = context.world_size
    axis = Axis("tp", size, context.rank, tuple(range(size)), dist.group.WORLD)
    return _said(texts[context.rank], axis, Recorder(context.rank))
