"""Whole replicas: requests of all kinds over every layout are answered as one process would."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.serving.llm import LLM, Completion
from hocket.launch.spare import is_spare
from hocket.serving.request import SamplingParams
from hocket.spec.errors import OptionError, RankFailure
from hocket.spec.timeline import Timeline
from tests.families import PROMPTS, whole_model
from tests.ranks import RankPool
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

LAYOUTS = ["dp1", "tp2", "pp2", "tp2.pp2", "tp4"]  # with tp4, fewer key/value heads than ranks
SMALL = {
    "tokenizer": "bytes", "num_blocks": 18, "block_size": 8, "max_num_seqs": 12,
    "max_num_batched_tokens": 48, "max_model_len": 120,
}  # fmt: skip
"""A cache of 144 tokens for requests of up to 120: most of them are preempted at some time."""
TIE = 1e-5
"""Logits that differ by less are equal (docs: what equal means)."""


def mixed() -> list[tuple[tuple[int, ...], int]]:
    """Prompts and numbers of new tokens: of all lengths, many with a beginning in common."""
    draw = random.Random(3)
    shared = draw.choices(range(64), k=40)
    found = []
    for number in range(64):
        length = draw.choice([1, 5, 33, 64])
        own = draw.choices(range(64), k=length)
        tokens = (shared[: draw.choice([16, 40])] if number % 2 else []) + own
        found.append((tuple(tokens), draw.choice([2, 9, 15])))
    return found


@pytest.fixture(scope="module")
def reference() -> Any:
    return whole_model("llama")


@pytest.fixture(scope="module")
def folder(ranks: RankPool, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "llama"
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    """What transformers generates, greedily, by prompts of equal length."""
    import torch

    asked = mixed()
    found: list[list[int]] = [[] for _ in asked]
    for length in {len(tokens) for tokens, _ in asked}:
        rows = [n for n, (tokens, _) in enumerate(asked) if len(tokens) == length]
        batch = torch.tensor([asked[n][0] for n in rows])
        new = reference.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=15, do_sample=False,
            eos_token_id=-1, pad_token_id=0,
        )[:, length:]  # fmt: skip
        for n, row in zip(rows, new.tolist(), strict=True):
            found[n] = row[: asked[n][1]]
    return found


@contextlib.contextmanager
def serving(ranks: RankPool, folder: Path, layout: str, **options: Any) -> Iterator[LLM]:
    with LLM(folder, layout, launcher=ranks.launcher, **{**SMALL, **options}) as llm:
        yield llm


def same(reference: Any, prompt: tuple[int, ...], ours: Any, theirs: list[int]) -> bool:
    """Equal, up to a choice between logits that are as good as equal."""
    import torch

    if list(ours) == theirs:
        return True
    k = next(k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *theirs[:k]]])).logits[0, -1]
    return bool(logits.max() - logits[ours[k]] < TIE)


@pytest.mark.parametrize("layout", part(LAYOUTS, 2))
def test_greedy_answers_are_those_of_transformers(
    ranks: RankPool, folder: Path, reference: Any, expected: list[list[int]], layout: str
) -> None:
    asked = mixed()
    with serving(ranks, folder, layout) as llm:
        found = llm.generate(
            [tokens for tokens, _ in asked],
            [SamplingParams(max_new_tokens=count, ignore_eos=True) for _, count in asked],
        )
        stats = llm.measured()["stats"]
    for (prompt, _), ours, theirs in zip(asked, found, expected, strict=True):
        assert ours.finish_reason == "length"
        assert same(reference, prompt, ours.tokens, theirs), (prompt, ours.tokens, theirs)
    assert any(one.cached for one in found)
    if layout in ("dp1", "tp2", "tp4"):  # stages may be too slow for as many to run at once
        assert stats["preempted"] > 0
    assert stats["running"] == stats["waiting"] == 0


@pytest.mark.parametrize(
    "family",
    part(
        ["llama_tied", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "gemma3", "phi3", "mixtral"],
        3,
    ),
)
def test_every_family_answers_as_transformers_does(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    import torch

    model = whole_model(family)
    model.save_pretrained(tmp_path / family)
    with serving(ranks, tmp_path / family, "tp2.pp2", max_num_batched_tokens=8) as llm:
        found = llm.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True))
    for prompt, ours in zip(PROMPTS, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert same(model, tuple(prompt), ours.tokens, theirs)


def test_draws_and_logprobs_do_not_depend_on_layout_or_company(
    ranks: RankPool, folder: Path
) -> None:
    """Keyed by seed and position: whatever else is in the batch, the answer is the same."""
    chosen = [
        SamplingParams(max_new_tokens=10, temperature=0.9, seed=1, ignore_eos=True, logprobs=2),
        SamplingParams(max_new_tokens=10, temperature=1.2, top_k=9, top_p=0.9, seed=2,
        ignore_eos=True),
        SamplingParams(
            max_new_tokens=10, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True,
            logit_bias=((7, 3.0),), min_new_tokens=4,
        ),
        SamplingParams(max_new_tokens=4, prompt_logprobs=1, ignore_eos=True),
    ]  # fmt: skip
    prompt = tuple(range(3, 40))
    found: dict[str, list[Completion]] = {}
    for layout in ("dp1", "tp2.pp2"):
        with serving(ranks, folder, layout) as llm:
            alone = [llm.generate(prompt, one)[0] for one in chosen]
            noise = [tuple(tokens) for tokens, _ in mixed()[:20]]
            crowd = llm.generate(
                [prompt] * 4 + noise,
                chosen + [SamplingParams(max_new_tokens=9, temperature=2.0)] * 20,
            )[:4]
        assert [one.tokens for one in alone] == [one.tokens for one in crowd]
        found[layout] = alone
    one, other = found["dp1"], found["tp2.pp2"]
    assert [a.tokens for a in one] == [b.tokens for b in other]
    for a, b in zip(one, other, strict=True):
        for x, y in zip(
            a.logprobs + a.prompt_logprobs, b.logprobs + b.prompt_logprobs, strict=True
        ):
            assert x.token == y.token
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    assert len(one[3].prompt_logprobs) == len(prompt) - 1
    assert len(one[0].logprobs) == 10
    assert all(len(entry.top) == 2 for entry in one[0].logprobs)


def test_a_timeline_shows_chunks_of_one_prompt_in_both_stages_at_once(
    ranks: RankPool, folder: Path
) -> None:
    with serving(ranks, folder, "pp2", max_num_batched_tokens=8, no_prefix_cache=True) as llm:
        caught: list[dict[str, Any]] = []
        watcher = threading.Thread(target=lambda: caught.append(llm.record(12)))
        watcher.start()
        time.sleep(0.1)
        (found,) = llm.generate([tuple(range(60))], SamplingParams(max_new_tokens=20))
        watcher.join(60)
    assert found.tokens
    timeline = Timeline.from_json(json.dumps(caught[0]))
    assert timeline.num_ranks == 2
    forwards = [e for e in timeline.events if e.kind == "F"]
    assert {e.stage for e in forwards} == {0, 1}
    first = {e.microbatch: e for e in forwards if e.stage == 0}
    second = {e.microbatch: e for e in forwards if e.stage == 1}
    assert set(first) == set(second)
    assert len(first) == 12
    numbers = sorted(first)
    # The first stage begins a chunk before the last has ended the one before: not one by one.
    ahead = [first[n + 1].start < second[n].end for n in numbers[:6]]
    assert sum(ahead) >= 2, ahead
    # Each stage runs them in order, and no stage before what it needs.
    for rows in (first, second):
        assert [rows[n].start for n in numbers] == sorted(rows[n].start for n in numbers)
    assert all(first[n].end <= second[n].end for n in numbers)
    assert {"RECV_F", "SEND_F"} <= {e.kind for e in timeline.events}
    assert 0 < timeline.bubble < 1


def test_one_text_stops_at_a_string_and_progress_is_reported(ranks: RankPool, folder: Path) -> None:
    streamed: list[tuple[int, str]] = []
    with serving(ranks, folder, "dp1") as llm:
        (free,) = llm.generate("12", SamplingParams(max_new_tokens=20, ignore_eos=True))
        (same,) = llm.generate(
            "12",
            SamplingParams(max_new_tokens=20, ignore_eos=True),
            on_text=lambda *a: streamed.append(a),
        )
        assert same.tokens == free.tokens
        assert "".join(text for _, text in streamed) == same.text
        stop = free.tokens[5]
        (ended,) = llm.generate("12", SamplingParams(max_new_tokens=20, stop_tokens=(stop,)))
        assert ended.finish_reason == "stop"
        assert ended.tokens == free.tokens[: free.tokens.index(stop)]
        with pytest.raises(OptionError, match="120"):
            llm.generate([tuple(range(60)) * 3], SamplingParams(max_new_tokens=20))
        with pytest.raises(OptionError, match="empty"):
            llm.generate([()])
        with pytest.raises(OptionError, match="2 prompts and 3 samplings"):
            llm.generate(["1", "2"], [SamplingParams()] * 3)
        assert len(llm.generate(["3", "4"], SamplingParams(max_new_tokens=2))) == 2
    with pytest.raises(OptionError, match="closed"):
        llm.generate("5")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_replica_and_leaves_nothing(
    ranks: RankPool, folder: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def noted(*args: Any, **more: Any) -> str:
        made.append(Path(make(*args, **more)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with serving(ranks, folder, "pp2") as llm:
        pids = children(ranks)
        assert len(pids) == 2
        killer = threading.Timer(0.3, os.kill, (pids[victim], signal.SIGKILL))
        killer.start()
        with pytest.raises(RankFailure, match="SIGKILL"):
            llm.generate([(1, 2, 3)] * 2000, SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert not children(ranks)
    assert made
    assert not [folder for folder in made if folder.exists()]


def children(ranks: RankPool) -> list[int]:
    """Ranks that the fork server has started, oldest first."""
    server = ranks.launcher._server.pid
    text = Path(f"/proc/{server}/task/{server}/children").read_text()
    return [int(word) for word in text.split() if not is_spare(int(word))]
