"""A rotating part of `python -m tests.fuzz`, and that it sees what it is there to see."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.models import hub
from hocket.spec.errors import ModelError, OptionError
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.worker import fuzz
from tests.rotation import part, seed

pytestmark = pytest.mark.train

HUB = "Hub's replies"
SLOW = [name for name in KINDS if name.startswith(("report", "server", "plan"))]
FAST = [name for name in KINDS if name not in (*SLOW, HUB)]


@pytest.mark.parametrize("name", [*part(FAST, 8), *part(SLOW, 12), HUB])
def test_nothing_from_outside_ends_in_anything_but_an_error(name: str) -> None:
    found = fuzz(name, 150 if name in FAST else 12 if name == HUB else 30, seed())
    assert not found.failures
    assert found.right + found.errors == found.inputs


def test_the_page_has_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/fuzzing.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert rows - {"kind"} == KINDS.keys() - {HUB}


FOUND = [
    ("server's forecast.json", 4898), ("server's measured.json", 3793),
    ("server's measured.json", 8949), ("run.json", 2634),
]  # fmt: skip
"""Inputs of seed 0 that failed once: two points of one place, no number of seconds, a row of
attention without its heads, a width of a model that no float holds."""


@pytest.mark.parametrize(("name", "number"), FOUND)
def test_what_failed_once_does_not_again(name: str, number: int) -> None:
    assert not fuzz(name, 1, 0, first=number).failures


def test_a_changed_byte_of_a_download_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[HUB]
    kind.prepare(tmp_path)
    file = tmp_path / kind.file
    replies = json.loads(file.read_bytes())
    cdn = next(reply for key, reply in replies.items() if key.startswith("GET /cdn/"))
    cdn["body"] = cdn["body"][:-1] + chr(ord(cdn["body"][-1]) ^ 1)
    file.write_text(json.dumps(replies))
    with pytest.raises(ModelError, match="arrived damaged"):
        kind.read(tmp_path)
    monkeypatch.setattr(hub, "_verified", lambda _: contextlib.nullcontext(lambda _: None))
    with pytest.raises(AssertionError, match="is damaged"):
        kind.read(tmp_path)


def asks_to_wait(replies: dict[str, Any], key: str) -> None:
    replies[key] |= {"status": 429, "headers": {"Retry-After": "99999999"}}


def asks_for_a_reset(replies: dict[str, Any], key: str) -> None:
    replies[key] |= {"status": 429, "headers": {"RateLimit": '"api";r=0;t=86400'}}


def leads_to_itself(replies: dict[str, Any], key: str) -> None:
    replies[key]["headers"]["Link"] = '<{self}>; rel="next"'


@pytest.mark.parametrize(
    ("endless", "said"),
    [(asks_to_wait, "asks to wait 99,999,999 seconds"), (asks_for_a_reset, "wait 86,400 seconds"),
     (leads_to_itself, "listing .* does not end")],
)  # fmt: skip
def test_a_reply_without_an_end_is_an_error(
    endless: Callable[[dict[str, Any], str], None], said: str, tmp_path: Path
) -> None:
    kind = KINDS[HUB]
    kind.prepare(tmp_path)
    file = tmp_path / kind.file
    replies = json.loads(file.read_bytes())
    endless(replies, next(key for key in replies if "/tree/" in key))
    file.write_text(json.dumps(replies))
    with pytest.raises(ModelError, match=said):
        kind.read(tmp_path)


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
