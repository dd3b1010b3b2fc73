"""What is computed again or kept elsewhere is the same to the last bit; and holds as much less as
was said."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.launch import Launcher
from hocket.models.source import resolve_model
from hocket.spec.errors import HocketError
from hocket.spec.proxy_verdict import ProxyVerdict, verdict_file, write_verdict
from hocket.spec.recompute import NO_FEED_FORWARD
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

MODES: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "full"},
    {"recompute": "norm+activation"},
    {"recompute": "norm+mlp"},
]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
BLOOM = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}


def run(ranks: RankPool, world_size: int, **options: Any) -> list[list[dict[str, Any]]]:
    return ranks.run("tests.training.recompute_cases:modes", world_size, timeout=120.0, **options)


@pytest.mark.parametrize(
    ("layout", "size", "options"),
    [
        ("tp2", 2, {"config": GPT2, "dropout": 0.2}),
        ("tp2", 2, {"config": GPT2, "dropout": 0.2, "attention": "eager"}),
        ("tp2:microbatches=2", 2, {"config": LLAMA, "dtype": "bf16"}),
        ("tp2:sequence_parallel=true", 2, {"config": GPT2, "dropout": 0.2}),
        ("dp2.pp2:microbatches=2,zero=2,schedule=zero-bubble", 4, {"config": GPT2, "dropout": 0.2}),
    ],
)
def test_no_bit_is_changed(
    ranks: RankPool, layout: str, size: int, options: dict[str, Any]
) -> None:
    """Dropout draws the same numbers again, also where tensor ranks draw their own."""
    modes = [
        *MODES,
        {"moved": True},
        {"moved": True, "recompute": "selective"},
        {"moved": True, "recompute": "core_attn+norm+activation+mlp"},
    ]
    found = run(ranks, size, layout=layout, modes=modes, predicts=False, **options)
    for plain, *others in found:
        assert len(others) == 8
        *_, moved, fewer, least = (other["moved"] for other in others)
        assert moved > fewer > least > 0
        _, full, modules, mlp = (other["calls"] for other in others[1:5])
        assert full == mlp == 2 * modules == 2 * plain["calls"] > 0  # it runs again
        for other in others:
            assert other["losses"] == plain["losses"]
            assert other["gradients"] == plain["gradients"]


@pytest.mark.parametrize(
    ("layout", "size", "attention"),
    [
        ("dp1", 1, "sdpa"),
        ("dp1", 1, "eager"),
        ("pp2:microbatches=4", 2, "sdpa"),
    ],
)
def test_less_is_held_and_predicted(
    ranks: RankPool, layout: str, size: int, attention: str
) -> None:
    found = run(ranks, size, layout=layout, modes=MODES, config=LLAMA, attention=attention)
    for rank, rows in enumerate(found):
        for row in rows:
            measured, predicted = row["bytes"], row["predicted"]
            assert measured["total"] == pytest.approx(predicted["total"], rel=0.05), rank
            assert measured["activations"] == pytest.approx(predicted["activations"], rel=0.05)
    none, selective, one, full, modules, mlp = (row["bytes"]["activations"] for row in found[0])
    assert full < one < none
    assert full < selective < none
    assert full < modules < 0.75 * none
    assert mlp < 0.8 * modules


def test_a_core_that_cannot_be_distinguished_is_refused(ranks: RankPool) -> None:
    with pytest.raises(HocketError, match="attention") as caught:
        run(ranks, 1, layout="dp1", modes=[{"recompute": "selective"}], config=BLOOM)
    assert caught.value.hint == "--recompute full"


def test_what_a_model_does_not_have_is_rejected_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verdict on its proxy model, which is known (`test_proxy` reaches it)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = ProxyVerdict(loss="", shifts=True, layers="", feed_forward=NO_FEED_FORWARD)
    write_verdict(verdict_file(resolve_model("tiny-mixtral").config, "sdpa"), known)
    monkeypatch.setattr(Launcher, "run", lambda *_, **__: pytest.fail("a rank was started"))
    data = tmp_path / "text"
    data.write_text("one two three " * 200)
    options = ["--seq-len", "32", "--global-batch", "2", "--steps", "1"]
    for verb, more in (("train", ["--data", str(data)]), ("check", [])):
        words = [verb, "tiny-mixtral", *more]
        assert main([*words, "--layout", "dp2:recompute=norm+mlp", *options]) == 2
        said = capsys.readouterr().err
        assert "tiny-mixtral (mixtral) cannot be trained with recompute=norm+mlp: no layer" in said
        fix = shlex.join([*words, "--layout", "dp2", *options, "--recompute", "full"])
        assert f"hint: hocket {fix}\n" in said
