"""hocket as process 1 of a container: the kernel drops signals to it that have no handler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

VERB = """
import sys, time, types
stand_in = types.ModuleType("hocket.cli.main")
def main():
    print("began", flush=True)
    time.sleep(60)
stand_in.main = main
sys.modules["hocket.cli.main"] = stand_in
sys.argv = ["hocket", sys.argv[1]]
from hocket.__main__ import main
main()
"""


@pytest.mark.parametrize(("verb", "code"), [("serve", 128 + signal.SIGTERM), ("train", 75)])
def test_sigterm_ends_process_1_before_a_verb_has_handlers(verb: str, code: int) -> None:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*command, "true"], capture_output=True, timeout=100, check=False
        ).returncode
    ):
        pytest.skip("this user cannot make a pid namespace (unshare)")
    with subprocess.Popen(
        [*command, sys.executable, "-c", VERB, verb], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "began\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children.split()[0]), signal.SIGTERM)
            assert process.wait(10) == code  # short: it is what is tested
        finally:
            process.kill()
