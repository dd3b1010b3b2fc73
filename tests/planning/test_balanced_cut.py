"""The balanced cut is near the best contiguous one, by the predicted time of its slowest stage."""

from __future__ import annotations

import itertools

import pytest

from hocket.catalogue import shapes
from hocket.catalogue.hardware import cluster
from hocket.jobs.planner_problem import training_problem
from hocket.planning.layouts import row
from hocket.spec.layout import Layout
from hocket.spec.model_shape import block_flops

MODELS = (
    "deepseek-v3", "kimi-k2", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "minimax-m2",
    "mixtral-8x7b", "llama-3-8b", "llama-3-70b", "gemma-3-27b",
)  # fmt: skip
MOST = 0.06
"""Of the slowest stage's time: of 24 layers on two stages one is 8%."""


def fits(layers: list[float], ends: tuple[float, float], stages: int, limit: float) -> bool:
    """Whether stages of at most `limit` seconds hold all layers: each takes all that it can."""
    held, stage = ends[0], 0
    for seconds in layers:
        if held + seconds > limit:
            held, stage = 0.0, stage + 1
        held += seconds
        if stage == stages or held > limit:
            return False
    return held + ends[1] <= limit or (stage < stages - 1 and ends[1] <= limit)


def least(layers: list[float], ends: tuple[float, float], stages: int) -> float:
    """Seconds of the slowest stage of the best cut, or less: only its last stage has a layer."""
    layers, ends = layers[:-1], (ends[0], layers[-1] + ends[1])
    low, high = 0.0, sum(layers) + sum(ends)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(layers, ends, stages, middle) else (middle, high)
    return high


def slowest(layers: list[float], ends: tuple[float, float], cut: tuple[int, ...]) -> float:
    starts = [0, *itertools.accumulate(cut)]
    stages = [sum(layers[a:b]) for a, b in itertools.pairwise(starts)]
    stages[0] += ends[0]
    stages[-1] += ends[1]
    return max(stages)


@pytest.mark.parametrize("gpu", ["H100-SXM", "A100-SXM-80GB"])
@pytest.mark.parametrize("model", MODELS)
def test_the_balanced_cut_is_near_the_best(model: str, gpu: str) -> None:
    shape, found = shapes.shape(model), {}
    for seq_len, pp in itertools.product((4096, 8192), (2, 4, 8, 16)):
        problem = training_problem(
            shape, cluster(f"1024x{gpu}"), seq_len=seq_len, global_batch=1024, precision="bf16"
        )
        layout = Layout(pp=pp, microbatches=1024)
        times = problem.times(row(layout, shape, seq_len, 1024))
        rank = float((times.forward + times.inputs + times.weights)[0])
        flops = [block_flops(shape.blocks[kind], seq_len) for kind in shape.layers]
        layers = [rank * pp * each / sum(flops) for each in flops]
        ends = float(times.embedding[0]), float(times.head[0])
        chosen = slowest(layers, ends, problem.cut(layout))
        found[seq_len, pp] = chosen / least(layers, ends, pp) - 1
    assert max(found.values()) < MOST, found
    assert min(found.values()) > -1e-6, found
    assert sum(found.values()) / len(found) < 0.025, found


def test_experts_count_as_tokens_reach_them() -> None:
    """DeepSeek-V3's three layers without experts compute about as much as the others."""
    shape = shapes.shape("deepseek-v3")
    problem = training_problem(
        shape, cluster("1024xH100-SXM"), seq_len=4096, global_batch=1024, precision="bf16"
    )
    cut = problem.cut(Layout(pp=16, microbatches=1024))
    assert max(cut) == 4
    assert cut[0] == 4
