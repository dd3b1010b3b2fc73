"""Draws against transformers' own processors, and by what they must not depend on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

V = 3000
COUNT = 512


def hf_probabilities(
    logits: Any, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> Any:
    """What transformers would sample from: [N, V]."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain: list[Any] = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k is not None else []
    chain += [TopPLogitsWarper(top_p)] if top_p is not None else []
    chain += [MinPLogitsWarper(min_p)] if min_p is not None else []
    ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    return LogitsProcessorList(chain)(ids, logits.double()).softmax(-1)


def probabilities(logits: Any, temperature: float, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """The probability of each token of one row, found by drawing at the middles of 512 equal
    parts: how often each comes."""
    import torch

    from hocket.serving.engine.draw import Choices, draw_tokens

    count = COUNT
    at = [(i + 0.5) / count for i in range(count)]
    rows = logits.expand(count, -1)
    tokens, good = draw_tokens(
        rows,
        Choices(
            at=at,
            temperature=[temperature] * count,
            top_k=[top_k] * count,
            top_p=[top_p] * count,
            min_p=[min_p] * count,
        ),
    )
    assert bool(good.all())
    assert tokens.sort().values.equal(tokens)  # by id, as the numbers
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / count


def one(logits: Any, at: float, temperature: float, top_k: Any, top_p: Any, min_p: Any) -> int:
    from hocket.serving.engine.draw import Choices, draw_tokens

    tokens, good = draw_tokens(
        logits,
        Choices(at=[at], temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p]),
    )
    assert bool(good.all())
    return int(tokens)


def a_row(kind: str, size: int, seed: int = 0) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, size, generator=generator)
    if kind == "flat":
        return noise * 0.3
    if kind == "peaked":
        order = torch.randperm(size, generator=generator)
        return (-2.0 * torch.arange(1, size + 1).float().log())[order].unsqueeze(0)
    if kind == "rounded":  # many equals
        return (noise * 4).round() / 4
    if kind == "masked":
        return noise.masked_fill(torch.arange(size) % 7 != 0, -torch.inf)
    return noise * 3


@pytest.mark.parametrize("kind", ["flat", "peaked", "rough", "masked"])
@pytest.mark.parametrize(
    "options",
    [
        (1.0, None, None, None),
        (0.7, None, None, None),
        (1.0, 40, None, None),
        (1.0, 400, None, None),
        (1.0, None, 0.9, None),
        (1.0, None, 0.3, None),
        (1.0, None, None, 0.1),
        (0.8, 50, 0.9, None),
        (1.3, 600, 0.95, 0.02),
        (1.5, None, 0.8, 0.05),
    ],
)
def test_the_distribution_is_that_of_transformers(kind: str, options: Any) -> None:
    for size in (V, 37) if kind == "rough" else (V,):
        logits = a_row(kind, size)
        wanted = hf_probabilities(logits, *options)[0]
        found = probabilities(logits, *options)
        # Drawn at equal distances along the cumulative distribution: each token comes as often as
        # its probability says, but for the part it shares with a neighbour at each of its ends.
        assert float((found - wanted).abs().max()) <= 1.01 / COUNT
        assert float(found[wanted == 0].sum()) == 0


@pytest.mark.parametrize("kind", ["flat", "peaked", "rough"])
@pytest.mark.parametrize("options", [(1.0, 40, 0.9, None), (1.0, None, 0.9, 0.01)])
def test_the_support_is_that_of_transformers(kind: str, options: Any) -> None:
    """Every token that transformers keeps comes when it is asked for by its place."""
    logits = a_row(kind, 300)
    wanted = hf_probabilities(logits, *options)[0]
    middles = wanted.cumsum(0) - wanted / 2
    for token in wanted.nonzero().squeeze(1).tolist():
        assert one(logits, float(middles[token]), *options) == token


def test_of_equals_at_the_edge_of_top_p_the_first_are_kept() -> None:
    import torch

    logits = torch.zeros(1, V)
    assert one(logits, 0.0, 1.0, None, 0.5, None) == 0
    assert one(logits, 1 - 2**-53, 1.0, None, 0.5, None) == V // 2 - 1
    # at the edge of top-k all equals are, as in transformers
    assert one(logits, 1 - 2**-53, 1.0, 3, None, None) == V - 1
    rounded = a_row("rounded", V)
    found = probabilities(rounded, 1.0, 64, 0.5, None).nonzero().squeeze(1)
    assert float(rounded[0, found].min()) >= float(rounded.topk(64).values.min())


@pytest.mark.parametrize("kind", ["flat", "peaked", "rough", "rounded", "masked"])
def test_buckets_keep_what_sorting_keeps(kind: str) -> None:
    import torch

    from hocket.serving.engine import truncation

    for top_p, size in itertools.product((1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999), (V, 100)):
        x = a_row(kind, size)
        x = x - x.amax()
        share = torch.full((1, 1), top_p)
        sorted_, bucketed = x.softmax(-1), x.softmax(-1)
        truncation.nucleus_by_sort(x, sorted_, share)
        truncation.nucleus_by_buckets(x, bucketed, share)
        different = (sorted_ > 0) != (bucketed > 0)
        # the sums are taken in another order: a token on the very edge may fall on either side
        assert int(different.sum()) <= 1
        assert float(x.softmax(-1)[different].sum()) < 2e-4


@pytest.mark.parametrize("kind", ["peaked", "rounded", "rough"])
def test_rows_done_whole_are_drawn_identically(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.serving.engine import draw

    logits = a_row(kind, V)
    for options in (
        (1.0, 20, None, None),
        (1.0, None, 0.4, None),
        (0.7, 30, 0.5, 0.01),
        (1.0, None, None, 0.2),
        (1.0, None, 0.6, 0.2),
    ):
        quick = probabilities(logits, *options)
        candidates = draw.kept_entries

        def undecided(*arguments: Any, _inner: Any = candidates) -> Any:
            ids, weights, decided = _inner(*arguments)
            return ids * 0, weights, decided & False

        with monkeypatch.context() as patch:
            patch.setattr(draw, "kept_entries", undecided)
            whole = probabilities(logits, *options)
        assert float((quick - whole).abs().max()) <= 1.01 / COUNT
        assert (quick > 0).equal(whole > 0)


def test_a_row_is_drawn_identically_alone_and_among_others() -> None:
    import torch

    from hocket.serving.engine.draw import Choices, draw_tokens, uniform

    generator = torch.Generator().manual_seed(3)
    kinds = ["flat", "peaked", "rough", "rounded"]
    rows = torch.cat([a_row(kinds[i % 4], V, seed=i) for i in range(64)])
    choices = [
        (
            0.5 + i / 64,
            [None, 5, 50, 2000][i // 4 % 4],
            [None, 0.9, 0.2][i % 3],
            [None, 0.02][i % 2],
        )
        for i in range(64)
    ]
    at = [uniform(i, i % 3, 100 + i) for i in range(64)]
    alone = [one(rows[i : i + 1], at[i], *choices[i]) for i in range(64)]
    for _ in range(3):
        order = torch.randperm(64, generator=generator).tolist()
        temperature, top_k, top_p, min_p = zip(*(choices[i] for i in order), strict=True)
        together, _ = draw_tokens(
            rows[order],
            Choices(
                at=[at[i] for i in order],
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
            ),
        )
        assert together.tolist() == [alone[i] for i in order]


def test_many_keyed_draws_come_as_often_as_their_probability() -> None:
    """A chi-square of 20000 draws over 30 tokens, with numbers that are always the same."""
    import torch

    from hocket.serving.engine.draw import Choices, draw_tokens, uniform

    logits = a_row("rough", 30, seed=5) / 3
    count = 20000
    tokens, _ = draw_tokens(
        logits.expand(count, -1),
        Choices(
            at=[uniform(7, i % 4, i // 4) for i in range(count)],
            temperature=[0.9] * count,
            top_k=[20] * count,
            top_p=[0.95] * count,
            min_p=[None] * count,
        ),
    )
    wanted = hf_probabilities(logits, 0.9, 20, 0.95, None)[0] * count
    found = torch.bincount(tokens, minlength=30)
    kept = wanted > 0
    assert int(found[~kept].sum()) == 0
    square = float(((found - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert square < freedom + 3.1 * (2 * freedom) ** 0.5  # one in a thousand beyond


def test_uniform_depends_on_each_of_its_arguments() -> None:
    from hocket.serving.engine.draw import uniform

    found = {uniform(s, i, p) for s, i, p in itertools.product(range(8), repeat=3)}
    assert len(found) == 512
    assert all(0 <= value < 1 for value in found)
    assert uniform(3, 1, 7) == uniform(3, 1, 7) == 0.04874440785069312
    assert uniform(-(2**63), 2**31, 2**31) < 1


finite = st.floats(-80, 80, width=32)


@given(
    logits=st.lists(
        st.one_of(finite, st.sampled_from([0.0, -1e30, 1e30])), min_size=3, max_size=70
    ),
    temperature=st.sampled_from([1e-300, 1e-6, 0.5, 1.0, 1e6, 1e300]),
    top_k=st.sampled_from([None, 1, 2, 1000]),
    top_p=st.sampled_from([None, 1e-9, 0.5, 1 - 1e-9, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.5, 1.0]),
    at=st.sampled_from([0.0, 2**-53, 0.5, 1 - 2**-53]),
)
@settings(max_examples=200)
def test_extremes(
    logits: Any, temperature: float, top_k: Any, top_p: Any, min_p: Any, at: float
) -> None:
    import torch

    row = torch.tensor([logits])
    token = one(row, at, temperature, top_k, top_p, min_p)
    assert 0 <= token < len(logits)
    best = max(row[0].tolist())
    chosen = float(row[0, token])
    if (top_k == 1 or top_p == 1e-9 or min_p == 1.0) and temperature == 1.0:
        assert chosen > best - 1e-4 * max(1, abs(best)) or best - chosen < 1e-30
    if temperature <= 1e-6:
        assert best - chosen < 1e-3 * max(1.0, abs(best))
    if top_k == 1:
        assert chosen == best
    if chosen != best and temperature == 1.0:
        assert best - chosen < 110  # nothing whose probability is 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_are_reported_and_harm_no_other(bad: float) -> None:
    import torch

    from hocket.serving.engine.draw import Choices, draw_tokens

    rows = torch.cat([a_row("rough", V, seed=i) for i in range(6)])
    rows[1, 17] = bad
    rows[3] = -torch.inf
    rows[4] = float("nan")
    for options in ((None, None, None), (40, None, None), (None, 0.9, None), (None, None, 0.1)):
        top_k, top_p, min_p = ([each] * 6 for each in options)
        at = [0.3] * 6
        tokens, good = draw_tokens(
            rows, Choices(at=at, temperature=[0.8] * 6, top_k=top_k, top_p=top_p, min_p=min_p)
        )
        assert good.tolist() == [True, False, True, False, False, True]
        for row in (0, 2, 5):
            assert int(tokens[row]) == one(rows[row : row + 1], 0.3, 0.8, *options)


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 513, 1000, V])
def test_largest_and_likeliest_are_those_of_a_stable_sort(size: int) -> None:
    import torch

    from hocket.serving.engine.top_logits import largest, top_token

    for seed, kind in enumerate(("rough", "rounded", "flat")):
        x = torch.cat([a_row(kind, size, seed=10 * seed + i) for i in range(5)])
        if size > 70:
            x[2] = 0.5
            x[3, 7:] = -torch.inf
        order = x.sort(dim=-1, descending=True, stable=True)
        values, ids = top_token(x)
        assert values.equal(order.values[:, 0])
        assert ids.equal(order.indices[:, 0])
        for count in {min(count, size) for count in (1, 2, 5, 20)}:
            values, ids = largest(x, count)
            assert values.equal(order.values[:, :count])
            assert ids.equal(order.indices[:, :count])
