"""State in the hosts' memory: planned where nothing fits without, counted, and estimated."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hocket.catalogue import shapes
from hocket.catalogue.hardware import cluster
from hocket.cli.main import main
from hocket.cost.measured_memory import gpu_memory_rows
from hocket.jobs.planner_problem import training_problem
from hocket.planning.explain import explain_layout
from hocket.planning.layouts import row
from hocket.planning.pins import layout_pins
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.problem import Problem
from hocket.planning.tools.emit import TOOLS
from hocket.schedules.registry import build_schedule
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError, LayoutError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, Workload

LARGE = "llama-3-70b"
STATE = 3 * 4 + 4 + 2
"""Bytes a parameter on the host: master and moments, where gradients arrive and values leave."""


def problem(model: str = LARGE, on: str | Cluster = "8xH100", **more: object) -> Problem:
    found = cluster(on) if isinstance(on, str) else on
    wanted = {"seq_len": 4096, "global_batch": 64, "precision": "bf16", **more}
    return training_problem(shapes.shape(model), found, **wanted)  # type: ignore[arg-type]


def with_host(**values: float) -> Cluster:
    found = cluster("8xH100")
    return dataclasses.replace(found, node=dataclasses.replace(found.node, **values))


def estimated(text: str, **more: object) -> tuple[float, float, float]:
    """Seconds of the step and of the update, and bytes of a node's host."""
    asked = problem(**more)  # type: ignore[arg-type]
    found = plan_one(asked, Layout.parse(text)).best
    return found.step_seconds.median, found.parts["optimizer"], found.host_memory


def test_what_fits_in_no_other_way_is_planned_in_the_hosts_memory() -> None:
    asked = problem()
    found = best_layouts(asked, top=3)
    assert all(one.layout.offloads("optimizer") and one.runs_here for one in found.layouts)
    assert not any(one.memory_by_kind["optimizer"] for one in found.layouts)
    assert "hosts' memory" in found.notes[0]
    for one in found.layouts:  # as a run of it would be judged before ranks start
        spec = RunSpec(
            layout=one.layout,
            workload=Workload(seq_len=4096, global_batch=64, dtype="bf16"),
            model=LARGE,
            config={},
        )
        schedule = build_schedule(one.layout, one.layout.microbatches or 1)
        peak = max(rank["total"] for rank in gpu_memory_rows(asked.shape, spec, schedule))
        assert peak <= asked.usable
        assert one.memory == pytest.approx(peak, rel=0.1)


def parameters(asked: Problem, layout: Layout) -> float:
    """Of the pipeline rank that has most, counted weight by weight: what tp does not split is
    copied on its ranks."""
    shape, place, found = asked.shape, 0, []
    for stage, layers in enumerate(asked.cut(layout)):
        kinds = [*shape.layers[place : place + layers]]
        kinds += ["embedding"] * (stage == 0) + ["head"] * (stage == layout.pp - 1)
        place += layers
        weights = [weight for kind in kinds for weight in shape.blocks[kind].weights]
        split = {"column", "row", "vocab", "expert"}
        assert {weight.split for weight in weights} <= {*split, "outside", "whole"}
        found.append(sum(w.elements / (layout.tp if w.split in split else 1) for w in weights))
    return max(found)


@pytest.mark.parametrize("text", ["dp8:zero=1", "dp8:zero=3", "dp2.tp4:zero=1", "dp4.pp2:zero=3"])
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_the_hosts_hold_the_state_once(model: str, text: str) -> None:
    asked = problem(model)
    layout = Layout.parse(text, microbatches="4", offload="optimizer")
    held = float(asked.host_memory(row(layout, asked.shape, 4096, 64))[0])
    # Eight ranks, as the one that has most; data-parallel ranks have a part of it each.
    expected = 8 / layout.dp * STATE * parameters(asked, layout)
    assert held == pytest.approx(expected, rel=1e-3)
    assert held >= STATE * asked.shape.num_parameters * 0.999


def test_copies_are_held_as_often_as_there_are_copies() -> None:
    asked = problem("llama-3-8b")
    layout = Layout.parse("dp8:microbatches=4,offload=optimizer")
    held = float(asked.host_memory(row(layout, asked.shape, 4096, 64))[0])
    assert held == pytest.approx(8 * STATE * asked.shape.num_parameters, rel=1e-3)


def test_parameters_too() -> None:
    asked = problem("llama-3-8b")
    found = []
    for kind in ("none", "optimizer", "params"):
        layout = Layout.parse("dp8:microbatches=4,zero=3", offload=kind)
        found.append(asked.memory(row(layout, asked.shape, 4096, 64)))
    none, optimizer, params = found
    assert none.host[0] == 0 < optimizer.host[0]
    assert optimizer.optimizer[0] == params.optimizer[0] == 0 < none.optimizer[0]
    share = 2 * asked.shape.num_parameters / 8
    assert optimizer.weights[0] - params.weights[0] == pytest.approx(share, rel=1e-6)


def test_time_follows_the_links_and_the_memory() -> None:
    text = "dp8:microbatches=8,zero=3,recompute=full"
    plain, update, held = estimated(text)
    there, on_host, more = estimated(text + ",offload=optimizer")
    assert held == 0 < more
    assert on_host > 10 * update
    assert there - plain == pytest.approx(on_host - update, rel=1e-6)
    # The memory that all ranks of the node share is what limits: half the rate, twice the time.
    rate = cluster("8xH100").node.host_bandwidth
    slow = estimated(text + ",offload=optimizer", on=with_host(host_bandwidth=rate / 2))[1]
    assert 1.7 < slow / on_host < 2
    narrow = estimated(text + ",offload=optimizer", on=with_host(pcie=16e9))[1]
    assert narrow > on_host
    # Parameters come to the device in every forward and backward, behind it or not.
    assert estimated(text + ",offload=params", on=with_host(pcie=2e9))[0] > 2 * there


def test_the_hosts_must_hold_it() -> None:
    small = problem(on=with_host(host_memory=1e12))
    with pytest.raises(LayoutError, match="does not fit"):
        best_layouts(small)
    layout = Layout.parse("dp8:microbatches=8,zero=3,recompute=full,offload=optimizer")
    found = plan_one(small, layout)
    assert not found.best.fits
    assert any("does not fit the hosts" in note for note in found.notes)
    unknown = best_layouts(problem(on=with_host(host_memory=0, host_bandwidth=0.0)), top=1)
    assert any("two channels for each GPU" in note for note in unknown.notes)


def test_a_part_of_a_node_has_its_part_of_the_host() -> None:
    whole, half = cluster("8xH100").node, cluster("4xH100").node
    assert half.host_memory == whole.host_memory // 2 > 0
    assert half.host_bandwidth == whole.host_bandwidth / 2 > 0
    with pytest.raises(LayoutError) as error:
        best_layouts(problem(on="4xH100"))
    assert "1x8xH100-SXM-80 with the optimizer's state" in (error.value.hint or "")


def test_the_explanation_compares_what_offloads_as_well() -> None:
    asked = problem()
    said = " ".join(explain_layout(asked, best_layouts(asked, top=1).best))
    assert "NVLink matters here" in said
    assert "With twice the memory nothing would fit" not in said


def test_other_software_is_planned_as_before() -> None:
    asked = training_problem(
        shapes.shape(LARGE), cluster("8xH100"), seq_len=4096, global_batch=64, precision="bf16",
        stack="megatron-core",
    )  # fmt: skip
    with pytest.raises(LayoutError, match="does not fit"):
        best_layouts(asked)


def test_pinned() -> None:
    pins = layout_pins(["offload=params"])
    found = best_layouts(problem("llama-3-8b"), pins=pins, top=2)
    assert all(one.layout.offload == "params" and one.layout.zero == 3 for one in found.layouts)
    assert best_layouts(problem("llama-3-8b"), top=1).best.layout.offload == "none"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["offload=activations", "recompute=full"], "recompute=selective works"),
        (["offload=params+activations", "zero=1"], "needs zero=3"),
        (["offload=disk"], "disk"),
        (["offload=params", "zero=1"], "needs zero=3"),
    ],
)
def test_pins_that_cannot_be(texts: list[str], words: str) -> None:
    with pytest.raises(HocketError, match=words):
        best_layouts(problem("llama-3-8b"), pins=layout_pins(texts))


def test_activations_leave_the_device() -> None:
    asked = problem("llama-3-8b", seq_len=65536, global_batch=8)
    text = "dp2.tp4:microbatches=4,sequence_parallel=true"
    there, away = (
        asked.memory(row(Layout.parse(text, offload=kind), asked.shape, 65536, 8))
        for kind in ("none", "activations")
    )
    # All 32 layers are in the host's memory; when the loss is taken one of them is still here.
    saved = there.activations[0] - away.activations[0]
    assert saved == pytest.approx(away.pinned[0] / (1 + 1 / 16) * 31 / 32, rel=1e-6)
    assert away.host[0] == away.pinned[0] > there.host[0] == 0
    assert away.weights[0] == there.weights[0]


def test_copies_of_activations_hide_behind_compute() -> None:
    text = "dp2.tp4:microbatches=4,sequence_parallel=true"
    asked = {"model": "llama-3-8b", "seq_len": 65536, "global_batch": 8}
    plain = estimated(text, **asked)[0]
    moved = f"{text},offload=activations"
    fast = estimated(moved, on=with_host(pcie=1e12, host_bandwidth=1e14), **asked)[0]
    assert fast == pytest.approx(plain, rel=1e-6)
    # Slow enough that nothing hides them: all that is saved crosses twice, of four microbatches.
    shape = problem(**asked).shape
    held = problem(**asked).memory(row(Layout.parse(moved), shape, 65536, 8)).pinned[0]
    slow = estimated(moved, on=with_host(pcie=1e8), **asked)[0]
    assert slow == pytest.approx(2 * 4 * held / (1 + 1 / 16) / 1e8, rel=0.02)
    shared = estimated(moved, on=with_host(host_bandwidth=8e8), **asked)[0]  # of eight ranks
    assert shared == pytest.approx(slow / 0.7, rel=0.02)


def test_activations_are_offloaded_where_they_do_not_fit() -> None:
    pins = layout_pins(["recompute=none", "cp=1"])
    asked = problem("llama-3-8b", seq_len=65536, global_batch=8)
    found = best_layouts(asked, pins=pins, top=2)
    assert all(one.layout.offload == "activations" for one in found.layouts)
    assert "what layers save for backward in the hosts' memory" in found.notes[0]
    # Not beyond half of the host's memory, which is as much as the buffers take.
    held = found.best.host_memory
    for factor, fits in ((2.1, True), (1.9, False)):
        only = plan_one(
            problem(
                "llama-3-8b",
                with_host(host_memory=int(factor * held)),
                seq_len=65536,
                global_batch=8,
            ),
            found.best.layout,
        )
        assert only.best.fits is fits
        assert ("It does not fit the hosts." in only.notes) is not fits


def test_narrower_gradients_are_offered() -> None:
    found = best_layouts(problem("qwen3-30b-a3b"), top=1)
    assert found.best.layout.offloads("optimizer")
    flags = "--grad-dtype bf16 or --optimizer adamw_8bit"
    assert f"With {flags} everything fits on the GPUs." in found.notes
    megatron = dataclasses.replace(problem("qwen3-30b-a3b"), limits=(TOOLS["megatron"].limits,))
    assert not any("With --" in note for note in best_layouts(megatron, top=1).notes)
    for change in ({"grad_dtype": "bf16"}, {"optimizer": "adamw_8bit"}):
        assert best_layouts(problem("qwen3-30b-a3b", **change), top=1).best.layout.offload == "none"
    assert not any("With --" in note for note in best_layouts(problem(), top=1).notes)


def test_moments_in_8_bits_take_less_of_the_hosts() -> None:
    found = []
    for optimizer in ("adamw", "adamw_8bit"):
        asked = problem("llama-3-8b", optimizer=optimizer)
        layout = Layout.parse("dp8:microbatches=4,zero=1,offload=optimizer")
        found.append(float(asked.host_memory(row(layout, asked.shape, 4096, 64))[0]))
    parameters = problem("llama-3-8b").shape.num_parameters
    assert found[0] - found[1] == pytest.approx((8 - 2 * (1 + 4 / 256)) * parameters, rel=0.01)


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", LARGE, "--cluster", "8xH100", "--seq-len", "4096", "--global-batch", "64"]
    assert main([*flags, "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all("offload=optimizer" in one["layout"] for one in found["layouts"])
    assert all(one["host_memory"] > 0 for one in found["layouts"])


def test_rows_without_offload_are_what_they_were() -> None:
    asked = problem("llama-3-8b")
    rows = asked.legal(8)
    assert not np.any(rows.offload)
    assert not np.any(asked.host_memory(rows))
