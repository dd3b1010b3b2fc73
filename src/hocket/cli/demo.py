"""`hocket demo`: the main job, end to end, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Count, LayoutFlags, Run, explicit, flag_values, parse_flags
from hocket.cli.terminal import show_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small Llama on the text of this machine's own Python, on two ranks.

    Then draw one step rank by time, compare its collectives with theory, compare
    memory with one process, export the model and generate text with it.

    Attributes:
        full: eight ranks (dp2.pp2.tp2), 300 steps and more text: minutes instead of seconds.
        parallel: Degrees of parallelism and schedule (default: pp2, 1f1b, 4 microbatches)
        steps: optimizer steps (default: 60).
        seq_len: tokens per sequence (default: 64).
        global_batch: sequences per step (default: 16).
        vocab_size: vocabulary size of the tokenizer that is trained first (default: 512).
        run: run folder (default: a new folder under runs/).
        seed: seed of weights, data order and sampling.
    """

    full: bool = False
    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    steps: Count = None
    seq_len: Count = None
    global_batch: Count = None
    vocab_size: Count = None
    run: Run = None
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1


def main(arguments: Sequence[str]) -> int:
    """Run it. Returns 0 where every collective was as theory says, else 1."""
    began = time.monotonic()
    flags = parse_flags(Demo, "demo", arguments, Demo())
    said = flag_values(flags, also=explicit(arguments))
    from hocket.cli.progress import Event, progress
    from hocket.cli.summary import next_steps
    from hocket.cli.terminal import terminal
    from hocket.jobs.demo import demo, demo_options

    full = bool(said.pop("full", False))
    wanted = demo_options(said, full=full)
    color, width = terminal()
    header = (
        f"hocket demo: {wanted.layout.axes_text()}, {wanted.layout.world_size} ranks\n"
        f"{wanted.options.steps} steps of {wanted.workload.global_batch} sequences of "
        f"{wanted.workload.seq_len} tokens of the Python standard library's own text\n"
    )
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(progress())

        def on_event(event: Event) -> None:
            nonlocal header
            if header:  # with the first event: a command that is rejected prints its error alone
                print(header, flush=True)
                header = ""
            listener(event)

        def show(text: str) -> None:
            stack.close()  # the bar is done: what follows is printed below it
            show_text(f"\n{text}")

        outcome = demo(wanted, full=full, on_event=on_event, show=show, width=width, color=color)
    print("\n" + "\n".join(next_steps(outcome.summary)))
    print(f"\n{time.monotonic() - began:.0f} s in all")
    return 0 if outcome.equal else 1
