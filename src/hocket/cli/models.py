"""`hocket models`: the models that come with hocket, and the GPUs that plans know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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

    found = models.gpus() if flags.gpus else models.known()
    if flags.json:
        for row in found:
            print(json.dumps(row))
        return 0
    print(models.gpu_table(found) if flags.gpus else models.table(found))
    name = "H200-SXM-141" if flags.gpus else "H100"
    show(["plan", "llama-3-8b", "--cluster", f"8x{name}", "--global-batch", "64"])
    return 0
