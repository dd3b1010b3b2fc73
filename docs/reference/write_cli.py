"""Writes docs/reference/cli.md from the commands' own help.

    .venv/bin/python docs/reference/write_cli.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")

HEAD = """\
# The command line

Written by `docs/reference/write_cli.py` from the commands' own help; do not edit.

A flag, a key of a `--config` file and a keyword of the library's functions are the same word:
`--global-batch 16`, `global_batch = 16` and `hocket.train(..., global_batch=16)`.

With `--json`, stdout has JSON alone: one object, or one a line for long work. An error is
`{"error": {"message", "hint", "exit_code"}}`, and is printed as text on stderr too.

## Exit codes

"""


def help_of(*arguments: str) -> str:
    """What `hocket ARGUMENTS --help` prints, 100 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "hocket", *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    """The whole page."""
    from hocket.cli.main import EXIT_CODES, VERBS

    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    head = f"{HEAD}| code | meaning |\n|---|---|\n{codes}\n## hocket\n"
    parts = [head, f"```\n{help_of()}\n```\n"]
    parts += [f"## hocket {verb}\n\n```\n{help_of(verb)}\n```\n" for verb in VERBS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
