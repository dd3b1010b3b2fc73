"""Memory predicted: one step of each pipeline rank on tensors without memory, its bytes counted.

The model is built, cut, split and stepped just as `build` and `loop` do it, but on fake tensors
that know their sizes alone, and with groups that move nothing; the same count that later measures
the run sees every tensor that the step makes. Nothing is estimated: what differs from the
measurement is what a collective's own buffers hold.

Ranks that differ in dp alone hold the same; of those along tp the first holds most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.models.plan_cache import built_plan
from hocket.models.rows import one_sequence_each
from hocket.models.skeleton import build_skeleton
from hocket.models.source import run_source
from hocket.models.trace.grouped import GroupedProducts
from hocket.runtime.base_4bit import quantize_base
from hocket.runtime.lora import adapt
from hocket.runtime.mesh import Mesh
from hocket.runtime.parallelize import parallelize
from hocket.runtime.record import Recorder
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from hocket.spec.schedule import Schedule
from hocket.training.build import build_optimizer, dtype_of, keep_gradients, lora_of
from hocket.training.memory import MemoryBytes, MemoryCount

_Work: Any = dist._Work  # type: ignore[attr-defined]
_ProcessGroup: Any = dist.ProcessGroup


class _Done(_Work):
    """A collective that has nothing to do."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Sent(_Work):
    """A send: complete once the second receive that is posted after it is. Neighbours follow one
    order of messages, so that its receiver has taken it by then; shared memory, which moves what it
    has no room for while the sender waits, has often not by the first."""

    def __init__(self, group: _Silent) -> None:
        super().__init__()
        self.complete = False
        group.sent.append(self)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.complete


class _Received(_Work):
    """A receive, and the sends that were posted before it."""

    def __init__(self, group: _Silent) -> None:
        super().__init__()
        self.group = group
        self.before, group.sent = group.sent, []

    def wait(self, timeout: Any = None) -> bool:
        for sent in self.group.taken:
            sent.complete = True
        self.group.taken = self.before
        return True

    def is_completed(self) -> bool:
        return True


class _Silent(_ProcessGroup):
    """A group of one rank: its collectives move nothing and are done at once."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.sent: list[_Sent] = []
        self.taken: list[_Sent] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        return _Done()

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> _Done:
        return _Done()

    _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_gather_single

    def all_to_all_single(self, output: Tensor, given: Tensor, *rest: Any) -> _Done:
        return _Done()

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, target: int, tag: int) -> _Sent:
        return _Sent(self)

    def recv(self, tensors: Any, source: int, tag: int) -> _Received:
        return _Received(self)


def forecast_memory(spec: RunSpec, schedule: Schedule | None) -> list[MemoryBytes]:
    """What each rank will hold at the worst moment of its first step, by rank.

    Args:
        spec: of a training run; `data_parallel=threads` is not predicted.
        schedule: as in the run folder.

    Raises:
        HocketError: the model cannot be built, or not split as the layout asks.
    """
    layout = spec.layout
    assert layout.data_parallel != "threads", layout
    found: dict[tuple[int, int], MemoryBytes] = {}
    ranks = []
    for rank in range(layout.world_size):
        where = layout.coordinate(rank)
        key = where["pp"], where["tp"] if _uneven(spec, layout) else 0
        if key not in found:
            found[key] = _one(spec, schedule, rank)
        ranks.append(found[key])
    return ranks


def _uneven(spec: RunSpec, layout: Layout) -> bool:
    """Whether vocabulary rows do not divide over tp, so that its last rank holds fewer."""
    return bool(int(spec.config.get("vocab_size") or 0) % layout.tp)


def _one(spec: RunSpec, schedule: Schedule | None, rank: int) -> MemoryBytes:
    layout, options, workload = spec.layout, spec.options, spec.workload
    source = run_source(spec)
    skeleton = build_skeleton(
        source.config,
        attention=options.attention,
        dtype=dtype_of(workload.dtype),
        dropout=options.dropout,
        code=source.code,
    )
    plan = built_plan(skeleton, sequence=layout.sequence_parallel)
    mesh = silent_mesh(layout, rank)
    parallel = parallelize(
        skeleton,
        layout,
        plan,
        mesh=mesh,
        schedule=schedule,
        seed=options.seed,
        bucket_mb=options.bucket_mb,
        labels_shifted=True,
    )
    rows = workload.global_batch // layout.dp // (layout.microbatches or 1)
    with _fake(options.packing == "documents"):
        for stage in parallel.stages:
            _to_empty(stage.module)
        lora = lora_of(skeleton, options)
        if lora is not None:
            adapt(parallel, lora, values=False)
        keep_gradients(parallel, options)
        if options.quantize_base is not None:
            quantize_base(parallel)
        parallel.finish()
        parallel.train()
        optimizer = build_optimizer(parallel, options)
        optimizer.state_tensors()
        count = MemoryCount(parallel.tensors(), optimizer.tensors, torch.device("cpu"))
        ids = torch.zeros(rows, workload.seq_len, dtype=torch.long)
        positions = torch.arange(workload.seq_len).expand(rows, -1).contiguous()
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}
        microbatches = [dict(batch) for _ in range(layout.microbatches or 1)]
        with count.counting():
            parallel.forward_backward(microbatches, workload.global_batch * workload.seq_len)
            parallel.clip_grad_norm(0.0)  # scaling in place holds nothing
            optimizer.step(options.lr)
    return count.memory


def _to_empty(module: torch.nn.Module) -> None:
    """Take a module off the meta device; a parameter of several modules stays one."""
    meta = {id(p): p for p in module.parameters()}
    places = [
        (child, key, id(p))
        for child in module.modules()
        for key, p in child._parameters.items()
        if p is not None
    ]
    module.to_empty(device="cpu")
    made: dict[int, torch.nn.Parameter | None] = {}
    for child, key, old in places:
        child._parameters[key] = made.setdefault(old, child._parameters[key])
    meta.clear()


@contextmanager
def _fake(packed: bool) -> Iterator[None]:
    # Of packed documents transformers builds a mask, which it does by itself where it cannot look.
    rows = nullcontext() if packed else one_sequence_each()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, rows, GroupedProducts(), _CpuAttention():  # type: ignore[no-untyped-call]
        yield


class _CpuAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attention's output as the CPU kernel lays it out: token by token, heads inside.

    The fake one takes its query's order, and a copy would be counted that is not made.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            size, dtype = out[0].shape, out[0].dtype
            laid = torch.empty_permuted(size, (0, 2, 1, 3), dtype=dtype, device=out[0].device)
            return (laid, *out[1:])
        return out


def silent_mesh(layout: Layout, rank: int) -> Mesh:
    """The mesh of one rank whose groups move nothing."""
    return Mesh(layout, rank, "cpu", Recorder(rank), group_factory=_silent)


def _silent(rows: Sequence[tuple[int, ...]], rank: int, name: str) -> Any:
    return next((_Silent(row.index(rank), len(row)) for row in rows if rank in row), None)
