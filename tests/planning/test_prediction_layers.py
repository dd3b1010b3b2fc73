"""Layers for multi-token prediction in a plan: their size, where they are, who trains them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hocket.catalogue.hardware import cluster
from hocket.catalogue.shapes import shape
from hocket.jobs.plan import emitted_layout, plan_training
from hocket.jobs.planner_problem import training_problem
from hocket.planning.problem import Problem
from hocket.planning.reading.megatron import megatron, megatron_bridge
from hocket.planning.stacks import named_stack
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from tests.support.columns import layout_columns

CLUSTER = "16x8xH100-SXM"
LAYOUT = "dp8.pp16.ep8:microbatches=64,zero=1,recompute=full"


def problem(layers: int | None, model: str = "deepseek-v3") -> Problem:
    stack = named_stack("megatron-core")
    return training_problem(
        shape(model), cluster(CLUSTER), seq_len=4096, global_batch=512, stack=stack.name,
        limits=(stack.limits,), mtp_layers=layers,
    )  # fmt: skip


def test_it_has_the_parameters_and_operations_of_the_published_module() -> None:
    """DeepSeek-V3: 14B with copies of embedding and head (its README), which are the model's."""
    plain = shape("deepseek-v3")
    found = plain.with_prediction(1)
    ends = 2 * plain.hidden * plain.vocab
    assert found.num_parameters - plain.num_parameters + ends == pytest.approx(14e9, rel=0.05)
    last, head = plain.blocks[plain.layers[-1]], plain.blocks["head"]
    once = sum(2.0 * p.n * p.k * p.count for p in (*last.products, *head.products))
    once += 2.0 * 2 * plain.hidden**2
    one = plain.flops_per_token(4096, backward=False)
    more = found.flops_per_token(4096, backward=False) - one
    cores = sum(2.0 * a.heads * (a.head_dim + a.value_dim) * 4097 / 2 for a in last.attention)
    assert more == pytest.approx(once + cores, rel=1e-9)
    assert ModelShape.from_json(found.to_json()) == found
    assert plain.with_prediction(0) is plain


def test_they_are_on_the_last_stage() -> None:
    """With layers of other stages as they were, the last one takes as long as one more layer and
    head, and holds their state; a balanced cut gives it less."""
    layout = Layout.parse(LAYOUT)
    (before, after) = (problem(n).cut(layout) for n in (None, 1))
    assert sum(before) == sum(after) == 61
    assert after[-1] < before[-1]
    fixed = Layout.parse(LAYOUT + ",pipeline_split=" + "-".join(map(str, before)))
    rows = layout_columns([fixed], 512)
    plain, more = problem(None), problem(1)
    times = [one.times(rows) for one in (plain, more)]
    layer = (times[0].forward + times[0].inputs + times[0].weights)[0] * 16 / 61
    head = times[1].head[0] - 2 * times[0].head[0]
    assert head == pytest.approx(layer, rel=0.2)
    both = zip((plain, more), times, strict=True)
    stages = [one.stage_seconds(fixed, seconds)["F"][0] for one, seconds in both]
    assert np.all(stages[0][:-1] == stages[1][:-1])
    assert stages[1][-1] > stages[0][-1]


def test_one_rank_holds_their_state() -> None:
    rows = layout_columns([Layout.parse("dp1:microbatches=1")], 1)
    plain, more = problem(None, "llama-3-8b"), problem(1, "llama-3-8b")
    less, held = plain.memory(rows), more.memory(rows)
    own = more.shape.num_parameters - plain.shape.num_parameters
    constants = plain.constants
    each = constants.weight_bytes + constants.gradient_bytes + constants.optimizer_bytes
    state = [m.weights + m.gradients + m.optimizer for m in (less, held)]
    assert state[1][0] - state[0][0] == pytest.approx(own * each, rel=1e-6)
    assert held.activations[0] > less.activations[0]


def test_flags_are_written_and_read_back() -> None:
    layout = LAYOUT + ",pipeline_split=" + "-".join(["4"] * 15 + ["1"])
    asked = {"cluster": CLUSTER, "seq_len": 4096, "global_batch": 512, "layout": layout}
    found = plan_training("deepseek-v3", stack="megatron-core", mtp_layers=1, **asked)
    text = emitted_layout(found, "megatron")
    assert "--mtp-num-layers 1" in text
    assert "|t*1mL'" in text
    read = megatron(text)
    assert (read.predictions, read.unread) == (1, ())
    assert read.fields["pipeline_split"] == (4,) * 15 + (1,)
    bridge = emitted_layout(
        plan_training("deepseek-v3", stack="nemo", mtp_layers=1, **asked), "megatron-bridge"
    )
    assert megatron_bridge(bridge).predictions == 1
    plain = plan_training("deepseek-v3", stack="megatron-core", **asked)
    assert "mtp" not in emitted_layout(plain, "megatron")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({}, "hocket trains no layers for multi-token prediction"),
        ({"stack": "deepspeed"}, "trains no layers for multi-token prediction"),
        ({"stack": "megatron-core", "mtp_layers": 99}, "it is a number from 0 to 16"),
        ({"stack": "megatron-core", "lora_rank": 8}, "without multi-token prediction"),
    ],
)
def test_who_does_not_train_them_is_rejected(more: dict[str, Any], match: str) -> None:
    asked = {"cluster": CLUSTER, "seq_len": 4096, "global_batch": 512, "mtp_layers": 1, **more}
    with pytest.raises(OptionError, match=match):
        plan_training("deepseek-v3", **asked)
