"""An exit waits for threads that are still at work in C."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time

import pytest

from hocket.runtime.interpreter_exit import settle_threads

pytestmark = pytest.mark.torch


def test_it_waits_for_a_thread_that_computes_and_not_for_one_that_sleeps() -> None:
    done = threading.Event()

    def compute() -> None:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000)  # in C, without the interpreter's lock
        done.set()

    sleeping = threading.Event()
    sleeper = threading.Thread(target=sleeping.wait)
    sleeper.start()
    threading.Thread(target=compute).start()
    assert settle_threads(60.0)
    assert done.wait(1.0), "it had computed"  # short: setting the event takes no time
    sleeping.set()
    sleeper.join()


def test_it_gives_up_after_its_limit() -> None:
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000)

    thread = threading.Thread(target=compute)
    thread.start()
    began = time.monotonic()
    assert not settle_threads(0.3)
    assert time.monotonic() - began < 60
    ended.set()
    thread.join()


def test_a_mesh_has_the_process_settle() -> None:
    """Of a process of its own: what is registered is not taken back."""
    code = """
import atexit, torch.distributed as dist
from hocket.runtime import interpreter_exit
from hocket.runtime.mesh import Mesh
from hocket.spec.layout import Layout
interpreter_exit.settle_at_exit.cache_clear()
seen = []
atexit.register = seen.append
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
Mesh(Layout(), 0)
Mesh(Layout(), 0)
assert seen == [interpreter_exit.settle_threads], seen
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
