"""`hocket chaos`: faults injected into training jobs, and what became of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Model, parse_flags
from hocket.cli.terminal import show_text

Kinds = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chaos:
    """Inject faults into training jobs on CPU ranks, and compare the end with an undisturbed run.

    For each fault: what detected it and after how many seconds, whether the rank at fault was
    named, the seconds to recover and the steps lost. Exits 1 if a fault was not survived, or a
    result differs in any bit.

    Attributes:
        model: Hugging Face directory, a name that `hocket models` lists, or ORG/NAME[@REVISION] on
            the Hugging Face Hub; of at most 50 million parameters.
        layout: layout of the jobs, as in dp2 or dp2.pp2.tp2.
        seed: seed of the faults and their moments.
        faults: number of faults.
        kinds: only these kinds: kill, stop, stuck, exception, cut, full, torn, checkpoint, weights,
            tokens, file, nan, slow, term (default: all that the layout allows).
        json: print one JSON object.
    """

    model: Model = "tiny-llama"
    layout: str = "dp2"
    seed: int = 0
    faults: int = 20
    kinds: Kinds = ()
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run. Returns 0 where every fault was survived and every end is equal, else 1."""
    flags = parse_flags(Chaos, "chaos", arguments, Chaos())
    import json

    from hocket.jobs.chaos.result import FaultResult, fault_table
    from hocket.jobs.chaos.run import chaos

    def show(fault: FaultResult) -> None:
        if not flags.json:
            print(fault, flush=True)

    found = chaos(
        flags.model,
        layout=flags.layout,
        seed=flags.seed,
        faults=flags.faults,
        kinds=[name for text in flags.kinds for name in text.split(",") if name],
        on_fault=show,
    )
    if flags.json:
        print(json.dumps(found.to_json()))
        return 0 if found.ok else 1
    show_text("\n" + "\n".join(fault_table(found.faults)))
    ends = f"{sum(found.jobs_equal)} of {len(found.jobs_equal)} jobs end as the undisturbed run"
    print(f"\n{found.survived} of {len(found.faults)} faults survived; {ends}, bit for bit")
    return 0 if found.ok else 1
