"""Every legal layout, and no other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hocket.catalogue import shapes
from hocket.cost.layout_batch import NAMES, SCHEDULES
from hocket.jobs.validate import resolved_microbatches
from hocket.planning.decoder import decoder
from hocket.planning.enumeration import SearchSpace
from hocket.planning.layouts import Layouts, layout_at, row, runs_here, tensor_degrees, unmet_pin
from hocket.planning.pins import layout_pins
from hocket.schedules.registry import build_schedule
from hocket.spec.capabilities import runs
from hocket.spec.errors import HocketError, LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import Workload
from tests.support.columns import layout_columns, legal_layouts

SMALL = decoder(
    layers=6, hidden=512, heads=8, kv_heads=2, ffn=1024, vocab=1000, gated=True, name="small"
)


MIXTURE = shapes.shape("tiny-mixtral")

LONG = decoder(
    layers=24, hidden=512, heads=8, kv_heads=2, ffn=1024, vocab=1000, gated=True, name="long"
)


def layouts(found: Layouts) -> list[Layout]:
    return [layout_at(found, i) for i in range(len(found))]


def test_every_legal_mesh_and_no_other() -> None:
    """Against a loop over all degrees, each asked about alone; eight stages of six layers are
    embedding, layers and head (`light-ends`)."""
    found = {(one.dp, one.pp, one.cp, one.tp) for one in layouts(legal_layouts(SMALL, 8, 64, 12))}
    expected = {
        (dp, pp, cp, tp)
        for dp, pp, cp, tp in itertools.product((1, 2, 4, 8), repeat=4)
        if dp * pp * cp * tp == 8
        and 12 % dp == 0
        and (pp <= 6 or (6 + 2) % pp == 0)
        and tp in (1, 2, 4, 8)
    }
    assert found == expected


def test_every_row_is_a_layout_that_its_schedule_can_be_built_for() -> None:
    seen = set()
    for one in layouts(legal_layouts(SMALL, 8, 64, 12)):
        assert one.world_size == 8
        assert one.microbatches is not None
        assert 12 % (one.dp * one.microbatches) == 0
        key = one.schedule, one.pp, one.virtual_stages, one.microbatches
        if key not in seen:
            seen.add(key)
            build_schedule(one, one.microbatches)  # checked: it would not hang
    assert {name for name, *_ in seen} == {"1f1b", "interleaved", "zero-bubble", "zb-v"}


def test_rows_differ() -> None:
    found = layouts(legal_layouts(SMALL, 8, 64, 12))
    assert len(set(found)) == len(found) > 100


def test_pins_leave_only_what_they_name() -> None:
    pins = layout_pins(["tp=2", "recompute=full", "microbatch=2", "zero=3", "schedule=gpipe"])
    found = legal_layouts(SMALL, 8, 64, 16, pins=pins)
    assert len(found)
    assert set(found.microbatch) == {2.0}
    for one in layouts(found):
        assert (one.tp, one.recompute, one.zero, one.schedule) == (2, "full", 3, "gpipe")


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("tpp=2", "did you mean 'tp'"),
        ("tp", "has no value"),
        ("tp=two", "--pin 'tp=two' is not a whole number of at least 1\n  hint: --pin tp=1"),
        ("tp=0", "--pin 'tp=0' is not a whole number of at least 1\n  hint: --pin tp=1"),
        ("shard=0", "--pin 'shard=0' is not a whole number"),
        ("schedule=1f1c", "did you mean '1f1b'"),
        ("microbatch=0", "--pin microbatch=1"),
        ("recompute=som", "unknown recompute"),
        ("schedule=zb-h2", "unknown schedule"),
    ],
)
def test_a_pin_that_cannot_be(pin: str, said: str) -> None:
    with pytest.raises(HocketError, match=said):
        layout_pins([pin])


def test_a_pin_said_twice() -> None:
    assert layout_pins(["tp=2", "tp=2"]) == {"tp": 2}
    with pytest.raises(OptionError, match="gives tp twice: 2 and 4"):
        layout_pins(["tp=2", "tp=4"])


def test_state_is_shared_by_all_data_ranks_or_by_those_of_one_domain() -> None:
    found = layouts(
        legal_layouts(
            SMALL, 8, 64, 16, pins={"zero": 3, "pp": 1, "cp": 1}, space=SearchSpace(domain=4)
        )
    )
    shards = {(one.dp, one.tp, one.shard) for one in found}
    assert shards == {(8, 1, None), (8, 1, 4), (4, 2, None), (4, 2, 2), (2, 4, None), (1, 8, None)}
    pinned = layouts(legal_layouts(SMALL, 8, 64, 16, pins=layout_pins(["shard=2", "zero=1"])))
    assert pinned
    assert all(one.shard == 2 or one.dp == 2 for one in pinned)
    free = layouts(legal_layouts(SMALL, 8, 64, 16, pins=layout_pins(["shard=2"])))
    assert {one.zero for one in free} == {1, 2, 3}
    here = layouts(legal_layouts(SMALL, 8, 64, 16, here=True, space=SearchSpace(domain=4)))
    assert {one.zero for one in here if one.shard} == {1, 2, 3}


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tp": 3}, "does not divide its 8 heads; it may be 1, 2, 4, 8"),
        ({"pp": 7}, "6 layers, fewer than pp 7"),
        ({"ep": 2}, "it has no experts to divide"),
        ({"etp": 1}, "it has no experts to divide"),
        ({"tp": 8, "pp": 2}, "use 16 GPUs, which does not divide 8"),
        ({"microbatches": 5}, "global batch of 12 does not divide by microbatches 5"),
        ({"tp": 1, "sequence_parallel": True}, "over tensor ranks, and tp is pinned at 1"),
        ({"shard": 2, "zero": 0}, "shard 2 applies to ZeRO, and zero is pinned at 0"),
        ({"tp": 2}, None),
    ],
)
def test_why_pins_are_not_legal(pins: dict[str, int], said: str | None) -> None:
    found = unmet_pin(SMALL, 8, 64, 12, pins)
    assert (found is None) if said is None else (found is not None and said in found)


def test_ep_may_be_pinned_by_itself() -> None:
    assert layout_pins(["ep=4", "dp=8"]) == {"ep": 4, "dp": 8}


@pytest.mark.parametrize("model", [SMALL, MIXTURE], ids=["dense", "experts"])
def test_what_runs_here_is_what_the_table_of_capabilities_says(model: ModelShape) -> None:
    found = legal_layouts(model, 8, 64, 12, space=SearchSpace(domain=2))
    assert runs_here(found).tolist() == [runs(one) for one in layouts(found)]
    here = legal_layouts(model, 8, 64, 12, here=True, space=SearchSpace(domain=2))
    assert sorted(map(str, layouts(here))) == sorted(
        str(one) for one in layouts(found) if runs(one)
    )


def test_a_degree_that_divides_no_heads_is_not_there() -> None:
    assert tensor_degrees(SMALL) == [1, 2, 4, 8]
    odd = decoder(layers=2, hidden=480, heads=6, kv_heads=3, ffn=960, vocab=100, gated=True)
    assert tensor_degrees(odd) == [1, 3, 6]


@pytest.mark.parametrize(
    "text",
    [
        "dp2.pp2.tp2:microbatches=3,zero=1,recompute=full,sequence_parallel=true",
        "dp4:microbatches=1,zero=3,shard=2",
        "pp2.tp2:schedule=interleaved,microbatches=4,virtual_stages=3",
        "pp4:schedule=zero-bubble,microbatches=6",
        "pp2:schedule=zb-v,microbatches=3,virtual_stages=2",
        "dp2.tp2.etp1:microbatches=1",
        "dp2.tp2.ep2:microbatches=1",
        "dp2.tp2.ep4.etp1:microbatches=1",
    ],
)
def test_a_layout_goes_into_a_row_and_comes_back(text: str) -> None:
    layout = Layout.parse(text)
    model = MIXTURE if layout.splits_experts else SMALL
    assert layout_at(row(layout, model, 64, 12), 0) == layout


def test_open_microbatches_are_resolved() -> None:
    assert layout_at(row(Layout.parse("dp2.pp2"), SMALL, 64, 16), 0).microbatches == 4
    assert layout_at(row(Layout.parse("dp2"), SMALL, 64, 16), 0).microbatches == 1
    # As a run resolves them: at most 8,192 tokens at once.
    long = layout_at(row(Layout.parse("dp2"), SMALL, 4096, 16), 0)
    work = Workload(seq_len=4096, global_batch=16)
    assert long.microbatches == 4 == resolved_microbatches(Layout.parse("dp2"), work)


def test_a_cut_by_hand_is_estimated_as_the_same_cut_by_name() -> None:
    named, by_hand = (
        row(Layout.parse(f"pp4:microbatches=6,pipeline_split={cut}"), SMALL, 64, 12)
        for cut in ("light-ends", "1-2-2-1")
    )
    assert named == by_hand
    assert not row(Layout.parse("pp4:pipeline_split=2-2-1-1"), SMALL, 64, 12).lighter[0]
    assert not row(Layout.parse("pp2:pipeline_split=3-3"), SMALL, 64, 12).lighter[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp3", "8 heads do not divide over tp 3"),
        ("pp8", "6 layers cannot be cut into 8 stages"),
        ("dp5", "global batch of 12 does not divide over dp 5"),
        ("dp2:microbatches=4", "does not divide into 4 microbatches"),
        ("cp64", "does not divide over 2 x cp"),
        ("dp2.ep2", "has no experts to divide"),
        ("tp2.etp1", "has no experts to divide"),
        ("dp2:sequence_parallel=true", "over tensor ranks, and tp is 1"),
    ],
)
def test_a_layout_that_does_not_fit(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said) as caught:
        row(Layout.parse(text), SMALL, 64, 12)
    hint = caught.value.hint or "--"
    assert hint.startswith("--"), "flags to paste"
    if hint.startswith("--layout "):
        row(Layout.parse(hint.removeprefix("--layout ")), SMALL, 64, 12)


def test_a_schedule_file_has_no_price() -> None:
    with pytest.raises(OptionError, match="only schedules with a name"):
        row(Layout.parse("pp2:schedule=mine.txt"), SMALL, 64, 12)


def test_names_are_those_of_the_registry() -> None:
    from hocket.schedules import NAMES as KNOWN

    assert set(KNOWN) == set(NAMES)
    assert set(NAMES.values()) <= set(SCHEDULES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dp8", "1f1b"),
        ("pp2:schedule=interleaved,virtual_stages=2", "interleaved"),
        ("pp2:virtual_stages=2", "interleaved"),
        ("dp2:virtual_stages=2", "1f1b"),
        ("pp2:schedule=gpipe,virtual_stages=2", "gpipe"),
        ("pp2:schedule=zero-bubble", "zb-h1"),
        ("pp2:schedule=zb-v,virtual_stages=2", "zb-v"),
        ("pp2:schedule=sequential", "sequential"),
    ],
)
def test_each_schedule_has_its_own_price(text: str, value: str) -> None:
    found = layout_columns([Layout.parse(text)], 8)
    assert SCHEDULES[int(found.schedule[0])] == value


def test_nothing_legal_is_an_empty_answer() -> None:
    found = legal_layouts(SMALL, 7, 64, 12)
    assert len(found) == 0
    assert runs_here(found).dtype == np.bool_


def test_more_stages_of_a_rank_only_where_they_are_shorter() -> None:
    found = layouts(legal_layouts(LONG, 4, 64, 16, pins={"pp": 4}))
    # 24 layers on four ranks, six each: stages of 6, 3, 2 and 1 layers; 4 or 5 make none shorter
    # than 3 does.
    assert {one.virtual_stages for one in found} == {1, 2, 3, 6}
    pinned = layouts(legal_layouts(LONG, 4, 64, 16, pins={"pp": 4, "virtual_stages": 5}))
    assert {one.virtual_stages for one in pinned} == {5}
    assert not len(legal_layouts(LONG, 4, 64, 16, pins={"pp": 4, "virtual_stages": 7}))


def test_recompute_under_deferred_weight_gradients_is_of_hocket_alone() -> None:
    pins = {"pp": 2, "schedule": "zero-bubble", "zero": 0}
    for deferred, more in ((True, {"full", "norm+activation"}), (False, set())):
        found = layouts(
            legal_layouts(LONG, 4, 64, 16, pins=pins, space=SearchSpace(deferred=deferred))
        )
        assert {one.recompute for one in found} == {"none", "selective", *more}
