"""The demo, with few steps on few ranks: every part of it is there and says what is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs.demo import QUICK, demo_options, standard_library, write_corpus
from hocket.spec.run import RunFolder


def test_the_corpus_is_this_pythons_own(tmp_path: Path) -> None:
    count = write_corpus(tmp_path / "corpus.jsonl", largest=300_000)
    assert count >= 300_000
    paths = [path for path, _ in zip((p for p, _ in standard_library()), range(50), strict=False)]
    assert paths[0].startswith("pydoc_data/"), "the docs come first"
    assert not any("test" in path.split("/") for path in paths)


def test_defaults_and_changes() -> None:
    assert demo_options({}).layout.world_size == 2
    asked = demo_options({}, full=True)
    assert asked.layout.axes_text() == "dp2.pp2.tp2"
    assert asked.layout.world_size == 8
    changed = demo_options({"layout": "pp2", "steps": 2})
    assert (changed.layout.pp, changed.layout.dp) == (2, 1)
    assert changed.layout.microbatches is None
    assert changed.options.steps == 2
    assert changed.workload.seq_len == QUICK["seq_len"]


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code = main(
        ["demo", "--layout", "pp2", "--microbatches", "4", "--steps", "3", "--seq-len", "32",
         "--global-batch", "8", "--vocab-size", "300", "--run", str(run)]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0, said
    for part in (
        "step 3/3",
        "held-out loss",
        "as measured",
        "the schedule's own: 20.0%",
        "every count and every byte as in theory",
        "one process",
        "What it cannot show: speed",
        "a model that does not fit: --memory-per-rank ",
        "one process is rejected before it starts: a rank of dp1:microbatches=4 needs ",
        "pp2 may start: its predicted peak memory per rank was ",
        "is an ordinary Hugging Face directory",
        "def __init__(self, ",
    ):
        assert part in said, part
    assert (RunFolder(run).model / "model.safetensors").exists()
    assert RunFolder(run).load().command == "demo"
