"""Split over ranks, every family's runners give the logits of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.spec.layout import Layout
from tests.families import SERVED, whole_model
from tests.ranks import RankPool
from tests.serving.paged_cases import longer_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

PAGED = [family for family in SERVED if family != "bloom"]
CASES = [(family, layout) for layout in ("tp2", "pp2") for family in PAGED]
CASES += [
    ("llama", "tp4"),  # fewer key/value heads than ranks
    ("phi3", "tp4"),
    ("gemma3", "pp4"),  # stages whose layers all have windows, or none
    ("llama", "tp2.pp2"),
    ("opt", "tp2.pp2"),
    ("gpt2", "pp2:pipeline_split=1-3"),
]


@pytest.mark.timeout(300)
def test_split_runners_equal_the_whole_model(ranks: RankPool, tmp_path: Path) -> None:
    for family in PAGED:
        whole_model(family).save_pretrained(tmp_path / family)
    # A world for each mesh: of two meshes in one, the second's groups would meet the first's keys.
    worlds: dict[str, list[tuple[str, str]]] = {}
    for case in CASES:
        worlds.setdefault(Layout.parse(case[1]).axes_text(), []).append(case)
    heads: dict[tuple[str, str], list[list[int]]] = {}
    beyond: list[str] = []
    for axes, cases in worlds.items():
        size = Layout.parse(axes).world_size
        results = ranks.run(
            "tests.serving.paged_cases:serve", size, folder=str(tmp_path), cases=cases
        )
        for number, (family, layout) in enumerate(cases):
            rows = [result[number] for result in results]
            assert [row[:2] for row in rows] == [[family, layout]] * size
            differences = [row[2] for row in rows if row[2] is not None]
            assert len(differences) == Layout.parse(layout).tp
            if family == "mixtral":
                beyond += [
                    f"{layout} {off:.2g}" for off in (max(differences), rows[-1][4]) if off >= 1e-5
                ]
            else:
                assert max(differences) < 1e-5, (family, layout, differences)
            heads[family, layout] = [row[3] for row in rows]
    assert heads["llama", "tp2"] == [[1], [1]]
    assert heads["llama", "tp4"] == [[1]] * 4  # two heads, each held by two ranks
    assert heads["llama", "pp2"] == [[2], [2]]
    if beyond:
        pytest.xfail(
            f"mixtral's logits in fp32 are off fp64, split or whole, by {beyond}, not 1e-5"
        )


HALF = {
    "tp2": ["llama", "llama_tied", "qwen3"],
    "pp2": ["llama", "llama_tied", "opt"],
    "tp2.pp2": ["llama", "qwen3"],
}


def test_weights_in_bfloat16_are_all_that_is_rounded(ranks: RankPool, tmp_path: Path) -> None:
    for family in {family for families in HALF.values() for family in families}:
        whole_model(family).save_pretrained(tmp_path / family)
    for layout, families in HALF.items():
        results = ranks.run(
            "tests.serving.paged_cases:serve", Layout.parse(layout).world_size,
            folder=str(tmp_path), cases=[(family, layout) for family in families], dtype="bf16",
        )  # fmt: skip
        for number, family in enumerate(families):
            differences = [result[number][2] for result in results if result[number][2] is not None]
            assert len(differences) == Layout.parse(layout).tp
            assert max(differences) < 1e-5, (family, layout, differences)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("layout", ["dp2.ep2", "tp2.ep2.etp1"])
def test_experts_over_ranks_read_nothing_and_answer_as_the_whole_model(
    ranks: RankPool, tmp_path: Path, layout: str, captured: bool
) -> None:
    """Data ranks with different numbers of tokens, and idle ones, run collectives of one size, and
    replay one graph."""
    whole_model("mixtral").save_pretrained(tmp_path)
    found = ranks.run(
        "tests.serving.paged_cases:experts_on_device", 2,
        folder=str(tmp_path), text=layout, captured=captured,
    )  # fmt: skip
    assert max(row["worst"] for row in found) < 2e-5, found
    assert found[0]["replays"] == found[1]["replays"]
    if captured:
        assert found[0]["sizes"] == found[1]["sizes"] == [1, 2, 4]
        assert found[0]["replays"] > 0
    else:
        assert "not here" in found[0]["reason"]


CONTEXT = {
    "llama": True, "gemma2": False, "gpt_oss": True, "deepseek_v3": True, "bamba": True,
    "qwen3_next": False,
}  # fmt: skip
"""By type, whether decode steps are captured."""


def test_context_ranks_on_the_path_of_a_gpu_answer_as_the_whole_model(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Windows, sinks, soft caps, latent vectors, recurrent states; and steps that are launched
    before the tokens of the one before are known, which the first context rank samples for all."""
    for family in CONTEXT:
        longer_model(family).save_pretrained(tmp_path / family)
    every = ranks.run(
        "tests.serving.paged_cases:context_on_device", 2, folder=str(tmp_path), cases=CONTEXT
    )
    for rows in zip(*every, strict=True):
        assert max(row["worst"] for row in rows) < 2e-5, rows
        assert all(row["split"] > 0 for row in rows)
        assert rows[0]["missed"] < 2e-5, rows
    assert [row["replays"] > 0 for row in every[0]] == list(CONTEXT.values())
    assert [row["replays"] for row in every[0]] == [row["replays"] for row in every[1]]
