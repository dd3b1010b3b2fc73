"""`hocket doctor`: check this machine's environment, or write its GPU report card."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from hocket.cli import capabilities
from hocket.cli.flags import Folder, parse_flags
from hocket.cli.progress import silent
from hocket.spec.doctor import CANNOT

if TYPE_CHECKING:
    from hocket.spec.doctor import CardLine

Ids = Annotated[tuple[str, ...], tyro.conf.arg(metavar="ID...")]
Groups = Annotated[tuple[str, ...], tyro.conf.arg(metavar="GROUP...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check the environment: driver, libraries, links, clocks, shared memory and limits.

    With --gpu: the whole report card. Kernels are compared with references, tiny models of a dozen
    families with one CPU process, training, prefill and decode with the GPU's peaks, and
    predictions with measurements. Each line is pass, fail or cannot (with the reason), and prints
    the command that repeats it alone. Without a GPU, checks are rehearsed on the CPU and on fake
    CUDA tensors. Exits 1 if a check fails.

    Attributes:
        gpu: execute every check, and write report-card.json and report-card.html.
        only: execute only these checks.
        group: execute only these groups: environment, kernels, equality, speed, memory, checkpoint,
            faults, prediction, multi-gpu.
        out: folder of the two files (default with --gpu and all checks: hocket-doctor).
        minutes: time limit on GPUs; checks beyond it are reported as cannot (default: 10 on one
            GPU, 40 on several).
        list: list the checks, with the seconds that each takes on a GPU.
        json: print the report card as one JSON object; with --list one per check.
    """

    gpu: bool = False
    only: Ids = ()
    group: Groups = ()
    out: Folder = None
    minutes: float | None = None
    list: bool = False
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Check. Returns 1 if a check failed, else 0."""
    flags = parse_flags(Doctor, "doctor", arguments, Doctor())
    from hocket.doctor import job

    checks = job.chosen_checks(gpu=flags.gpu, only=flags.only, groups=flags.group)
    if flags.list:
        for row in job.check_rows(checks) if flags.json else ():
            print(json.dumps(row))
        if not flags.json:
            print(job.listing(checks))
        return 0
    plain = not (flags.json or flags.gpu or flags.only or flags.group)
    waiting: list[str] = []
    if plain and not silent():
        print("\n".join(capabilities.capability_lines()), flush=True)
    folder = job.card_folder(flags.out, whole=flags.gpu and not flags.only and not flags.group)
    before: CardLine | None = None

    def tell(line: CardLine) -> None:
        nonlocal before
        if plain and line.status == CANNOT and line.reason.startswith("needs "):
            waiting.append(line.id)
            return
        if not flags.json:
            print(job.progress_text(line, before, checks), flush=True)
        before = line

    card = job.doctor(checks, minutes=flags.minutes, on_line=tell)
    if waiting:
        text = f"  need GPUs that are not here: {', '.join(waiting)}"
        print(textwrap.fill(text, 100, break_on_hyphens=False, subsequent_indent="    "))
    print(card.to_json() if flags.json else f"\n{job.card_summary(card)}")
    if folder is not None:
        files = job.write_card(card, folder)
        print(f"wrote {files[0]} and {files[1]}", file=sys.stderr if flags.json else sys.stdout)
    return 0 if card.ok else 1
