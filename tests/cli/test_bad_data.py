"""Data that cannot be used is refused before any rank starts, and leaves no run behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hocket.launch
from hocket.cli.main import main
from tests.cli.test_bad_input import TINY

pytestmark = pytest.mark.train


class NoRanks:
    """Stands for the launcher: its server may warm up, its ranks may not start."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> NoRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, *_: object, **__: Any) -> None:
        raise AssertionError("ranks were started")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hocket.launch, "Launcher", NoRanks)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments, "--run", "first"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert not Path("first/run.json").exists(), "the name stays free for the mended job"
    return said


def test_empty(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").write_text("")
    assert "empty.txt" in refused(capsys, "tiny-llama", "--data", "empty.txt")


def test_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("word " * 100)
    said = refused(
        capsys, "tiny-llama", "--data", "short.txt", "--seq-len", "64", "--global-batch", "16"
    )
    assert "needs 1025" in said
    assert "16 sequences of 64" in said
    assert "--global-batch 6\n        or more data" in said


def test_unreadable(capsys: pytest.CaptureFixture[str]) -> None:
    Path("binary.txt").write_bytes(bytes(range(256)) * 100)
    assert "binary.txt" in refused(capsys, "tiny-llama", "--data", "binary.txt")


def test_json_lines_without_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"body": "word " * 100}) for _ in range(10)]
    Path("rows.jsonl").write_text("\n".join(rows))
    said = refused(capsys, "tiny-llama", "--data", "rows.jsonl")
    assert "text" in said
    assert "body" in said


def test_a_token_beyond_the_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps({**TINY, "vocab_size": 100}))
    Path("text.txt").write_text("word " * 4000)
    said = refused(capsys, "config.json", "--data", "text.txt", "--seq-len", "32")
    assert "vocabulary has 100 rows" in said


def test_json_lines_whose_field_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"text": 5}\n' * 10)
    said = refused(capsys, "tiny-llama", "--data", "rows.jsonl")
    assert "holds no text in its field 'text'" in said
    assert "hint: --text-field" not in said


def test_the_proposed_sequence_length_is_legal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("hello")
    said = refused(
        capsys, "tiny-llama", "--data", "short.txt", "--seq-len", "64", "--global-batch", "4"
    )
    assert "--seq-len 1" not in said
