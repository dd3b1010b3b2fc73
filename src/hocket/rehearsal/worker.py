"""Worker: the process that executes ranks. `python -m hocket.rehearsal.worker PARENT`

A task comes as one JSON line on stdin; results leave as JSON lines on stdout, each
`{"rank": ...}`, `{"value": ...}` or `{"error": message, "hint": ...}`. The fake device is loaded
before torch is imported, which is why ranks are executed in processes of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from hocket.rehearsal import device
from hocket.spec.errors import HocketError
from hocket.spec.parent_process import die_with


def main() -> int:
    """Execute tasks until stdin ends. Returns 0, or 1 where the device could not be loaded.

    A task takes up to minutes: the end of the parent is not only seen between two of them.
    """
    die_with(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch or a model prints is no result

    def say(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    try:
        device.load_fake_device()
    except HocketError as error:
        sys.stdin.readline()
        say({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
        say({"done": "load"})
        return 1
    _quiet()
    importlib.import_module("hocket.rehearsal.training")  # while the parent prepares its tasks
    jobs: dict[str, Any] = {}
    for line in sys.stdin:
        task = json.loads(line)
        try:
            _execute(task, jobs, say)
        except HocketError as error:
            say({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
        except Exception:
            say({"error": traceback.format_exc(), "hint": None, "kind": "crash"})
        say({"done": task["task"]})
    return 0


def _execute(task: dict[str, Any], jobs: dict[str, Any], say: Any) -> None:
    if task["task"] == "rank":
        from hocket.rehearsal.training import Rehearsal

        key = json.dumps(task["job"], sort_keys=True)
        if key not in jobs:
            jobs.clear()
            jobs[key] = Rehearsal.of_json(task["job"])
        say({"rank": jobs[key].rank(task["rank"]).to_json()})
    elif task["task"] == "call":
        module, _, name = task["entry"].partition(":")
        say({"value": getattr(importlib.import_module(module), name)(**task["arguments"])})
    else:
        raise AssertionError(task["task"])


def _quiet() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    # Without torch's teardown, which takes a second and which the parent would wait for.
    code = main()
    sys.stderr.flush()
    os._exit(code)
