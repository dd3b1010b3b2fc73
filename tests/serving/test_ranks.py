"""Split over ranks, models write what transformers' own generate writes: by padded rows, which
only models use that pages cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from tests.families import PROMPTS, whole_model
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

CASES = [("bloom", layout) for layout in ("tp2", "pp2", "tp2.pp2")]
CASES += [
    ("llama", "tp2.pp2"),
    ("llama", "tp4"),  # fewer key/value heads than ranks
    ("gemma3", "pp4"),  # stages that hold layers of one kind only
    ("llama_tied", "pp2:schedule=interleaved,virtual_stages=2,microbatches=2"),
    ("gpt2", "pp2:pipeline_split=1-3"),
]
NEW = 12


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family's model as transformers saves it, and what transformers generates."""
    import torch

    path = tmp_path_factory.mktemp("models")
    expected = {}
    for family in sorted({family for family, _ in CASES}):
        model = whole_model(family)
        model.save_pretrained(path / family)
        expected[family] = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip
    (path / "expected.json").write_text(json.dumps(expected))
    return path


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, folder: Path) -> dict[tuple[str, str], Any]:
    """Every case's tokens of each rank, or what went wrong; one world per size."""
    found: dict[tuple[str, str], Any] = {}
    worlds: dict[int, list[tuple[str, str]]] = {}
    for case in CASES:
        worlds.setdefault(Layout.parse(case[1]).world_size, []).append(case)
    for size, cases in worlds.items():
        try:
            rows = ranks.run(
                "tests.serving.cases:generate", size, folder=str(folder), cases=cases,
                prompts=PROMPTS, max_new_tokens=NEW,
            )  # fmt: skip
        except HocketError as error:
            found |= dict.fromkeys(cases, str(error))
            continue
        for index, case in enumerate(cases):
            found[case] = [row[index][2:] for row in rows]
    return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    outcomes: dict[tuple[str, str], Any], folder: Path, family: str, layout: str
) -> None:
    outcome = outcomes[family, layout]
    assert isinstance(outcome, list), outcome
    expected = json.loads((folder / "expected.json").read_text())[family]
    assert len({tuple(row) for row in expected}) == len(PROMPTS)  # a model that says something
    for tokens, _ in outcome:  # every rank knows all of them
        assert tokens == expected


def test_a_layer_moves_two_sums_a_token_and_the_choice_moves_pairs(
    outcomes: dict[tuple[str, str], Any],
) -> None:
    assert isinstance(outcomes["llama", "tp2.pp2"], list)
    for _, moved in outcomes["llama", "tp2.pp2"]:
        rounds = moved["broadcast pp"]
        assert rounds == NEW
        first = "send pp" in moved
        layers = 2 if moved["all-reduce tp"] <= 2 * 2 * NEW + NEW else 3
        # attention and MLP of each layer, and on the first stage the embedding
        assert moved["all-reduce tp"] == (2 * layers + first) * NEW
        assert moved.get("all-gather tp", 0) == (0 if first else NEW)
        assert moved.get("send pp", 0) + moved.get("receive pp", 0) == NEW


def test_draws_do_not_depend_on_the_layout(ranks: RankPool, folder: Path) -> None:
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5, "max_new_tokens": NEW}
    found = [
        ranks.run(
            "tests.serving.cases:generate", Layout.parse(layout).world_size, folder=str(folder),
            cases=[["llama", layout]], prompts=PROMPTS, **options,
        )[0][0][2]
        for layout in ("dp1", "tp2", "tp2.pp2")
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]
    greedy = json.loads((folder / "expected.json").read_text())["llama"]
    assert found[0] != greedy


def test_generate_takes_padded_rows_where_pages_cannot_hold_a_model(
    ranks: RankPool, folder: Path
) -> None:
    import torch

    from hocket.jobs.generate import generate_texts

    streamed: list[tuple[int, str]] = []
    found = generate_texts(
        str(folder / "bloom"), ["12", "3456"], layout="pp2", tokenizer="bytes", max_new_tokens=8,
        launcher=ranks.launcher, on_text=lambda row, text: streamed.append((row, text)),
    )  # fmt: skip
    model = whole_model("bloom")
    for row, one in enumerate(found):
        ids = torch.tensor([list(one.prompt_tokens)])
        theirs = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        assert list(one.tokens) == [token for token in theirs if token != 2]
        assert "".join(text for number, text in streamed if number == row) == one.text
