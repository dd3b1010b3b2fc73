"""The table of GPU checks as data, and what a runner makes of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.doctor import Doctor
from hocket.cli.flags import parse_flags
from hocket.doctor import job
from hocket.doctor.check import CPU, GpuCheck
from hocket.doctor.environment import NvmlReport
from hocket.doctor.place import Place, catalogue_name
from hocket.doctor.present import PresentGpus, present
from hocket.doctor.runner import CheckRunner, report_card
from hocket.doctor.table import CHECKS, by_id, select
from hocket.spec.doctor import CANNOT, FAIL, GROUPS, PASS
from hocket.spec.errors import OptionError

ROOT = Path(__file__).parents[2]
NONE = PresentGpus((), "no NVIDIA GPU is visible", True, {"gpus": 0}, {})
H100 = "NVIDIA H100 80GB HBM3"


def test_every_group_has_checks_and_ids_are_words_of_a_command() -> None:
    assert {check.group for check in CHECKS} == set(GROUPS)
    assert len(CHECKS) >= 100
    for check in CHECKS:
        assert shlex.split(check.id) == [check.id]
        assert check.what
        assert check.criterion
        assert 0 < check.seconds <= check.timeout


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_command_of_a_check_selects_it_alone(check: GpuCheck) -> None:
    words = shlex.split(check.command)
    assert words[:2] == ["hocket", "doctor"]
    flags = parse_flags(Doctor, "doctor", words[2:], Doctor())
    assert job.chosen_checks(gpu=flags.gpu, only=flags.only, groups=flags.group) == (check,)


def test_one_gpu_takes_at_most_ten_minutes() -> None:
    assert sum(check.seconds for check in CHECKS if check.gpus <= 1) <= 600
    assert sum(check.seconds for check in CHECKS if check.gpus <= 8) <= 2400


@pytest.mark.torch
def test_every_function_takes_its_arguments() -> None:
    for check in CHECKS:
        for form in ("gpu", *check.rehearsals):
            signature = inspect.signature(check.resolve(form))
            signature.bind(Place(CPU), **check.arguments)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="unknown check") as error:
        by_id("kernel-sdpa-flash-bf17")
    assert error.value.hint == "did you mean 'kernel-sdpa-flash-bf16'?"
    with pytest.raises(OptionError, match="group of checks 'kernls'") as error:
        select(groups=["kernls"])
    assert error.value.hint == "did you mean 'kernels'?"


def test_a_folder_that_cannot_be_written_is_rejected_first(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match="is not writable: Not a directory"):
        job.card_folder(str(file / "folder"), whole=True)
    assert job.card_folder(None, whole=False) is None
    assert job.card_folder(str(tmp_path / "new"), whole=False) == tmp_path / "new"
    with pytest.raises(OptionError, match="minutes is 0"):
        job.doctor((), minutes=0)


# --- the runner ------------------------------------------------------------------------------


class Answers:
    """A worker that answers from a table and takes no time."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found, self.asked = found, []

    def run(self, name: str, form: str, timeout: float) -> dict[str, Any]:
        self.asked.append((name, form, timeout))
        blank = {"ok": True, "cannot": False, "values": {}, "predicted": {}, "reason": "",
                 "seconds": 1.0}  # fmt: skip
        return {**blank, **self.found.get(form, {})}

    def close(self) -> None: ...


def runner(here: PresentGpus, found: dict[str, Any], limit: float | None = None) -> CheckRunner:
    made = CheckRunner(here, limit)
    made._real = made._fake = Answers(found)  # type: ignore[assignment]
    return made


def test_without_a_gpu_lines_wait_for_one_and_a_failed_rehearsal_fails() -> None:
    check = by_id("kernel-sdpa-flash-bf16")
    (line,) = runner(NONE, {}).lines([check])
    assert (line.status, line.reason) == (CANNOT, "needs a GPU; rehearsed: ok")
    assert line.rehearsals == {"cpu": "ok", "fake": "ok"}
    (line,) = runner(NONE, {"fake": {"ok": False, "reason": "wrong shape"}}).lines([check])
    assert (line.status, line.reason) == (FAIL, "rehearsal (fake) failed: wrong shape")
    why = dataclasses.replace(NONE, why_none="torch is built for CUDA 13.0, and no GPU is visible")
    (line,) = runner(why, {}).lines([by_id("kernel-paged-triton-graph")])
    assert line.reason == (
        "needs a GPU (torch is built for CUDA 13.0, and no GPU is visible); cannot be rehearsed: "
        "a CUDA graph is captured by a device alone"
    )


def test_on_a_gpu_what_no_longer_fits_is_reported() -> None:
    one = PresentGpus((H100,), "", True, {"gpus": 1}, {})
    checks = [by_id("train-1b"), by_id("layout-tp2"), by_id("kernel-matmul-bf16")]
    done, more, small = runner(one, {}, limit=600).lines(checks)
    assert (done.status, small.status) == (PASS, PASS)
    assert (more.status, more.reason) == (CANNOT, "needs 2 GPUs, 1 is here")
    late, _, small = runner(one, {}, limit=15).lines(checks)
    assert late.status == CANNOT
    assert late.reason.startswith("out of time: takes about 20 s, 15 s of 15 s are left")
    assert small.status == PASS


def test_without_torch_the_host_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "torch" else real(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    here = present()
    assert (here.gpus, here.why_none, here.torch) == ((), "torch is not installed", False)
    card = report_card(select(groups=["environment"]), here=here)
    by_name = {line.id: line for line in card.lines}
    assert by_name["env-limits"].status == PASS
    assert by_name["env-torch-cuda"].status == CANNOT
    assert "torch is not installed" in by_name["env-torch-cuda"].reason


# --- checks of the host and the driver -------------------------------------------------------


def test_small_shared_memory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.doctor import environment

    place = Place(CPU)
    outcome = environment.shared_memory(place, str(tmp_path / "absent"))
    assert not outcome.ok
    assert "does not exist" in outcome.reason
    # 64 MB, as a container has: CPU ranks share memory that is not there.
    size = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(environment.os, "statvfs", lambda path: size)
    for cuda, ok in (("13.0", False), ("", True)):
        monkeypatch.setattr(environment, "built_for_cuda", lambda cuda=cuda: cuda)
        outcome = environment.shared_memory(Place(CPU), str(tmp_path))
        assert outcome.ok is ok
        assert ok or "docker run --shm-size" in outcome.reason


class Driver:
    """NVML of one H100, as far as the checks ask it."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.answers:
            raise AttributeError(name)
        return lambda *arguments: self.answers[name]


def memory(free: float) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(total=80 << 30, free=int(free * (80 << 30)))


def busy(percent: int) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(gpu=percent)


@pytest.mark.parametrize(
    ("name", "answers", "reason"),
    [
        ("idle", {"nvmlDeviceGetMemoryInfo": memory(0.98)}, ""),
        ("idle", {"nvmlDeviceGetMemoryInfo": memory(0.4)}, "GPU 0 is busy: 40% of its memory"),
        ("idle", {"nvmlDeviceGetMemoryInfo": memory(1.0),
                  "nvmlDeviceGetUtilizationRates": busy(97)}, "utilization 97%"),
        ("ecc", {"nvmlDeviceGetTotalEccErrors": 0}, ""),
        ("ecc", {"nvmlDeviceGetTotalEccErrors": 3}, "3 uncorrected"),
        ("ecc", {"nvmlDeviceGetRemappedRows": (0, 0, 1, 0)}, "row remaps"),
        ("mig", {"nvmlDeviceGetMigMode": (0, 0)}, ""),
        ("mig", {"nvmlDeviceGetMigMode": (1, 1)}, "MIG instances"),
        ("clocks", {"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, ""),
        ("clocks", {"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, "hardware slowdown, hardware"),
        ("power", {"nvmlDeviceGetEnforcedPowerLimit": 700_000,
                   "nvmlDeviceGetPowerManagementDefaultLimit": 700_000}, ""),
        ("power", {"nvmlDeviceGetEnforcedPowerLimit": 400_000,
                   "nvmlDeviceGetPowerManagementDefaultLimit": 700_000}, "nvidia-smi -i 0 -pl 700"),
        ("pcie", {"nvmlDeviceGetMaxPcieLinkGeneration": 5, "nvmlDeviceGetCurrPcieLinkWidth": 8,
                  "nvmlDeviceGetMaxPcieLinkWidth": 16}, "x8 of x16"),
        ("nvlink", {"nvmlDeviceGetNvLinkState": 1, "nvmlDeviceGetNvLinkErrorCounter": 0}, ""),
        ("nvlink", {"nvmlDeviceGetNvLinkState": 0}, "is inactive"),
        ("driver", {"nvmlSystemGetDriverVersion": b"580.65", "nvmlSystemGetCudaDriverVersion_v2":
                    13000}, ""),
    ],
)  # fmt: skip
def test_the_driver_is_asked(
    name: str, answers: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from hocket.doctor import environment

    @contextmanager
    def opened() -> Any:
        yield Driver(**answers)

    monkeypatch.setattr(environment, "nvml_opened", opened)
    check = by_id(f"env-{name}")
    assert check.driver
    outcome = check.resolve()(Place("gpu"))
    assert outcome.ok == (not reason), outcome.reason
    assert reason in outcome.reason


def test_what_nvml_does_not_answer_is_none() -> None:
    assert NvmlReport(Driver())("nvmlDeviceGetMigMode", 0) is None


def test_names_of_the_driver_are_found_in_the_catalogue() -> None:
    from hocket.catalogue import hardware

    for published_name, known in (
        (H100, "H100-SXM-80"), ("NVIDIA H200", "H200-SXM-141"), ("Tesla T4", "T4-16"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24"), ("NVIDIA L40S", "L40S-48"),
    ):  # fmt: skip
        assert hardware.gpu(catalogue_name(published_name)).name == known


# --- comparing and predicting ----------------------------------------------------------------


@pytest.mark.torch
def test_a_place_judges_differences_and_rates() -> None:
    import torch

    place = Place(CPU)
    place.compare("same", torch.ones(3), torch.ones(3), 1e-6)
    assert place.outcome().ok
    place.compare("off", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.9]), 1e-2)
    place.compare("nan", torch.tensor([torch.nan]), torch.tensor([1.0]), 1e-2)
    place.compare("shape", torch.ones(2), torch.ones(3), 1.0)
    place.at_least("rate", 1.0, 2.0)  # not judged in a rehearsal
    assert len(place.failures) == 3
    judged = Place("gpu")
    judged.at_least("rate", float("nan"), 2.0)
    judged.at_most("seconds", 3.0, 2.0)
    judged.near("step", 1.0, 1.3, 0.25)
    assert len(judged.failures) == 3
    assert judged.outcome().predicted == {"step": 1.3}


@pytest.mark.torch
@pytest.mark.parametrize("name", [H100, "NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_the_planners_predict_for_a_gpu_of_the_catalogue(name: str) -> None:
    from hocket.doctor import prediction, speed

    class There(Place):
        @property
        def name(self) -> str:
            return name

    place = There("gpu")
    found = speed.predict_step(place, "llama-3.2-1b", 4, 4096)
    assert found is not None
    assert 0.1 < found[0] < 2
    decode = speed.predict_decode(place, "llama-3-8b", 1, 1024)
    assert decode is not None
    assert 0.003 < decode < 0.05
    shapes = [(4096, 6144), (14336, 4096)]
    work = sum(2 * 4096 * k * n for k, n in shapes)
    least = work / place.peak_flops()
    assert least < prediction.predicted_matmuls(place, 4096, shapes) < 3 * least


def test_the_page_of_gpu_paths_names_checks_and_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reference" / "gpu-paths.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    files = set(re.findall(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+\.py)`", page))
    assert files
    assert [file for file in sorted(files) if not (ROOT / "tests" / file).exists()] == []
    ids = {check.id for check in CHECKS}
    named = {name for row in rows for name in re.findall(r"`([a-z0-9]+(?:-[a-z0-9_]+)+)`", row)}
    assert named
    assert sorted(named - ids) == []
