"""`hocket models`: the models that come with hocket, the GPUs that plans know, and what works."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import parse_flags
from hocket.cli.next import show
from hocket.cli.terminal import show_text
from hocket.spec.errors import OptionError

Words = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[check MODEL]")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the models that come with hocket, or the GPUs that --cluster takes.

    `hocket models check MODEL` shows whether a model, by name, directory or Hub id, can be trained
    and served.

    Attributes:
        words: `check` and a model.
        gpus: list GPUs instead, for --cluster 8xNAME.
        json: print one JSON object per model or GPU.
    """

    words: Words = ()
    gpus: bool = False
    json: bool = False


def _check(flags: Models) -> int:
    import json

    from hocket.jobs import models

    match flags.words:
        case ("check", name):
            found = models.model_support(name)
        case _:
            raise OptionError(
                f"unexpected argument {flags.words[0]!r} of hocket models",
                hint=f"hocket models check {flags.words[-1]}",
            )
    print(json.dumps(found) if flags.json else models.checked_text(found))
    if not flags.json and found["checked"] and found["trains"]:
        show(["check", name, "--layout", "tp2" if "tp" in found["trains"] else "dp2"])
    return 0


def main(arguments: Sequence[str]) -> int:
    """List. Returns 0."""
    flags = parse_flags(Models, "models", arguments, Models())
    import json

    from hocket.jobs import models

    if flags.words:
        return _check(flags)
    found = models.known_gpus() if flags.gpus else models.known()
    if flags.json:
        for row in found:
            print(json.dumps(row))
        return 0
    show_text(models.gpu_table(found) if flags.gpus else models.models_table(found))
    name = "H200-SXM-141" if flags.gpus else "H100"
    show(["plan", "llama-3-8b", "--cluster", f"8x{name}", "--global-batch", "64"])
    return 0
