"""`hocket export`: a run's model as an ordinary Hugging Face directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import parse
from hocket.spec.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's model as a directory that AutoModelForCausalLM.from_pretrained loads.

    Of a run with LoRA it is the adapter, as PeftModel.from_pretrained loads it.

    Attributes:
        run: the run folder.
        to: the directory to make.
        merge: of a run with LoRA: the model with the adapter added to its weights.
        overwrite: replace the model that the directory holds.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = ""
    to: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    merge: bool = False
    overwrite: bool = False


def main(arguments: Sequence[str]) -> int:
    """Export. Returns 0."""
    flags = parse(Export, "export", arguments, Export())
    for name, value in (("RUN", flags.run), ("--to DIR", flags.to)):
        if not value:
            raise OptionError(f"{name} is missing", hint="hocket export RUN --to DIR")
    from hocket.jobs.export import export

    made = export(flags.run, flags.to, merge=flags.merge, overwrite=flags.overwrite)
    print(f"wrote {made}")
    return 0
