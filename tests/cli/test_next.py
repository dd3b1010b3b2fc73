"""Commands that a verb prints after its result: of the very job that it was asked for."""

from __future__ import annotations

import pytest

from hocket.cli.main import main
from hocket.cli.next import option_words
from hocket.jobs import rehearse
from hocket.jobs.rehearsal_workers import RehearsalWorkers

OPTIONS = ["--seq-len", "64", "--grad-dtype", "bf16", "--lora-rank", "4"]


def test_options_as_they_are_typed() -> None:
    options = {
        "lora_rank": 4,
        "optimizer": "adamw_8bit",
        "trust_remote_code": True,
        "attention": None,
    }
    words = ["--lora-rank", "4", "--optimizer", "adamw_8bit", "--trust-remote-code"]
    assert option_words({**options, "json": False}) == words


@pytest.mark.torch
def test_a_rehearsal_offers_to_train_the_same(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearse, "RehearsalWorkers", lambda count: RehearsalWorkers(1))
    assert main(["rehearse", "tiny-llama", "--layout", "dp2", *OPTIONS]) == 0
    words = capfd.readouterr().out.splitlines()[-1].split()
    assert words[0] == "next:"
    assert words[2:] == ["train", "tiny-llama", "--data", "DATA", "--layout", "dp2", *OPTIONS]


@pytest.mark.ranks
def test_a_check_offers_to_train_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--lora-rank", "4", "--optimizer", "adamw_8bit"]
    assert main(["check", "tiny-llama", "--layout", "dp2", *asked, "--steps", "1"]) == 0
    words = capfd.readouterr().out.splitlines()[-1].split()
    assert words[2:6] == ["train", "tiny-llama", "--data", "DATA"]
    assert words[8:] == asked
