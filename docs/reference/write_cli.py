"""Writes cli.md from the commands' own help, json.md from their events, and glossary.md from the
docstrings of `hocket.spec`.

    .venv/bin/python docs/reference/write_cli.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")
JSON_PAGE = PAGE.with_name("json.md")
GLOSSARY = PAGE.with_name("glossary.md")

HEAD = """\
# The command line

Written by `docs/reference/write_cli.py` from the commands' own help; do not edit.
Here is what `hocket VERB --help all` prints. `hocket VERB --help` prints the most used flags and
the topics of the others, `hocket VERB --help TOPIC` one topic, `hocket VERB --help FLAG` one flag.

A flag, a key of a `--config` file and a keyword of the library's functions are the same word:
`--global-batch 16`, `global_batch = 16` and `hocket.train(..., global_batch=16)`.

With `--json`, stdout has JSON alone: one object, or for long work [events](json.md), one a line. An
error is `{"error": {"message", "hint", "exit_code"}}`, and is printed as text on stderr too.

## Exit codes

"""


def help_of(*arguments: str) -> str:
    """What `hocket ARGUMENTS` prints, 100 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "hocket", *arguments],
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
    parts = [head, f"```\n{help_of('--help')}\n```\n"]
    parts += [f"## hocket {verb}\n\n```\n{help_of(verb, '--help', 'all')}\n```\n" for verb in VERBS]
    return "\n".join(parts)


JSON_HEAD = """\
# JSON output

Written by `docs/reference/write_cli.py` from `hocket.cli.events`; do not edit.

With `--json`, stdout holds JSON alone; progress of verbs without events goes to stderr.

- `train`, `serve`, `check` and `probe` print events: one object a line, each with `schema` (1)
  and `event`; a dry run prints `result` alone. `--quiet` leaves out `phase`, `progress` and
  `note`. A reader ignores events and keys that it does not know; `schema` is raised where one is
  removed or changes its meaning.
- `generate`, `models`, `doctor --list`, `check --matrix` and `rehearse --matrix` print one object
  a line, one per prompt, model, check or cell. Other verbs print one object.
- A command that fails prints the event `error` as the last line, and the same text on stderr.
  `rehearse` prints its report before, if the job was executed and does not complete or fit.

```
hocket train tiny-llama --data CHANGELOG.md --seq-len 64 --global-batch 8 --steps 5 --json --quiet
```

```text
{"schema": 1, "event": "step", "step": 1, "steps": 5, "loss": 5.5, "lr": 0.001, ...}
{"schema": 1, "event": "result", "run": "runs/tiny-llama-1", "steps": 5, "loss": 4.8, ...}
```

| event | what it is, and its keys |
|---|---|
"""


def json_page() -> str:
    """The page of events."""
    from hocket.cli.events import EVENTS

    return JSON_HEAD + "".join(f"| `{name}` | {text} |\n" for name, text in EVENTS.items())


GLOSSARY_HEAD = """\
# Glossary

Written by `docs/reference/write_cli.py` from the docstrings of `hocket.spec`; do not edit.
The last column has names of other tools that hocket's commands take as well.
"""


def terms_of(docstring: str, section: str) -> dict[str, str]:
    """The terms of a section of a docstring (`Attributes:`), with their texts."""
    text = inspect.cleandoc(docstring).partition(f"{section}")[2].partition(":\n")[2]
    found: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        if line.startswith("     "):
            found[[*found][-1]] += f" {line.strip()}"
        else:
            name, _, meaning = line.strip().partition(": ")
            found[name] = meaning
    return found


def glossary() -> str:
    """The page of terms."""
    from hocket import spec
    from hocket.spec.layout import Layout
    from hocket.spec.run import Workload
    from hocket.spec.service import Service
    from hocket.spec.synonyms import SYNONYMS

    parts = [GLOSSARY_HEAD]
    for title, docstring, section in (
        ("Terms", spec.__doc__, "Terms"),
        ("Fields of a layout", Layout.__doc__, "Attributes"),
        ("Sizes of a training step", Workload.__doc__, "Attributes"),
        ("A service", Service.__doc__, "Attributes"),
    ):
        rows = [f"## {title}\n\n| term | meaning | also |\n|---|---|---|"]
        for name, meaning in terms_of(docstring or "", section).items():
            also = ", ".join(f"`{other}`" for other, here in SYNONYMS.items() if here == name)
            term = name if section == "Terms" else f"`{name}`"
            text = meaning.replace("``", "`").replace('`"', "`").replace('"`', "`")
            rows.append(f"| {term} | {text[:1].upper()}{text[1:]} | {also} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    JSON_PAGE.write_text(json_page(), encoding="utf-8")
    GLOSSARY.write_text(glossary(), encoding="utf-8")
    print(f"wrote {PAGE}, {JSON_PAGE} and {GLOSSARY}")
