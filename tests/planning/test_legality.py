"""What the planner enumerates is what a run is allowed, and the other way round."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hocket.catalogue import models, shapes
from hocket.jobs import validate as validation
from hocket.jobs.validate import validate_layout
from hocket.models.dimensions import Dimensions
from hocket.models.dimensions import dimensions as of_config
from hocket.planning import enumeration
from hocket.planning.decoder import decoder
from hocket.planning.enumeration import SearchSpace
from hocket.planning.layouts import layout_at, row, tensor_degrees
from hocket.spec.capabilities import runs
from hocket.spec.errors import LayoutError, ScheduleError
from hocket.spec.layout import CUTS, Layout
from hocket.spec.model_shape import Handed, ModelShape
from hocket.spec.run import Workload
from tests.support.columns import legal_layouts

SEQ_LEN, BATCH = 36, 24


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands are refused here, and what lies nearest to each is not in question."""
    monkeypatch.setattr(validation, "nearest_layouts", lambda *_, **__: [])


MODELS = [
    # layers, heads, key/value heads, inner features, vocabulary, inputs that a convolution reads
    # Inner features divide wherever heads do: `decoder` leaves their number out of its weights.
    (6, 8, 2, 64, 1000, 0),
    (4, 12, 4, 96, 50, 0),
    (5, 6, 3, 36, 7, 0),
    (3, 8, 8, 24, 9, 0),
    (2, 4, 1, 48, 3, 0),
    (4, 12, 12, 48, 100, 0),
    (4, 12, 12, 48, 100, 7),  # chunks of 9 at cp2, of 6 at cp3
]


def shape(sizes: tuple[int, ...]) -> ModelShape:
    layers, heads, kv_heads, ffn, vocab, width = sizes
    found = decoder(
        layers=layers, hidden=8 * heads, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
    )
    if not width:
        return found
    handed = (Handed(inputs=8 * heads * width, width=width),)
    blocks = {
        kind: dataclasses.replace(block, handed=handed) if kind in found.layers else block
        for kind, block in found.blocks.items()
    }
    return dataclasses.replace(found, blocks=blocks)


def dimensions(sizes: tuple[int, ...]) -> Dimensions:
    layers, heads, kv_heads, ffn, vocab, width = sizes
    return Dimensions(
        hidden_size=8 * heads,
        num_layers=layers,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_positions=None,
        num_experts=0,
        tied=False,
        handed_width=width,
    )


WORKLOAD = Workload(seq_len=SEQ_LEN, global_batch=BATCH)


def allowed(sizes: tuple[int, ...], layout: Layout) -> bool:
    try:
        validate_layout(dimensions(sizes), layout, WORKLOAD)
    except LayoutError:
        return False
    return True


def by_plan(sizes: tuple[int, ...], layout: Layout) -> bool:
    try:
        row(layout, shape(sizes), SEQ_LEN, BATCH)
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_planner_and_runtime_allow_the_same(sizes: tuple[int, ...]) -> None:
    legal = []
    degrees = (1, 2, 3, 5, 6, 8, 12)
    for dp, pp, tp in itertools.product(degrees, degrees[:6], degrees):
        options = itertools.product(
            (None, 2, 5), (False, True), ("balanced", "light-ends"), (1, 2, 4)
        )
        for microbatches, slices, cut, cp in options:
            layout = Layout(
                dp=dp,
                pp=pp,
                tp=tp,
                cp=cp,
                microbatches=microbatches,
                sequence_parallel=slices,
                pipeline_split=cut,
            )
            if layout.world_size > 256:
                continue  # hocket starts no more on one machine, whatever the model
            legal.append(allowed(sizes, layout))
            assert legal[-1] == by_plan(sizes, layout), layout
    assert True in legal
    assert False in legal


@pytest.mark.parametrize("sizes", MODELS, ids=str)
@pytest.mark.parametrize("num_gpus", [1, 2, 4, 6, 12])
def test_no_proposal_is_refused(sizes: tuple[int, ...], num_gpus: int) -> None:
    found = legal_layouts(
        shape(sizes), num_gpus, SEQ_LEN, BATCH, here=True, space=SearchSpace(domain=4)
    )
    proposed = {layout_at(found, index) for index in range(len(found))}
    for one in proposed:
        assert runs(one)
        assert validate_layout(dimensions(sizes), one, WORKLOAD) == one
    meshes = {(one.dp, one.pp, one.cp, one.tp) for one in proposed}
    expected = {
        (dp, pp, cp, tp)
        for dp, pp, cp, tp in itertools.product(range(1, num_gpus + 1), repeat=4)
        if dp * pp * cp * tp == num_gpus
        if any(
            allowed(sizes, Layout(dp=dp, pp=pp, cp=cp, tp=tp, pipeline_split=cut)) for cut in CUTS
        )
    }
    assert meshes == expected


def test_no_proposal_of_experts_is_refused() -> None:
    """With hybrid sharding among them, which the state of experts over ranks does not have."""
    name = "tiny-mixtral"
    found = legal_layouts(
        shapes.shape(name), 8, SEQ_LEN, BATCH, here=True, space=SearchSpace(domain=2)
    )
    proposed = [layout_at(found, index) for index in range(len(found))]
    assert any(one.shard and not one.splits_experts for one in proposed)
    assert {one.ep for one in proposed} > {1, 2}
    for one in proposed:
        assert validate_layout(of_config(models.config(name)), one, WORKLOAD) == one


@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_the_machines_candidates_are_among_what_is_allowed(sizes: tuple[int, ...]) -> None:
    """Its candidates know heads, layers and batch alone; what is left is asked of the validator."""
    degrees = tensor_degrees(shape(sizes))
    for one in enumeration.candidate_layouts(shape(sizes), WORKLOAD, 8):
        assert allowed(sizes, one) == (one.tp in degrees), one


@pytest.mark.parametrize("text", ["pp2:microbatches=5", "dp2.pp3", "dp3.pp2", "dp24.pp2", "dp2"])
def test_microbatches_left_open_are_resolved_identically(text: str) -> None:
    layout, sizes = Layout.parse(text), MODELS[0]
    try:
        found = layout_at(row(layout, shape(sizes), SEQ_LEN, BATCH), 0)
    except (LayoutError, ScheduleError):
        assert not allowed(sizes, layout)
        return
    assert validate_layout(dimensions(sizes), layout, WORKLOAD) == found


@pytest.mark.parametrize(
    ("own", "ranks", "first"),
    [
        ("dp4.ep4", 3, "dp3"),
        ("dp6.tp2.ep4.etp1", 8, "dp4.tp2.ep4.etp1"),
        ("dp4:zero=1,shard=4", 2, "dp2:zero=1,shard=2"),
        ("dp4:microbatches=5", 3, "dp3:microbatches=10"),  # 7 do not divide 20 sequences
    ],
)
def test_fewer_ranks_hold_experts_and_shards_of_state(own: str, ranks: int, first: str) -> None:
    found = list(enumeration.resized(Layout.parse(own), ranks, 60))
    assert str(found[0]) == first
    assert all(one.world_size <= ranks for one in found)
