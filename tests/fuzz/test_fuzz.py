"""A rotating part of `python -m tests.fuzz`, and that it sees what it is there to see."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.spec.errors import OptionError
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.worker import fuzz
from tests.rotation import part, seed

pytestmark = pytest.mark.train

CHEAP = [name for name in KINDS if not name.startswith(("report", "server"))]
PAGES = [name for name in KINDS if name not in CHEAP]


@pytest.mark.parametrize("name", [*part(CHEAP, 8), *part(PAGES, 14)])
def test_nothing_from_outside_ends_in_anything_but_an_error(name: str) -> None:
    found = fuzz(name, 40 if name in CHEAP else 8, seed())
    assert not found.failures
    assert found.right + found.errors == found.inputs


def raises(folder: Path) -> None:
    raise ValueError("x")


def says_nothing(folder: Path) -> None:
    raise OptionError("")


def dies(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def writes_outside(folder: Path) -> None:
    (folder.parent / "hocket-fuzz-outside").rmdir()


def calls(folder: Path) -> None:
    os.system("true")


@pytest.mark.parametrize(
    ("reader", "said"),
    [(raises, "ValueError: 'x'"), (says_nothing, "without a message"), (dies, "os.kill"),
     (writes_outside, "Directory not empty"), (calls, "os.system")],
)  # fmt: skip
def test_what_a_reader_does_wrong_is_seen(
    reader: Callable[[Path], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path) -> None:
        if (folder / "file").read_bytes() != b"good":
            reader(folder)

    def prepare(folder: Path) -> None:
        (folder / "file").write_bytes(b"good")

    kind = Kind(name="x", file="file", prepare=prepare, read=read, mutate=lambda data, _: b"bad")
    monkeypatch.setitem(KINDS, "x", kind)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "hocket-fuzz-outside" / "not empty").mkdir(parents=True)
    found = fuzz("x", 2, 0)
    assert found.inputs == 2
    assert all(said in why or "signal" in why for _, why in found.failures), found.failures
    assert len(found.failures) == 2
