"""What fits: published runs do, proposals leave room, and none of them recomputes for nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hocket.catalogue import hardware, shapes
from hocket.cost.constants import stacks
from hocket.cost.measured_stage import GRADIENT_BYTES
from hocket.jobs.plan import plan_training
from hocket.jobs.planner_problem import default_precision
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.problem import Problem
from hocket.planning.search import fitting_memory
from hocket.planning.table import read_training_table
from hocket.planning.tools.megatron import LIMITS
from hocket.planning.validate import training_report
from hocket.spec.cut import choose_cut
from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.precision import state_bytes
from hocket.spec.recompute import BITS
from tests.planning.test_validate import EXTRACT
from tests.rotation import part

EIGHT = Problem(
    shape=shapes.shape("llama-3-8b"), cluster=hardware.cluster("1x8xH100-SXM"), seq_len=4096,
    global_batch=32,
)  # fmt: skip

LLAMA_405B = Problem(
    shape=shapes.shape("llama-3.1-405b"), cluster=hardware.cluster("2048x8xH100-SXM"),
    seq_len=8192, global_batch=2048,
)  # fmt: skip

PUBLISHED = (
    "dp128.pp16.tp8:schedule=interleaved,virtual_stages=8,microbatches=16,zero=1,"
    "sequence_parallel=true,pipeline_split=light-ends"
)
"""Llama 3 405B on 16,384 GPUs (Grattafiori et al. 2024, table 4 and section 3.3.2): one layer fewer
at both ends, nothing recomputed."""


def test_a_cut_with_lighter_ends() -> None:
    assert choose_cut("light-ends", 126, 16) == (7, *(8,) * 14, 7)
    assert choose_cut("light-ends", 126, 128) == (0, *(1,) * 126, 0)
    assert choose_cut("light-ends", 4, 2) == (2, 2)
    with pytest.raises(LayoutError, match="have one layer fewer"):
        choose_cut("light-ends", 126, 6)


def test_the_published_layout_of_405b_fits_without_recompute() -> None:
    (found,) = plan_one(LLAMA_405B, Layout.parse(PUBLISHED)).layouts
    assert found.fits
    assert found.layout.pipeline_split == "light-ends"
    # Table 4: 41% MFU (400 TFLOP/s of 989).
    assert found.mfu.median == pytest.approx(0.41, rel=0.1)


def test_no_layout_without_context_parallelism_beats_the_published_one_by_far() -> None:
    """Tensor parallelism over two nodes was ranked before it; nothing within a node was."""
    (published,) = plan_one(LLAMA_405B, Layout.parse(PUBLISHED)).layouts
    best = best_layouts(LLAMA_405B, top=1, pins={"cp": 1}, everything=True).best
    assert published.step_seconds.median <= 1.05 * best.step_seconds.median
    assert best.layout.tp <= 8


def test_the_published_layout_is_near_the_best_of_all() -> None:
    """The goal is 5%; docs/reference/accuracy.md has the reasons for what is missing."""
    (published,) = plan_one(LLAMA_405B, Layout.parse(PUBLISHED)).layouts
    best = best_layouts(
        dataclasses.replace(LLAMA_405B, limits=(LIMITS,)), top=1, everything=True
    ).best
    assert published.step_seconds.median <= 1.09 * best.step_seconds.median
    assert best.layout.cp > 1  # else nothing of the above is needed


@pytest.mark.parametrize(
    ("cluster", "axes", "microbatches", "seq_len", "global_batch", "teraflops"),
    [
        ("1024x8xH100-SXM", "dp64.pp16.tp8", 32, 8192, 2048, 430),
        ("2048x8xH100-SXM", "dp128.pp16.tp8", 16, 8192, 2048, 400),
        ("2048x8xH100-SXM", "dp8.pp16.cp16.tp8", 16, 131072, 128, 380),
    ],
)
def test_table_4_of_llama_3(
    cluster: str, axes: str, microbatches: int, seq_len: int, global_batch: int, teraflops: int
) -> None:
    """Grattafiori et al. 2024, table 4: BF16 TFLOP/s of a GPU, attention's counted."""
    problem = dataclasses.replace(
        LLAMA_405B, cluster=hardware.cluster(cluster), seq_len=seq_len, global_batch=global_batch
    )
    text = PUBLISHED.partition(":")[2].replace("microbatches=16", f"microbatches={microbatches}")
    (found,) = plan_one(problem, Layout.parse(f"{axes}:{text}")).layouts
    assert found.mfu.median * 989 == pytest.approx(teraflops, rel=0.13)


def test_deepseek_v3_fits_as_published() -> None:
    """DeepSeek-AI 2024, sections 3.1 to 3.3: 2,048 H800, pp 16, ep 64, ZeRO-1, inputs of products
    saved in 8 bits, norms and up-projections recomputed, experts that are evenly loaded. One
    expert rank with half as many tokens again would not fit."""
    problem = Problem(
        shape=shapes.shape("deepseek-v3"), cluster=hardware.cluster("256x8xH800-SXM"),
        seq_len=4096, global_batch=15360, precision="fp8", expert_imbalance=1.0,
        stack="megatron-core",
    )  # fmt: skip
    cut = "-".join(["4"] * 13 + ["3"] * 3)
    layout = Layout.parse(
        f"dp128.pp16.ep64:microbatches=120,zero=1,recompute=modules,pipeline_split={cut}"
    )
    (even,) = plan_one(problem, layout).layouts
    assert even.fits
    (asked,) = plan_training(  # as a user asks: Megatron's own rules are no obstacle
        "deepseek-v3", cluster="256x8xH800-SXM", seq_len=4096, global_batch=15360,
        precision="fp8", expert_imbalance=1.0, stack="megatron-core", layout=str(layout),
    ).layouts  # fmt: skip
    assert asked.fits
    assert asked.memory == even.memory
    (plain,) = plan_one(dataclasses.replace(problem, precision="bf16"), layout).layouts
    assert plain.memory_by_kind["activations"] > 1.2 * even.memory_by_kind["activations"]
    assert not plan_one(dataclasses.replace(problem, expert_imbalance=1.5), layout).best.fits


def test_light_ends_are_among_the_layouts() -> None:
    pins = {"dp": 128, "pp": 16, "tp": 8, "virtual_stages": 8, "microbatches": 16}
    found = LLAMA_405B.legal(16384, pins={**pins, "schedule": "interleaved", "zero": 1})
    assert set(found.lighter.tolist()) == {1.0}  # 128 stages of 126 layers
    less = LLAMA_405B.legal(16384, pins={**pins, "virtual_stages": 1, "schedule": "1f1b"})
    assert set(less.lighter.tolist()) == {0.0, 1.0}


def test_proposals_leave_the_headroom_and_tight_ones_say_so() -> None:
    usable = EIGHT.cluster.node.gpu.usable
    assert EIGHT.usable == pytest.approx(0.95 * usable, rel=1e-9)
    found = best_layouts(EIGHT, top=5)
    for one in found.layouts:
        assert one.fits
        assert not one.tight
        assert one.memory_high <= 0.95 * usable
    layouts = EIGHT.legal(8, pins={"schedule": "1f1b", "cp": 1})
    high, held = EIGHT.high_memory(layouts), EIGHT.memory(layouts)
    between = (high > EIGHT.usable) & (held.least <= usable)
    assert between.any()
    from hocket.planning.layouts import layout_at

    only = plan_one(EIGHT, layout_at(layouts, int(np.flatnonzero(between)[0])))
    assert only.best.tight
    assert any(note.startswith("Tight") for note in only.notes)


def test_selective_recompute_is_proposed_only_where_it_frees_something() -> None:
    number = BITS["core_attn"]
    assert number not in EIGHT.legal(8).recompute
    halves = Problem(
        shape=EIGHT.shape, cluster=EIGHT.cluster, seq_len=4096, global_batch=32, stack="fsdp"
    )
    assert number in halves.legal(8).recompute
    assert number in EIGHT.legal(8, pins={"recompute": "selective"}).recompute


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gpt2"])
def test_recompute_of_modules_lies_between_none_and_full(name: str) -> None:
    asked = Problem(
        shape=shapes.shape(name), cluster=hardware.cluster("1x8xH200-SXM"), seq_len=1024,
        global_batch=8,
    )  # fmt: skip
    none, modules, full = (
        plan_one(asked, Layout(dp=8, zero=3, microbatches=1, recompute=kind)).best
        for kind in ("none", "modules", "full")
    )
    assert none.memory > modules.memory > full.memory
    assert none.step_seconds.median < modules.step_seconds.median < full.step_seconds.median
    assert not none.unsupported
    assert not modules.unsupported


def test_plan_a_published_row_and_a_run_count_the_same_bytes() -> None:
    """The same job as `hocket plan --layout` and as a row of a table: bytes by one precision rule,
    gradients in fp32 where nothing else is stated, as the forecast of a run has them."""
    problem = dataclasses.replace(
        LLAMA_405B, shape=shapes.shape("llama-3-8b"), cluster=hardware.cluster("8x8xH100-SXM"),
        seq_len=4096, global_batch=64,
    )  # fmt: skip
    for zero in (0, 1, 3):
        found = plan_one(problem, Layout(dp=64, microbatches=1, zero=zero)).best
        parameters = problem.shape.num_parameters
        if zero < 2:
            assert found.memory_by_kind["gradients"] == pytest.approx(4 * parameters, rel=1e-3)
        row = dict.fromkeys(read_training_table(EXTRACT)[0], "") | {
            "id": "one", "source": "megatron-core", "model": "llama-3-8b", "seq": "4096",
            "global_batch": "64", "micro_batch": "1", "gpu": "H100-80", "n_gpus": "64",
            "gpus_per_node": "8", "tp": "1", "pp": "1", "cp": "1", "dp": "64", "sp": "0",
            "zero_stage": str(zero), "recompute": "none", "precision": "bf16",
            "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336",
            "vocab": "128256",
            "measured_iter_s": "1", "mem_kind": "nvidia-smi",
        }  # fmt: skip
        (one,) = training_report([row]).predicted_rows
        assert one.memory == pytest.approx(found.memory, rel=0.01)
        assert one.fits == found.fits
    assert state_bytes("fp32").gradient == GRADIENT_BYTES


@pytest.mark.parametrize("name", hardware.gpu_names())
def test_the_default_precision_is_one_that_the_device_has(name: str) -> None:
    gpu = hardware.cluster(f"1x{name}").node.gpu
    assert default_precision(gpu) in gpu.flops
    assert (default_precision(gpu) == "fp16") == ("bf16" not in gpu.flops)


JOBS = (
    ("llama-3-70b", "4x8xA100-80", 240),
    ("mixtral-8x7b", "2x8xH100-SXM", 256),
    ("deepseek-v3", "8x8xH200", 120),
    ("gpt2", "1x4xT4", 64),
)


@pytest.mark.parametrize(
    ("job", "stack"), part([(job, stack) for job in JOBS for stack in stacks()], 8)
)
def test_a_layout_that_is_passed_over_does_not_fit(job: tuple[str, str, int], stack: str) -> None:
    """Of layouts that differ by the microbatch those behind one that does not fit are not looked
    at: memory grows with the microbatch."""
    name, cluster, batch = job
    for precision in ("fp16", "fp32") if "T4" in cluster else ("bf16", "fp32"):
        problem = Problem(
            shape=shapes.shape(name), cluster=hardware.cluster(cluster), seq_len=2048,
            global_batch=batch, precision=precision, stack=stack,
        )  # fmt: skip
        for rows in problem.legal_parts(problem.cluster.num_gpus):
            exact, found = problem.high_memory(rows), fitting_memory(problem, rows)
            known = np.isfinite(found)
            assert np.array_equal(found[known], exact[known])
            assert np.all(exact[~known] > problem.usable)
