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
        run: run folder.
        to: directory to write.
        merge: for LoRA runs: write the model with the adapter merged into its weights.
        overwrite: replace an existing model directory.
        trust_remote_code: run Python code that the model directory contains.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = ""
    to: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    merge: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False


def main(arguments: Sequence[str]) -> int:
    """Export. Returns 0."""
    flags = parse(Export, "export", arguments, Export())
    for name, value in (("RUN", flags.run), ("--to DIR", flags.to)):
        if not value:
            raise OptionError(f"{name} is missing", hint="hocket export RUN --to DIR")
    from hocket.jobs.export import export

    made = export(
        flags.run,
        flags.to,
        merge=flags.merge,
        overwrite=flags.overwrite,
        trust_remote_code=flags.trust_remote_code,
    )
    print(f"wrote {made}")
    return 0
