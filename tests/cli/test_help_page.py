"""Help of a verb: short, by topic, by flag, and whole."""

from __future__ import annotations

import importlib
import itertools
import re

import pytest

from hocket.cli import spelling
from hocket.cli.help_page import MOST_USED, TOPICS, by_topic
from hocket.cli.main import VERBS, main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def heads(text: str) -> list[str]:
    """The flags that are explained."""
    return re.findall(r"^  (?:-\w, |--[\w-]+, )*(--[\w-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_all_of_help_has_every_flag_once(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = heads(printed(capsys, verb, "--help", "all").partition("examples:")[0])
    known = spelling.flags_of(importlib.import_module(f"hocket.cli.{verb}")).values()
    flags = {spelling.spelled(flag.name) for flag in known if not flag.positional}
    assert sorted(found) == sorted(flags)


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_two_screens(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, verb, "--help")
    assert len(text.splitlines()) <= 75
    if verb in MOST_USED:
        assert len(heads(text.partition("examples:")[0])) == len(MOST_USED[verb])
        for topic in re.findall(r"^  (\w+)  ", text.partition("more, by")[2], re.MULTILINE):
            assert printed(capsys, verb, "--help", topic)


@pytest.mark.parametrize("verb", VERBS)
def test_lines_of_the_summary_are_full(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, verb, "--help")
    summary = re.split(r"\n\n(?=  \S|[a-z ,]+:\n)", text.partition("\n\n")[2])[0]
    for paragraph in summary.split("\n\n"):
        lines = paragraph.strip().splitlines()
        for line, after in itertools.pairwise(lines):
            assert len(line) + 1 + len(after.split()[0]) > 80, line


@pytest.mark.parametrize("verb", MOST_USED)
def test_every_flag_has_a_topic(verb: str) -> None:
    known = spelling.flags_of(importlib.import_module(f"hocket.cli.{verb}")).values()
    found = by_topic(flag for flag in known if not flag.positional)
    assert set(found) <= set(TOPICS), [flag.name for flag in found.get("other", ())]


def test_a_topic_a_flag_and_neither(capsys: pytest.CaptureFixture[str]) -> None:
    topic = printed(capsys, "train", "--help", "optimizer")
    assert "--lr FLOAT" in topic
    assert "--data" not in topic
    assert printed(capsys, "help", "train", "optimizer") == topic
    assert printed(capsys, "train", "--help=optimizer") == topic
    one = printed(capsys, "train", "tiny-llama", "--help", "--lr")
    assert one.startswith("  --lr FLOAT ")
    assert "5e-5" in one
    assert "--min-lr" not in one
    assert main(["train", "--help", "optimiser"]) == 2
    assert "hint: hocket train --help optimizer" in capsys.readouterr().err


def test_a_narrow_terminal_wraps_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    text = printed(capsys, "train", "--help", "all").partition("examples:")[0]
    texts = [line for line in text.splitlines() if line.startswith(" " * 26)]
    assert len(texts) > 100
    long = [line for line in texts if len(line) > 64]
    assert all(len(line.split()) == 1 for line in long), "words that cannot be wrapped"
    assert "\033" not in text
    assert heads(text)


@pytest.mark.parametrize(("typed", "read"), [("30m", "30m"), ("500", 500), ("0", 0)])
def test_a_time_or_a_number_of_steps(typed: str, read: int | str) -> None:
    from hocket.cli.train import read_train_flags

    known = spelling.flags_of(importlib.import_module("hocket.cli.train"))
    words = ["tiny-llama", "--save-every", typed]
    assert spelling.checked_arguments("train", words, known) == words
    assert read_train_flags(words)[1]["save_every"] == read
