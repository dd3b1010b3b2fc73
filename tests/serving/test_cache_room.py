"""Memory that a GPU has left for the cache, after weights, communicators, a step and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.serving.engine import memory  # noqa: E402
from hocket.spec.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.torch

GB = 10**9


class _Gpu:
    """A GPU of 80 GB whose free memory is what its users leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, weights: int) -> None:
        self.used = weights
        self.order: list[str] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 * GB))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(memory, "warm_up", self.communicators)

    @property
    def free(self) -> int:
        return 80 * GB - self.used

    def communicators(self, mesh: Any) -> None:
        self.order.append("communicators")
        self.used += 2 * GB

    def step(self) -> int:
        self.order.append("step")
        return 3 * GB

    def trial(self) -> Iterator[int]:
        self.order.append("graphs")
        self.trial_bytes = 0
        for rows, nbytes in ((256, 4 * GB), (1, GB // 10)):
            self.used += nbytes
            self.trial_bytes += nbytes
            yield rows

    def drop(self) -> None:
        self.used -= self.trial_bytes

    def runner(self, graphs: int) -> Any:
        return SimpleNamespace(
            device=torch.device("cuda", 0), mesh=None, step_bytes=self.step, num_graphs=graphs,
            trial_graphs=self.trial, drop_trial=self.drop, max_num_batched_tokens=8192,
            state_bytes=0,
        )  # fmt: skip


def test_room_is_what_communicators_the_largest_step_and_all_graphs_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, weights=16 * GB)
    room = memory.affordable_cache_bytes(gpu.runner(graphs=13), 1)
    free = (80 - 16 - 2) * GB
    graphs = 4 * GB + 12 * GB // 10  # the largest, and what each smaller one adds
    assert room == int(free * memory.CUDA_SHARE) - 3 * GB - graphs
    assert gpu.order == ["communicators", "step", "graphs"]


def test_a_fraction_of_the_gpu_is_of_all_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch, weights=16 * GB)
    room = memory.affordable_cache_bytes(gpu.runner(graphs=13), 1, 0.5)
    taken = gpu.used + 3 * GB + 4 * GB + 12 * GB // 10  # the largest step, and all graphs
    assert room + taken == 40 * GB
    runner = _Gpu(monkeypatch, weights=16 * GB).runner(graphs=13)
    with pytest.raises(OptionError, match=r"2 GB of 80 GB free .* within 25% .* 8\.2 GB") as caught:
        memory.affordable_cache_bytes(runner, 1, 0.25)
    value = float(str(caught.value.hint).removeprefix("--gpu-memory-utilization "))
    runner = _Gpu(monkeypatch, weights=16 * GB).runner(graphs=13)
    assert 0 < memory.affordable_cache_bytes(runner, 1, value) < 2 * GB


def test_a_gpu_without_room_is_rejected_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch, weights=71 * GB)
    with pytest.raises(OptionError, match=r"7 GB of 80 GB free .* take 8\.2 GB") as caught:
        memory.affordable_cache_bytes(gpu.runner(graphs=13), 1)
    assert caught.value.hint == "--max-num-batched-tokens 2048"
