"""A parent of its own for the tests of signals: `python -m tests.launch.parent RANKS`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from hocket.launch import Launcher, watch


def hear(event: dict[str, Any]) -> None:
    print(event["event"], event.get("pid"), flush=True)


def main() -> None:
    # A shell without job control starts what it puts in the background deaf to Ctrl-C, and that is
    # inherited: the tests may run so, a person who presses Ctrl-C does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Launcher(warm=False) as launcher:
            print("server", launcher._server.pid, flush=True)
            if os.environ.get("STOPPED"):  # as deaf as while it imports torch
                os.kill(launcher._server.pid, signal.SIGSTOP)
                watch.LEAVE = 90.0  # longer than the test waits: to ask it first would show
                threading.Timer(1.0, print, ("running",), {"flush": True}).start()
            launcher.run("tests.launch.cases:wait", int(sys.argv[1]), on_event=hear)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
