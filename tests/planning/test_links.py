"""Links of a layout on a cluster: bytes by hand, links crossed, placement, the memory pool."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.catalogue import shapes
from hocket.catalogue.hardware import cluster
from hocket.planning.links import AxisLinks, alternative, axis_links, cluster_links
from hocket.planning.placement import best_order, estimated_orders, orders, placed_forecast
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.pool import pool
from hocket.planning.problem import Problem
from hocket.spec.layout import Layout


def problem(text: str, model: str = "llama-2-7b", batch: int = 64) -> Problem:
    return Problem(
        shape=shapes.shape(model), cluster=cluster(text), seq_len=4096, global_batch=batch
    )


def by_axis(asked: Problem, layout: str) -> dict[str, AxisLinks]:
    return {one.axis: one for one in axis_links(asked, Layout.parse(layout))}


def test_bytes_of_tensor_parallelism_by_hand() -> None:
    found = by_axis(problem("8xA100-SXM-80"), "dp4.tp2:microbatches=8")
    hidden = 2 * 4096 * 4096 * 2  # two sequences of a microbatch, in bf16
    loss = 2 * 2 * 2 * 4096 * 4
    assert found["tp"].messages == 8 * (4 * 32 + 2 + 1)
    assert found["tp"].bytes == 8 * (hidden * (4 * 32 + 2) + loss)
    assert found["tp"].link == "NVLink 3, switch"
    assert found["tp"].rate == pytest.approx(240e9)
    # Half of the all-reduces' bytes out and half back: what is sent equals what is handed over.
    assert found["tp"].sent == pytest.approx(found["tp"].bytes, rel=1e-3)
    parameters = shapes.shape("llama-2-7b").num_parameters / 2
    assert found["dp"].bytes == pytest.approx(4 * parameters, rel=1e-4)


def test_seconds_follow_the_rates() -> None:
    tp = by_axis(problem("8xA100-SXM-80"), "dp4.tp2:microbatches=8")["tp"]
    assert tp.seconds == tp.on["nvlink3"]
    assert tp.on["nvlink2"] / tp.on["nvlink3"] == pytest.approx(2, rel=0.01)
    # 9.5 in nominal rates; rings reach 80% of NVLink and 88% of PCIe.
    assert tp.on["pcie4"] / tp.on["nvlink3"] == pytest.approx(9.52 * 0.8 / 0.88, rel=0.01)
    assert tp.on["net100g"] > tp.on["net200g"] > tp.on["net400g"]
    assert tp.on["nvlink3-mesh"] / tp.on["nvlink3"] == pytest.approx(7 * 0.8 / 0.9, rel=0.01)
    eight = alternative("nvlink3-mesh", 8)
    assert eight.tiers[0][0].rate == 300e9


def test_the_links_of_clusters() -> None:
    def titles(text: str) -> list[tuple[str, int | None]]:
        return [(link.title, size) for link, size in cluster_links(cluster(text)).tiers]

    assert titles("8xA100-SXM-80") == [("NVLink 3, switch", None)]
    assert titles("2x8xH100-SXM-80") == [
        ("NVLink 4, switch", 8),
        ("network 3200 Gb/s a node", None),
    ]
    assert titles("16xA100-PCIe-80") == [
        ("NVLink 3, bridge", 2),
        ("PCIe", 8),
        ("network 200 Gb/s a node", None),
    ]
    assert titles("8xRTX4090") == [("PCIe", None)]


def test_groups_of_a_host_share_its_cards() -> None:
    found = by_axis(problem("2x8xA100-SXM-80"), "dp2.tp8:microbatches=8")["dp"]
    # Eight groups cross at once, each over one of eight cards of 25 GB/s at 73%.
    assert found.rate == pytest.approx(25e9 * 0.73)
    alone = by_axis(problem("2x8xA100-SXM-80"), "pp2.tp8:microbatches=8")["pp"]
    assert alone.rate == pytest.approx(25e9 * 0.73)


def test_the_order_decides_what_crosses_the_network() -> None:
    asked = problem("2x8xA100-SXM-80")
    layout = Layout.parse("dp4.tp4:microbatches=4")
    wrong = dataclasses.replace(layout, order=("dp", "tp", "cp", "pp"))
    crossing = {one.axis: one.link for one in axis_links(asked, wrong)}
    assert crossing["tp"].startswith("network")
    assert crossing["dp"].startswith("NVLink")
    assert best_order(asked, wrong).order[0] == "tp"
    assert best_order(asked, layout) == layout
    (best, order), *_, (worst, _) = estimated_orders(asked, wrong)
    assert order[0] == "tp"
    assert worst > 2 * best


def test_a_step_in_another_order_waits_for_what_crosses_slower_links() -> None:
    asked = problem("2x8xA100-SXM-80")
    text = "dp4.tp4:microbatches=4"
    (usual,) = plan_one(asked, Layout.parse(text)).layouts
    (wrong,) = plan_one(asked, Layout.parse(text + ",order=dp-tp-cp-pp")).layouts
    assert wrong.step_seconds.median > 1.1 * usual.step_seconds.median
    assert wrong.layout.order[0] == "dp"
    for found in (usual, wrong):
        assert sum(found.parts.values()) == pytest.approx(found.step_seconds.median, rel=1e-6)
    assert wrong.parts["communication inside layers"] > usual.parts["communication inside layers"]
    assert wrong.memory == usual.memory
    # The planner finds back: the order that it was given was not the best.
    assert placed_forecast(asked, wrong).layout.order[0] == "tp"
    assert placed_forecast(asked, usual) is usual


def test_layouts_are_ranked_with_their_axes_in_the_best_order() -> None:
    """One that is placed better is faster than others that were ahead of it before."""
    asked = problem("2x8xA100-SXM-80", "llama-3-8b")
    asked = dataclasses.replace(asked, seq_len=8192)
    found = best_layouts(asked, top=10).layouts
    seconds = [float(f"{one.step_seconds.median:.4g}") for one in found]
    assert seconds == sorted(seconds)
    assert sum(one.layout.order != Layout().order for one in found[:5]) >= 1
    assert best_layouts(asked, top=1).layouts[0].layout == found[0].layout


def test_state_is_sharded_over_data_and_context_ranks() -> None:
    asked = problem("2x8xA100-SXM-80")
    for zero in (0, 1, 3):
        layout = f"dp8.cp2:microbatches=1,zero={zero}"
        found = by_axis(asked, f"{layout},order=dp-cp-tp-pp")
        state = found["shard" if zero else "data"]
        assert state.ranks == 16
        assert state.link.startswith("network")
        assert "dp" not in found
        # No order brings the group of all ranks onto the links of a node.
        (there,) = plan_one(asked, Layout.parse(layout)).layouts
        assert placed_forecast(asked, there).layout.order == there.layout.order


def test_bytes_of_zero_3_by_hand() -> None:
    """Gradients reduced once a microbatch, layers gathered twice, the ends once: as recorded."""
    found = by_axis(problem("8xA100-SXM-80"), "dp8:zero=3,microbatches=2")["shard"]
    model = shapes.shape("llama-2-7b")
    layers = sum(model.blocks[kind].num_parameters for kind in model.layers)
    ends = model.num_parameters - layers
    assert found.bytes == 2 * (4 * model.num_parameters + 2 * (2 * layers + ends))
    assert found.messages == 2 * (34 + 2 * 32 + 2)


def test_every_order_is_looked_at_once() -> None:
    layout = Layout.parse("dp2.pp2.tp2")
    found = orders(layout)
    assert len(found) == len(set(found)) == 6
    assert found[0] == layout.order
    assert orders(Layout(tp=2)) == [Layout().order]


def test_two_cards_of_80_hold_what_one_of_160_would() -> None:
    found = pool(dataclasses.replace(problem("8xA100-SXM-80"), grad_dtype="bf16"), 8)
    assert 80e9 < found.need < 160e9
    assert found.smallest == 2
    assert found.held is not None
    assert found.held < 80e9
    assert found.price is not None
    assert 0 < found.price < 0.5
    assert "as one of 160 GB would" in found.words("NVLink 3, switch")


def test_one_card_is_no_pool() -> None:
    small = pool(problem("8xA100-SXM-80", "llama-3.2-1b"), 8)
    assert small.smallest == 1
    assert "which one of 80 GB holds" in small.words("NVLink 3")
    alone = pool(problem("1xH100-SXM-80"), 8)
    assert alone.smallest is None
    assert "has exclusive links" in alone.words("no links")
