"""Choosing tokens, telling text, and one process's generation against transformers' own."""

from __future__ import annotations

import math

import pytest

from hocket.serving.front.text import TextPieces
from hocket.serving.request import SamplingParams, check_prompts, refuse_replicas
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from tests.families import FAMILIES, PROMPTS, whole_model

# --- nothing needed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan},
              {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_replicas_are_refused_with_the_rest_as_hint() -> None:
    refuse_replicas(Layout.parse("tp2.pp2"))
    with pytest.raises(LayoutError, match=r"dp2\.pp2\.tp2") as caught:
        refuse_replicas(Layout.parse("dp2.pp2.tp2"))
    assert caught.value.hint == "--layout pp2.tp2"
    with pytest.raises(LayoutError):
        refuse_replicas(Layout.parse("dp2:data_parallel=threads"))


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    options = SamplingParams(max_new_tokens=10)
    check_prompts([[1, 2]], options, 8, 12)
    for prompts, match in (
        ([], "no prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([[8]], "token 8"),
        ([[-1]], "token -1"),
        ([[1, 2, 3]], "13 positions"),
    ):
        with pytest.raises(OptionError, match=match):
            check_prompts(prompts, options, 8, 12)


def test_text_comes_in_whole_characters() -> None:
    pieces = TextPieces(lambda ids: bytes(ids).decode(errors="replace"))
    streamed = [pieces.add(byte) for byte in "aé→!".encode()]
    assert streamed == ["a", "", "é", "", "", "→", "!"]
    pieces.add(0xC3)
    assert pieces.end() == "\N{REPLACEMENT CHARACTER}"
    assert pieces.text == "aé→!\N{REPLACEMENT CHARACTER}"


# --- torch, one process ------------------------------------------------------------------------


@pytest.mark.torch
def test_draws_follow_the_distribution_and_its_cuts() -> None:
    import torch

    from hocket.serving.padded import draw_row_tokens

    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probability.log().expand(4000, 4)

    def shares(**options: float) -> list[float]:
        tokens = draw_row_tokens(logits, SamplingParams(temperature=1.0, **options), 0)
        return (torch.bincount(tokens, minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.9) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.03)
    assert shares(top_p=0.4) == [1, 0, 0, 0]
    options = SamplingParams(temperature=0.7, seed=3)
    assert torch.equal(draw_row_tokens(logits, options, 5), draw_row_tokens(logits, options, 5))
    assert not torch.equal(draw_row_tokens(logits, options, 5), draw_row_tokens(logits, options, 6))


@pytest.mark.torch
def test_the_cuts_are_those_of_transformers() -> None:
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from hocket.serving import padded

    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    theirs = TopPLogitsWarper(0.8)(
        None, TopKLogitsWarper(20)(None, TemperatureLogitsWarper(0.6)(None, logits))
    )
    options = SamplingParams(temperature=0.6, top_k=20, top_p=0.8)
    seen = [set() for _ in range(6)]
    for position in range(600):
        for row, token in enumerate(padded.draw_row_tokens(logits, options, position).tolist()):
            seen[row].add(token)
    for row in range(6):
        allowed = set(torch.isfinite(theirs[row]).nonzero().flatten().tolist())
        assert seen[row] <= allowed
        assert len(seen[row]) > len(allowed) / 2


@pytest.mark.torch
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_process_generates_what_transformers_does(family: str) -> None:
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.runtime.pipeline.stage import Stage
    from hocket.serving.padded import Engine

    model = whole_model(family)
    engine = Engine([Stage(model)], Mesh.single(), model.config)
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    for prompt, ours in zip(PROMPTS, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.torch
def test_a_row_ends_with_its_stop_token_and_the_others_go_on() -> None:
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.pipeline.stage import Stage
    from hocket.serving.padded import Engine

    model = whole_model("llama")
    engine = Engine([Stage(model)], Mesh.single(), model.config)
    free = engine.generate(PROMPTS, SamplingParams(max_new_tokens=10))
    stop = free[0][4]
    rounds: list[list[int | None]] = []
    options = SamplingParams(max_new_tokens=10, stop=(stop,))
    found = engine.generate(PROMPTS, options, lambda _, row: rounds.append(row))
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert found == expected
    for row, tokens in enumerate(expected):
        assert [r[row] for r in rounds if r[row] is not None] == tokens
