"""What is printed fits the encoding of the terminal that shows it."""

from __future__ import annotations

import io
import sys

import pytest

from hocket.cli.main import main


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "euc-kr"])
def test_a_schedule_is_drawn_in_any_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["schedule", "--layout", "pp2:microbatches=4"]) == 0
    sys.stdout.flush()
    said = out.getvalue().decode(encoding)
    assert said.count("rank ") >= 2
    assert "backward" in said
    assert ("█" in said) == (encoding == "utf-8"), said
    assert said.isascii() or encoding == "utf-8"
