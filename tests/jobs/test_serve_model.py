"""A whole server of a real model: every split answers as `generate` on one process does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hocket
import hocket.launch
from hocket.cli.main import main
from hocket.launch import Launcher
from hocket.spec.serving_forecast import ServingMeasured
from tests.jobs.test_serve import SMALL, Visitor, post, status
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

PROMPTS = ["One melody is dealt", "note by note to several voices, " * 3, "x", "One melody is"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A run whose model has learnt a line."""
    from tests.support.warm import Warm

    folder = tmp_path_factory.mktemp("served")
    text = folder / "text.txt"
    text.write_text("One melody is dealt note by note to several voices, one sounding.\n" * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warm, "pool", ranks)
        patch.setattr(hocket.launch, "Launcher", Warm)
        hocket.train(
            "tiny-llama", [text], run=folder / "run", steps=8, seq_len=64, global_batch=8, lr=3e-3,
            layout="dp2", eval_batches=1, cluster="none",
        )  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def expected(trained: Path, ranks: RankPool) -> list[str]:
    from tests.support.warm import Warm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warm, "pool", ranks)
        patch.setattr(hocket.launch, "Launcher", Warm)
        return [one.text for one in hocket.generate(trained, PROMPTS, max_new_tokens=12)]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, ranks: RankPool) -> Iterator[None]:
    """The session's launcher for the first replica, one of its own for the other."""
    from tests.support.warm import Warm

    monkeypatch.setattr(Warm, "pool", ranks)
    made: list[Any] = []

    def launcher(*arguments: Any, **options: Any) -> Any:
        made.append(None)
        return Warm() if len(made) == 1 else Launcher(*arguments, **options)

    monkeypatch.setattr(hocket.launch, "Launcher", launcher)
    yield
    assert len(made) == 2


def ask_all(address: str, expected: list[str]) -> None:
    """All prompts at once, some of them several times, each as if it were alone."""
    texts: dict[int, str] = {}

    def one(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        code, answer = post(address, prompt=prompt, max_tokens=12, temperature=0)
        assert code == 200, answer
        texts[number] = answer["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts[n] for n in range(12)] == [expected[n % len(PROMPTS)] for n in range(12)]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("layout", ["dp1", "tp2.pp2"])
def test_every_split_answers_as_one_process_does(
    trained: Path, expected: list[str], layout: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    visitor = Visitor(lambda event: ask_all(event["address"], expected))
    found = hocket.serve(
        trained, layout=layout, run=run, on_event=visitor, max_num_batched_tokens=32,
        max_num_seqs=6,
        num_blocks=40, max_model_len=160, **SMALL,
    )  # fmt: skip
    visitor.over()
    assert found.measured.requests == 12
    kept = ServingMeasured.from_json((run / "measured.json").read_text())
    (replica,) = kept.replicas
    assert sum(row.count for row in replica.decode) > 0
    assert replica.cache_tokens == 640
    assert kept.cached_tokens > 0, "the same prompts again"
    assert main(["report", str(run), "--text"]) == 0
    assert "12 answered" in capsys.readouterr().out


@pytest.mark.usefixtures("second")
def test_replicas_share_the_requests(trained: Path, expected: list[str], tmp_path: Path) -> None:
    def visit(event: dict[str, Any]) -> None:
        ask_all(event["address"], expected)
        assert status(f"{event['metrics']}/metrics") == 200

    visitor = Visitor(visit)
    found = hocket.serve(
        trained, layout="dp2", run=tmp_path / "run", on_event=visitor, max_model_len=160, **SMALL
    )
    visitor.over()
    assert all(one.requests for one in found.measured.replicas)
