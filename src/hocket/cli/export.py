"""`hocket export`: a run's model as an ordinary Hugging Face directory, here or on the Hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import parse_flags
from hocket.cli.next import show
from hocket.spec.errors import OptionError
from hocket.spec.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's model as a directory that AutoModelForCausalLM.from_pretrained loads.

    For a run with LoRA, this is the adapter, which PeftModel.from_pretrained loads.

    Attributes:
        run: run folder.
        to: directory to write; required without --push-to-hub.
        push_to_hub: upload the directory to ORG/NAME on the Hugging Face Hub, with a model card of
            the run. A missing repository is created, public unless the organization defaults to
            private.
        private: create that repository as private.
        merge: for LoRA runs: write the model with the adapter merged into its weights.
        overwrite: replace an existing model directory.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = ""
    to: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    push_to_hub: Annotated[str | None, tyro.conf.arg(metavar="ORG/NAME")] = None
    private: bool = False
    merge: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False


def main(arguments: Sequence[str]) -> int:
    """Export. Returns 0."""
    flags = parse_flags(Export, "export", arguments, Export())
    where = flags.to or flags.push_to_hub
    for name, value in (("RUN", flags.run), ("--to DIR", where)):
        if not value:
            raise OptionError(
                f"{name} is missing", hint=f"hocket export {flags.run or 'RUN'} --to DIR"
            )
    if flags.private and flags.push_to_hub is None:
        raise OptionError(
            "--private is of a repository on the Hub, and none is named",
            hint="--push-to-hub ORG/NAME --private",
        )
    from hocket.jobs.export import export_run, push_run

    if flags.push_to_hub is not None:
        pushed = push_run(
            flags.run,
            flags.push_to_hub,
            to=flags.to or None,
            merge=flags.merge,
            overwrite=flags.overwrite,
            private=flags.private,
            trust_remote_code=flags.trust_remote_code,
        )
        print(f"pushed {format_bytes(pushed.num_bytes)} to {pushed.page}")
        return 0

    made = export_run(
        flags.run,
        flags.to,
        merge=flags.merge,
        overwrite=flags.overwrite,
        trust_remote_code=flags.trust_remote_code,
    )
    print(f"wrote {made}")
    if not (made / "adapter_config.json").exists():
        show(["serve", str(made)], ["generate", str(made), "--prompt", "Once upon a time"])
    return 0
