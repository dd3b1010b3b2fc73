"""What a first report card meets on a GPU machine: old drivers, small GPUs, MIG, dead workers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hocket.doctor import runner, worker
from hocket.doctor.check import CPU, GPU, Cannot, CheckOutcome
from hocket.doctor.place import Place
from hocket.doctor.table import CHECKS, by_id

pytestmark = pytest.mark.torch

OLD = "The NVIDIA driver on your system is too old (found version 12020)\nUpdate it"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch.cuda of a machine of two H100s, which notes what is asked of it; `raises`: by every
    question to the device."""
    import torch

    driver: dict[str, Any] = {"asked": [], "free": 80e9, "raises": None, "total": 80e9}

    def ask(name: str, answer: Any) -> Any:
        driver["asked"].append(name)
        if driver["raises"]:
            raise RuntimeError(driver["raises"])
        return answer

    class Properties:
        @property
        def total_memory(self) -> float:
            return float(driver["total"])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: ask("capability", (9, 0)))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda i=0: ask("memory", (driver["free"], 80e9))
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i=0: Properties())
    return driver


def test_a_driver_that_is_too_old_fails_one_group_and_the_rest_says_why(
    cuda: dict[str, Any],
) -> None:
    cuda["raises"] = OLD
    with pytest.raises(Cannot, match=r"CUDA does not start .*too old.*--group environment"):
        worker.missing(by_id("kernel-matmul-fp32"), GPU)
    with pytest.raises(RuntimeError, match="too old"):
        worker.missing(by_id("env-torch-cuda"), GPU)
    cuda["raises"] = "Cannot re-initialize CUDA in forked subprocess"  # executed again
    with pytest.raises(RuntimeError, match="forked"):
        worker.missing(by_id("kernel-matmul-fp32"), GPU)


def test_checks_that_fork_leave_the_device_alone(cuda: dict[str, Any]) -> None:
    """CUDA that was initialized before a fork cannot be used after it."""
    assert [check.id for check in CHECKS if check.forks] == ["env-fork", "env-claim"]
    for name in ("env-fork", "env-claim"):
        worker.missing(by_id(name), GPU)
    assert cuda["asked"] == []
    # A context takes memory, and in exclusive mode the GPU: it is made where memory is needed.
    worker.missing(by_id("fault-kill"), GPU)
    assert cuda["asked"] == ["capability"]


def test_a_small_gpu_cannot_where_a_large_one_fails(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    cuda["free"] = 22e9
    with pytest.raises(Cannot, match="needs 60 GB of GPU memory, 22 GB is free"):
        worker.missing(by_id("train-1b"), GPU)

    def fill(place: Place, **arguments: Any) -> CheckOutcome:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(type(by_id("env-nccl")), "resolve", lambda self, form=GPU: fill)
    cuda["total"] = 24e9
    found = worker.perform("kernel-matmul-fp32", GPU)
    assert found["cannot"]
    assert found["reason"].startswith("needs more memory than this GPU has: CUDA out of memory")
    cuda["total"] = 80e9
    found = worker.perform("kernel-matmul-fp32", GPU)
    assert (found["cannot"], found["ok"]) == (False, False)


def test_a_part_of_a_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "name", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    with pytest.raises(Cannot, match=r"MIG 1g\.10gb is a part of a GPU"):
        Place(GPU).peak_flops()
    with pytest.raises(Cannot, match="not in the catalogue"):
        Place(GPU).peak_bandwidth()


def test_a_forked_process_that_cuda_rejects_is_repeated_but_where_that_is_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "RuntimeError: Cannot re-initialize CUDA in forked subprocess"
    monkeypatch.setattr(worker, "forked", lambda *asked: {"ok": False, "reason": reason})
    monkeypatch.setattr(worker, "fresh", lambda *asked: {"ok": True, "reason": ""})
    asked = [{"id": n, "form": GPU, "timeout": 1} for n in ("env-nccl", "env-fork", "env-claim")]
    answers = io.StringIO()
    worker.answer_requests(io.StringIO("".join(json.dumps(each) + "\n" for each in asked)), answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [each["ok"] for each in found] == [True, False, False]


def test_a_worker_that_does_not_start_gives_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\necho libcudart.so.13: cannot open shared object file >&2\nexit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", os.fspath(program))
    with runner.Worker() as started:
        found = started.run("env-limits", CPU, 5.0)
    assert not found["ok"]
    assert "(exit code 3): ...libcudart.so.13: cannot open" in found["reason"]


# --- references of checks --------------------------------------------------------------------


def test_what_a_cut_keeps_by_hand() -> None:
    import torch

    from hocket.doctor.sampling import kept_by_sort

    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    for cut, expected in (
        ({}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_k": 2}, [0.0, 0.625, 0.0, 0.375]),
        ({"top_p": 0.7}, [0.0, 0.625, 0.0, 0.375]),
        ({"top_k": 3, "top_p": 0.5}, [0.0, 1.0, 0.0, 0.0]),
        ({"min_p": 0.2}, [0.15 / 0.95, 0.5 / 0.95, 0.0, 0.3 / 0.95]),
    ):
        found = kept_by_sort(logits, {"temperature": 1.0, **cut})
        assert found.tolist() == pytest.approx(expected, abs=1e-6), cut
    warm = kept_by_sort(logits, {"temperature": 2.0})
    assert float(warm[1] / warm[0]) == pytest.approx((0.5 / 0.15) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("forgotten", ["top_k", "top_p", "min_p", "temperature"])
def test_a_sampler_that_forgets_a_cut_is_seen(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from hocket.doctor import sampling
    from hocket.serving.engine import device_draw

    draw = device_draw.draw_on_device

    def forgetful(rows: Any, choices: Any) -> Any:
        return draw(rows, dataclasses.replace(choices, **{forgotten: None}))

    monkeypatch.setattr(device_draw, "draw_on_device", forgetful)
    assert sampling.by_sort(Place(CPU)).reason


def test_the_first_difference_of_two_orders() -> None:
    from hocket.doctor.rehearsed import first_difference

    axes = {"0": ["world", "dp"], "1": ["tp"]}
    mine = [("all-reduce", "tp"), ("all-reduce", "dp")]
    theirs = [("all-reduce", "1"), ("all-reduce", "0")]
    assert first_difference(mine, theirs, axes) == ""
    assert first_difference(mine[::-1], theirs, axes) == (
        "operation 1 is all-reduce over dp, rehearsed as all-reduce over tp"
    )
    assert first_difference(mine, [theirs[0], ("broadcast", "0")], axes).startswith("operation 2")
    assert first_difference(mine[:1], theirs, axes) == "1 operations, 2 are rehearsed"


def test_every_kernel_of_serving_is_tried_for_every_kind_of_layer() -> None:
    from hocket.doctor.trials import HEADS, LATENT_HEADS, LATENT_SIZES, SIZES, VARIANTS, trial_kinds
    from hocket.serving.engine.attention_kernels import KERNELS

    tried: dict[str, set[str]] = {}
    for check in CHECKS:
        if check.id.startswith("kernel-trial-"):
            names = check.arguments.get("dtypes", ["bfloat16", "float16", "float32"])
            tried.setdefault(check.arguments["kernel"], set()).update(names)
    assert tried == {kernel.name: {"bfloat16", "float16", "float32"} for kernel in KERNELS}
    every = list(trial_kinds())
    shapes = len(HEADS) * len(SIZES) + len(LATENT_HEADS) * len(LATENT_SIZES)
    assert len(set(every)) == len(every) == 3 * shapes * len(VARIANTS) == 216
