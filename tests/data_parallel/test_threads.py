"""Replicas in threads: one process's result, and every step counted by name."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.data_parallel import ThreadedReplicas
from hocket.runtime.record import Recorder
from tests.runtime_pipeline.models import (
    HIDDEN,
    SEQUENCE,
    VOCABULARY,
    batch,
    llama,
    loss_fn,
    plain,
    reference,
    slices,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make", [plain, llama])
@pytest.mark.parametrize("tied", [False, True])
def test_the_result_is_one_processs(make, replicas: int, tied: bool) -> None:
    torch.manual_seed(0)
    module, plan = make(2, tied)
    whole = batch(8, plan.input_argument)
    expected, gradients = reference(module, whole)
    tokens = int((whole["labels"] != -100).sum())
    threads = ThreadedReplicas(module, replicas, loss_fn, Recorder())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        loss = threads.forward_backward(slices(whole, 2), tokens)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6)
        # The replicas follow the master: what the optimizer changes reaches them.
        optimizer.step()
        optimizer.zero_grad()
        expected, gradients = reference(module, whole)
    threads.close()


def test_each_collective_is_counted() -> None:
    torch.manual_seed(0)
    module, plan = plain(2)
    parameters = sum(p.numel() for p in module.parameters()) * 4
    whole = batch(8, plan.input_argument)
    recorder = Recorder()
    recorder.phase = "microbatch"
    threads = ThreadedReplicas(module, 2, loss_fn, recorder)
    threads.forward_backward(slices(whole, 2), 10)
    logits = 8 * SEQUENCE * VOCABULARY * 4  # over both microbatches
    batches = 2 * 8 * SEQUENCE * 8  # ids and positions, int64
    rows = {r["name"]: (r["axis"], r["count"], r["bytes"]) for r in recorder.collectives()}
    assert rows == {
        "scatter": ("dp", 4, batches + logits),
        "broadcast": ("dp", 2, 2 * parameters),
        "gather": ("dp", 2, logits),
        "reduce": ("dp", 2, 2 * parameters),
    }
    threads.close()


def test_the_master_carries_more() -> None:
    torch.manual_seed(0)
    module, plan = plain(2)
    parameters = sum(p.numel() for p in module.parameters()) * 4
    threads = ThreadedReplicas(module, 2, loss_fn, Recorder())
    threads.forward_backward([batch(8, plan.input_argument)], 10)
    master, other = threads.replica_bytes()
    logits = 8 * SEQUENCE * VOCABULARY * 4
    assert master["gathered"] == 2 * logits
    assert other["gathered"] == 0
    assert master["total"] - other["total"] == master["gathered"]
    for row in (master, other):
        assert row["parameters"] == row["gradients"] == parameters
        assert row["outputs"] == logits // 2
        assert row["inputs"] == 2 * 4 * SEQUENCE * 8
        # Each block keeps at least its normalized input and the wide one twice.
        assert row["activations"] > 2 * 4 * SEQUENCE * 7 * HIDDEN * 4
    threads.close()


def test_one_replica_communicates_with_nobody() -> None:
    module, plan = plain(1)
    recorder = Recorder()
    threads = ThreadedReplicas(module, 1, loss_fn, recorder)
    threads.forward_backward([batch(2, plan.input_argument)], 10)
    assert recorder.collectives() == []
    threads.close()


def test_an_error_in_a_thread_is_raised() -> None:
    module, plan = plain(1)
    threads = ThreadedReplicas(module, 2, loss_fn, Recorder())
    whole = batch(2, plan.input_argument)
    whole[plan.input_argument][1, 0] = VOCABULARY + 7
    with pytest.raises(IndexError):
        threads.forward_backward([whole], 10)
    threads.close()
