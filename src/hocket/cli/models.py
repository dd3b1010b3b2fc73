"""`hocket models`: the models that come with hocket, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hocket.cli.flags import parse
from hocket.cli.next import show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the models that come with hocket.

    Attributes:
        json: print one JSON object per model.
    """

    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """List. Returns 0."""
    flags = parse(Models, "models", arguments, Models())
    import json

    from hocket.jobs.models import known

    found = known()
    width = max(len(name) for name, _ in found)
    for name, note in found:
        print(
            json.dumps({"name": name, "note": note}) if flags.json else f"{name:<{width}}  {note}"
        )
    if not flags.json:
        show(["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "64"])
    return 0
