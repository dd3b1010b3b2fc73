"""What is printed fits the encoding of the terminal that shows it."""

from __future__ import annotations

import io
import re
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


TABLES = [
    "plan llama-3-8b --cluster 8xH100 --global-batch 64 --top 3 --explain",
    "plan llama-3-8b --serve --cluster H100 --top 3",
    "plan gpt-4 --serve --cluster A100-40",
    "plan llama-2-7b --links --cluster 8xA100 --layout dp4.tp2 --global-batch 64",
    "models",
    "models --gpus",
    "validate tests/planning/published_extract.csv",
    "validate --infer tests/planning/published_serving_extract.csv",
]


@pytest.mark.parametrize("command", TABLES)
def test_a_narrow_terminal_gets_no_wrapped_row_and_every_number(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for width in (0, 60, 80):
        out = Out()
        out.terminal = width > 0
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(command.split()) == 0
        printed[width] = out.getvalue()
    whole = printed.pop(0)
    number = r"[\d.,]*\d"
    for width, narrow in printed.items():
        words = [line for line in narrow.splitlines() if " " in line.strip()]
        assert not [x for x in words if len(x) > width and not x.startswith("next: ")]
        assert set(re.findall(number, whole)) == set(re.findall(number, narrow))


class Out(io.StringIO):
    """Standard output, of a terminal or not."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal
