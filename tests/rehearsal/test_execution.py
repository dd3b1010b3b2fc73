"""A rank's surroundings: the fake GPU, groups that record, memory by owner, host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.spec.errors import HocketError

pytestmark = pytest.mark.ranks

Inside = Callable[..., Any]


def test_groups_answer_as_those_of_nccl(inside: Inside) -> None:
    found = inside("groups")
    assert found["backend"] == "nccl"
    assert found["outsider"]
    assert found["sync"], "a synchronous call returns no work (torch 2.8 on)"
    assert not found["completed"]
    assert (found["cpu"], found["strided"], found["sizes"]) == (
        "RuntimeError",
        "ValueError",
        "ValueError",
    )


def test_groups_are_counted_by_the_calls_that_create_them(inside: Inside) -> None:
    found = inside("groups")
    assert found["families"] == [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert found["calls"] == 3


def test_operations_are_recorded_in_order(inside: Inside) -> None:
    found = inside("groups")
    assert found["ops"] == [
        ["all-reduce", ["1", 0, 1], None, True],
        ["all-reduce", ["2", 1, 3], None, False],
        ["send", ["1", 0, 1], 0, False],
    ]
    assert found["events"] == [0, 1, ~1, 2, ~2]


def test_a_world_leaves_torch_as_it_was(inside: Inside) -> None:
    assert inside("rejoined") == ["2", "False", "True"]


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_host_reads_are_found_with_their_line(inside: Inside, inference: bool) -> None:
    found = inside("host_reads", inference=inference)
    expected = {
        "_reads_item": "item",
        "_reads_bool": "item",
        "_reads_list": "item",
        "_copies_to_host": "copy to the host",
        "_copies_from_host": "copy from the host",
        "_copies_a_number": "copy from the host",
        "_indexes_by_list": "copy from the host",
        "_indexes_by_mask": "index by a boolean mask",
        "_nonzero": "nonzero",
        "_synchronizes": "torch.cuda.synchronize",
    }
    assert found.pop("_reads_nothing") == []
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        ((what, place, line, count),) = rows
        assert (what, line, count) == (expected[name], 1, 1), name
        assert place.endswith("tests/rehearsal/inside.py"), place


def test_matmuls_in_8_bits_may_be_written_to_a_given_tensor(inside: Inside) -> None:
    assert inside("matmuls_in_8_bits") == [[16, 64], [16, 64], True, 2]


def test_memory_by_owner_of_a_linear_layer(inside: Inside) -> None:
    width, rows = 256, 1024
    found = inside("memory", width=width, rows=rows)
    weight, hidden = 4 * width * width, 4 * rows * width
    left = found["left"]
    assert left["parameters"] == left["optimizer"] == left["gradients"] == weight
    assert left["other"] == hidden
    assert left["communication"] == 0
    assert left["total"] == 3 * weight + hidden
    assert found["without_gradient"] == 2 * weight + hidden
    peak = found["at_peak"]
    assert peak["parameters"] == peak["optimizer"] == weight
    assert peak["communication"] in (0, 4 * 2 * width), "two gathered rows, or none any more"
    assert found["peak"] == sum(peak.values())
    # square's backward: the output, twice it, and its gradient; at most one of them is gone.
    assert 3 * hidden <= peak["activations"] <= 4 * hidden + 64


def test_views_and_allocations_launch_nothing(inside: Inside) -> None:
    launches = inside("memory", width=8, rows=4)["launches"]
    assert launches["mm"] == 2, "forward, and the weight's gradient"
    assert not {"view", "t", "detach", "empty", "slice", "expand"} & launches.keys()


def test_torch_cuda_answers_for_the_named_gpu(inside: Inside) -> None:
    found = inside("answers", name="A100-SXM-80", capability=[8, 0])
    assert (found["name"], found["capability"], found["sms"]) == ("A100-SXM-80", [8, 0], 7)
    assert found["free"] == 1000 - 40
    assert found["available"]
    assert found["before"] == found["after"]
    assert not found["before"]


@pytest.mark.parametrize("capability", [[9, 0], [7, 0]])
def test_attention_chooses_the_kernel_that_torch_would(
    inside: Inside, capability: list[int]
) -> None:
    flash = "flash" if capability[0] >= 8 else "efficient"
    found = inside("attention", capability=capability)
    assert found == [flash, "efficient", "efficient", "efficient", flash]


def test_an_error_in_a_worker_is_reported_and_leaves_it_alive(inside: Inside) -> None:
    with pytest.raises(HocketError, match="on purpose"):
        inside("crash")
    assert inside("groups")["backend"] == "nccl"


def test_a_layer_launches_no_more_than_in_plain_transformers(
    workers: RehearsalWorkers, inside: Inside
) -> None:
    found: dict[int, tuple[int, int]] = {}
    given = {"model": "tiny-llama", "layout": "dp1", "seq_len": 64, "dtype": "fp32"}
    for layers in (2, 4):
        asked = request({**given, "device": "cuda"})
        job = prepare_rehearsal(asked, rows=1, layers=layers)
        (executed,) = rehearse_job(job, workers=workers).executed.values()
        assert executed.host_reads == []
        plain = inside("plain_launches", config=dict(job.spec.config))
        found[layers] = sum(executed.launches.values()), sum(plain.values())
    assert found[4][0] - found[2][0] <= found[4][1] - found[2][1]
    # What a step has once: a loss that is written over its logits, and a test for steps that are
    # not finite, which plain transformers has not.
    assert found[4][0] - found[4][1] <= 16
