"""What one rank has, counted by hand: scores under a mask, rows and columns of a matmul."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hocket.catalogue.shapes import shape
from hocket.cost.local import (
    held_elements,
    local_matmul,
    matmul_shards,
    stacked_experts,
    visible_share,
)
from hocket.cost.state import local_parameters
from hocket.cost.terms import terms
from hocket.spec.layout import Layout
from tests.support.columns import layout_columns


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 7, 48, 63, 64, 100, None])
def test_visible_scores_are_those_of_the_mask(window: int | None, causal: bool) -> None:
    queries, keys = np.indices((64, 64))
    width = window or 64
    mask = (keys <= queries) & (keys > queries - width) if causal else keys < width
    share = visible_share(64.0, window or math.inf, causal)
    assert share == pytest.approx(mask.mean(), abs=1 / 128)  # half of the diagonal


def test_the_widest_window_is_no_window() -> None:
    """Scores grow with the window without a jump, up to causal attention's half."""
    shares = [float(visible_share(1000, window, True)) for window in range(1, 1001)]
    assert shares == sorted(shares)
    assert shares[-1] == 0.5
    assert np.diff(shares).max() < 0.0011


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "text", ["dp1", "tp4", "tp4:sequence_parallel=true", "dp4.ep4", "dp2.tp2.ep4.etp1"]
)
def test_one_layout_is_a_row_of_many(name: str, text: str) -> None:
    layout = Layout.parse(text)
    many = layout_columns([layout, Layout(dp=2)], 8)
    for block in shape(name).blocks.values():
        for product in block.products:
            here = local_matmul(product, 2048, layout)
            there = local_matmul(product, np.array([2048.0, 2048.0]), many)
            assert [float(np.ravel(x)[0]) for x in there] == [float(x) for x in here]
            # All ranks together multiply what one would: nothing is left out, nothing twice.
            m, n, k, batch = map(float, here)
            copies = 1.0 if product.split != "outside" or layout.sequence_parallel else layout.tp
            ranks = layout.tp / copies
            done = m * n * k * batch * ranks
            assert done == pytest.approx(2048 * product.count * product.n * product.k)


@pytest.mark.parametrize(
    "name", ["gpt2", "tiny-llama", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"]
)
def test_weights_of_many_layouts_are_those_of_each(name: str) -> None:
    """Odd vocabularies, key/value heads that several ranks hold, experts over ranks."""
    model, layouts = shape(name), [Layout(dp=8), Layout(tp=2), Layout(tp=4), Layout(tp=8)]
    if model.experts:
        layouts += [Layout(dp=4, ep=4), Layout(dp=2, tp=4, ep=2), Layout(dp=2, tp=4, ep=8, etp=1)]
    at = layout_columns(layouts, 8)
    of_terms = dict(zip(dict.fromkeys(model.layers), terms(model).kinds, strict=True))
    for kind, (_, block) in of_terms.items():
        experts = stacked_experts(model.blocks[kind].products)
        for row, layout in enumerate(layouts):
            counted = sum(held_elements(w, layout, experts) for w in model.blocks[kind].weights)
            assert local_parameters(block, at).total[row] == pytest.approx(counted, rel=1e-12)


def test_copied_heads_widen_a_matmul() -> None:
    """Two key/value heads on four ranks: each rank multiplies by a whole one."""
    block = shape("tiny-llama").blocks[shape("tiny-llama").layers[0]]
    at = layout_columns([Layout(tp=2), Layout(tp=4)], 8)
    keys = next(p for p in block.products if p.name.endswith("k_proj"))
    shards = matmul_shards(block, keys)
    found = local_matmul(keys, 1.0, at, shards=shards)[1]
    assert shards == ((keys.n // 2, 2),)
    assert list(found) == [keys.n / 2, keys.n / 2]


def test_an_odd_vocabulary_is_padded_on_the_first_rank() -> None:
    model, at = shape("gpt2"), layout_columns([Layout(tp=2), Layout(tp=4)], 8)
    found = terms(model).head.products[0]
    assert list(local_matmul(found, 1.0, at, shards=found.shards)[1]) == [25129, 12565]
