"""Collectives under NCCL's rules: no work of a synchronous call, device tensors, dense results."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from hocket.runtime import collectives as c
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from tests.runtime.nccl_rules import NcclGroup, RuleBroken

pytestmark = pytest.mark.torch

Call = Callable[[Axis, Recorder, torch.device], "Tensor | list[Tensor] | None"]


def _arange(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=device, dtype=dtype).view(shape)


def _all_reduce(axis: Axis, recorder: Recorder, device: torch.device) -> Tensor:
    x = torch.ones(3, device=device)
    assert c.all_reduce(x, axis, recorder) is None
    return x


def _broadcast(axis: Axis, recorder: Recorder, device: torch.device) -> Tensor:
    x = torch.ones(3, device=device)
    assert c.broadcast(x, axis, recorder, source=1) is None
    return x


def _scatter(axis: Axis, recorder: Recorder, device: torch.device) -> Tensor:
    whole = _arange(2, 4, device=device).t() if axis.index == 0 else None
    return c.scatter(whole, torch.empty(2, 2, device=device), axis, recorder)


def _gather(axis: Axis, recorder: Recorder, device: torch.device) -> list[Tensor] | None:
    return c.gather(_arange(2, 2, device=device).t(), axis, recorder)


def _reduce(axis: Axis, recorder: Recorder, device: torch.device) -> Tensor:
    x = torch.ones(2, device=device)
    c.reduce(x, axis, recorder)
    return x


SYNCHRONOUS: dict[str, tuple[Call, list[object]]] = {
    # The other rank holds what this one (index 0) holds, plus 1.
    "all_reduce": (_all_reduce, [3.0] * 3),
    "broadcast": (_broadcast, [2.0] * 3),
    "scatter": (_scatter, [[0.0, 4.0], [1.0, 5.0]]),
    "gather": (_gather, [[[0.0, 2.0], [1.0, 3.0]], [[1.0, 3.0], [2.0, 4.0]]]),
    "reduce": (_reduce, [3.0, 3.0]),
    "all_gather": (
        lambda a, r, d: c.all_gather(_arange(2, device=d), a, r),
        [0.0, 1.0, 1.0, 2.0],
    ),
    "reduce_scatter": (
        lambda a, r, d: c.reduce_scatter(_arange(4, device=d), a, r),
        [1.0, 3.0],
    ),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_synchronous_call_needs_no_work_handle(name: str) -> None:
    call, expected = SYNCHRONOUS[name]
    group = NcclGroup(2, 0)
    found = call(group.axis(), Recorder(), torch.device("cpu"))
    assert found is not None
    tensors = found if isinstance(found, list) else [found]
    values = [t.tolist() for t in tensors]
    assert (values if isinstance(found, list) else values[0]) == expected
    assert group.works == []
    assert len(group.calls) == 1


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("index", [0, 1])
def test_nothing_leaves_the_device_of_the_group(name: str, index: int) -> None:
    # On meta every tensor that a call makes by itself on the CPU is rejected by the group.
    group = NcclGroup(2, index, "meta")
    SYNCHRONOUS[name][0](group.axis(), Recorder(), torch.device("meta"))
    with pytest.raises(RuleBroken, match="No backend type"):
        SYNCHRONOUS[name][0](group.axis(), Recorder(), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_asynchronous_result_is_there_after_wait_only(dtype: torch.dtype) -> None:
    group = NcclGroup(2, 0)
    axis, recorder = group.axis(), Recorder()
    x = torch.ones(3, dtype=dtype)
    work = c.all_reduce(x, axis, recorder, async_op=True)
    assert work is not None
    assert not torch.equal(x.float(), torch.full((3,), 3.0))
    work.wait()
    assert x.tolist() == [3.0] * 3

    x = torch.ones(2, dtype=dtype)
    work = c.broadcast(x, axis, recorder, source=1, async_op=True)
    assert work is not None
    assert x.isnan().all()
    work.wait()
    assert x.tolist() == [2.0, 2.0]

    whole, shard = torch.arange(4.0).to(dtype), torch.zeros(2, dtype=dtype)
    work = c.reduce_scatter_flat(shard, whole, axis, recorder)
    assert work is not None
    assert shard.tolist() != [1.0, 3.0]
    work.wait()
    assert shard.tolist() == [1.0, 3.0]

    # In place, as ZeRO gathers parameters: the shard is a part of the whole.
    whole = torch.zeros(4, dtype=dtype)
    whole[:2] = 5.0
    work = c.all_gather_flat(whole, whole[:2], axis, recorder)
    assert work is not None
    work.wait()
    assert whole.tolist() == [5.0, 5.0, 6.0, 6.0]

    received = torch.zeros(2, dtype=dtype)
    sent, came = c.isend(torch.ones(2), axis, 1, recorder), c.irecv(received, axis, 1, recorder)
    assert received.isnan().all()
    sent.wait()
    came.wait()
    assert received.tolist() == [1.0, 1.0]
    assert all(each.waited for each in group.works)


def test_a_buffer_that_is_written_before_wait_is_caught() -> None:
    group = NcclGroup(2, 0)
    buffer = torch.ones(4)
    work = c.isend(buffer, group.axis(), 1, Recorder())
    buffer.zero_()
    with pytest.raises(RuleBroken, match="written before wait"):
        work.wait()


def test_what_nccl_rejects_is_refused_on_every_backend() -> None:
    axis, recorder = NcclGroup(2, 0).axis(), Recorder()
    strided = torch.ones(3, 2).t()
    for call in (
        lambda: c.all_reduce(strided, axis, recorder),
        lambda: c.broadcast(strided, axis, recorder),
        lambda: c.reduce(strided, axis, recorder),
        lambda: c.isend(strided, axis, 1, recorder),
        lambda: c.irecv(strided, axis, 1, recorder),
        lambda: c.scatter(torch.ones(4, 3), strided, axis, recorder),
    ):
        with pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize("shape", [(4,), (1, 4, 6), (2, 4, 6), (1, 1, 4, 2)])
def test_gathers_and_scatters_along_any_dim_are_dense(shape: tuple[int, ...]) -> None:
    group = NcclGroup(2, 1)
    axis, recorder = group.axis(), Recorder()
    x = _arange(*shape, device=torch.device("cpu"))
    for strided in (x, x.flip(-1), x.transpose(0, -1)):
        for dim in range(-strided.ndim, strided.ndim):
            whole = c.all_gather(strided, axis, recorder, dim=dim)
            assert torch.equal(whole, torch.cat([strided - 1, strided], dim))
            assert whole.is_contiguous()
            if strided.shape[dim] % 2 == 0:
                total = c.reduce_scatter(strided, axis, recorder, dim=dim)
                assert torch.equal(total, (2 * strided - 1).chunk(2, dim)[1])
                assert total.is_contiguous()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_uneven_shards_are_gathered_without_their_padding(dim: int) -> None:
    sizes = [3, 2]
    group = NcclGroup(2, 1)
    shape = [2, 2, 2]
    shape[dim] = sizes[1]
    x = torch.randn(shape)
    whole = c.all_gather(x, group.axis(), Recorder(), dim=dim, sizes=sizes)
    assert whole.is_contiguous()
    assert whole.shape[dim] == 5
    # This rank's own shard arrives as it was; the padding of the other one's is kept.
    assert torch.equal(whole.narrow(dim, 3, 2), x)
    assert torch.equal(whole.narrow(dim, 0, 2), x - 1)
