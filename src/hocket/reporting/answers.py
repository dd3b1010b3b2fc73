"""AnswersBar: how far a batch of prompts is, as one line on a terminal.

    answering ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━   412/640  3,214 tokens/s  0:00:41

It lives in the process that shows it; ranks come from a server that has no display.
"""

from __future__ import annotations

import time
from typing import Self


class AnswersBar:
    """A context that shows `total` prompts being answered on standard error.

    Args:
        total: prompts.
        shown: draw it; None: where standard error is a terminal.
    """

    def __init__(self, total: int, *, shown: bool | None = None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("answering"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal if shown is None else shown),
        )
        self._task = self._progress.add_task("answering", total=total, rate="0")
        self._tokens = 0
        self._began = time.monotonic()

    def add(self, tokens: int, prompts: int = 0) -> None:
        """So many more tokens were answered with, and so many prompts are done."""
        self._tokens += tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = f"{self._tokens / seconds:,.0f}"
        self._progress.update(self._task, advance=prompts, rate=rate)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
