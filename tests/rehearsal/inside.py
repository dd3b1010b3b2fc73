"""What tests execute in a worker, where the fake CUDA device is loaded before torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.rehearsal.execution import Actions, Execution, allocate, executing
from hocket.rehearsal.process_group import rehearsed_world
from hocket.runtime.data_parallel.buckets import on_gradient
from hocket.spec.rehearsal import RehearsedDevice

H100 = RehearsedDevice(name="H100-SXM-80", capability=(9, 0), memory=85_000_000_000)
CUDA = torch.device("cuda", 0)


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return "none"


def groups() -> dict[str, Any]:
    """How recorded groups answer, as torch's NCCL groups do."""
    with executing(H100, 1, 4) as execution, execution.fake():
        x = torch.ones(4, 4, device=CUDA)
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        sync = dist.all_reduce(x, group=rows[0])
        late = dist.all_reduce(x, group=split, async_op=True)
        assert late is not None
        late.wait()
        dist.send(x, dst=0, group=rows[0])
        world = execution.world
        return {
            "backend": dist.get_backend(),
            "outsider": rows[1] is dist.GroupMember.NON_GROUP_MEMBER,
            "sync": sync is None,
            "completed": late.is_completed(),
            "cpu": _refusal(lambda: dist.all_reduce(torch.ones(2))),
            "strided": _refusal(lambda: dist.all_reduce(x.t())),
            "sizes": _refusal(
                lambda: dist.all_gather_single(torch.empty(3, device=CUDA), x, group=rows[0])
            ),
            "families": [[list(row) for row in family.rows] for family in world.families],
            "calls": world.num_calls,
            "ops": [[op.name, list(op.group), op.peer, op.blocks] for op in world.trace.ops],
            "events": world.trace.events,
        }


def rejoined() -> list[str]:
    """The backend and the functions of torch are as before, after a world has ended."""
    before = dist.new_group
    with rehearsed_world(0, 2):
        inside = dist.get_world_size()
    return [str(inside), str(dist.is_initialized()), str(dist.new_group is before)]


def _reads_item(x: torch.Tensor) -> None:
    x.sum().item()


def _reads_bool(x: torch.Tensor) -> None:
    if x.sum() > 0:
        pass


def _reads_list(x: torch.Tensor) -> None:
    x.sum(0)[:1].tolist()


def _copies_to_host(x: torch.Tensor) -> None:
    x.cpu()


def _copies_from_host(x: torch.Tensor) -> None:
    torch.ones(3).to(x.device)


def _indexes_by_list(x: torch.Tensor) -> None:
    x[:, [0, 2]]


def _indexes_by_mask(x: torch.Tensor) -> None:
    assert x[x > 0].shape == (x.numel(),)


def _nonzero(x: torch.Tensor) -> None:
    x.nonzero()


def _copies_a_number(x: torch.Tensor) -> None:
    torch.tensor(0.5, device=x.device)


def _synchronizes(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def _reads_nothing(x: torch.Tensor) -> None:
    x.masked_fill(x > 0, 0.0)
    x.to("cpu", non_blocking=True)
    torch.where(x > 0, x, -x)
    x[1:, ::2]
    torch.cuda.Event().record()


READS = (
    _reads_item, _reads_bool, _reads_list, _copies_to_host, _copies_from_host, _indexes_by_list,
    _indexes_by_mask, _nonzero, _synchronizes, _reads_nothing, _copies_a_number,
)  # fmt: skip


def host_reads(inference: bool) -> dict[str, list[list[Any]]]:
    """Function to its host reads (what, file, line within the function, count).

    Args:
        inference: in inference mode, in which composed operations come as they are.
    """
    found = {}
    for function in READS:
        with (
            executing(H100, 0, 1) as execution,
            execution.fake(),
            torch.inference_mode(inference),
        ):
            x = torch.ones(4, 4, device=CUDA)
            execution.launches.counting = True
            function(x)
            first = inspect.getsourcelines(function)[1]
            found[function.__name__] = [
                [what, place.rpartition(":")[0], int(place.rpartition(":")[2]) - first, count]
                for (what, place), count in execution.launches.host_reads.items()
            ]
    return found


def _step(execution: Execution, width: int, rows: int) -> tuple[Any, ...]:
    """A linear layer's forward and backward, every storage with its owner."""
    memory = execution.memory
    layer = nn.Linear(width, width, bias=False, device=CUDA)
    moments = [torch.zeros_like(p) for p in layer.parameters()]
    memory.own("parameters", layer.parameters())
    memory.own("optimizer", moments)
    on_gradient(layer.weight, lambda p: memory.own("gradients", [p.grad]))
    x = torch.empty(rows, width, device=CUDA)
    memory.own("other", [x])
    memory.restart_peak()
    execution.launches.counting = True
    y = layer(x)
    gathered = torch.empty(2, width, device=CUDA)
    dist.all_gather_single(gathered, y[:1].detach().contiguous())
    (y.square().sum()).backward()
    del y, gathered
    return layer, moments, x


def memory(width: int, rows: int) -> dict[str, Any]:
    """Peak and what is left of one step of a linear layer, by owner."""
    with executing(H100, 0, 2) as execution, execution.fake():
        layer, *_kept = _step(execution, width, rows)
        live = execution.memory
        left = {"total": live.now()[0], **live.owned}
        layer.weight.grad = None
        return {
            "peak": live.peak,
            "at_peak": live.at_peak,
            "left": left,
            "without_gradient": live.now()[0],
            "launches": dict(execution.launches.kernels),
        }


def answers(name: str, capability: list[int]) -> dict[str, Any]:
    """What torch.cuda says on a fake GPU, and what it said before."""
    gpu = RehearsedDevice(name=name, capability=(capability[0], capability[1]), memory=1000, sms=7)
    before = torch.cuda.is_available()
    with executing(gpu, 0, 1) as execution, execution.fake():
        x = torch.empty(10, device=CUDA)
        found = {
            "name": torch.cuda.get_device_name(0),
            "capability": list(torch.cuda.get_device_capability()),
            "free": torch.cuda.mem_get_info()[0],
            "sms": torch.cuda.get_device_properties(0).multi_processor_count,
            "available": torch.cuda.is_available(),
        }
        del x
    return {**found, "before": before, "after": torch.cuda.is_available()}


def attention(capability: list[int]) -> list[str]:
    """The kernels of: bf16, bf16 with a mask, fp32, heads of 512, grouped heads."""
    gpu = RehearsedDevice(name="GPU", capability=(capability[0], capability[1]), memory=1)
    names = []
    with executing(gpu, 0, 1) as execution, execution.fake():
        for dtype, size, masked, heads in (
            (torch.bfloat16, 64, False, 4),
            (torch.bfloat16, 64, True, 4),
            (torch.float32, 64, False, 4),
            (torch.bfloat16, 512, False, 4),
            (torch.bfloat16, 64, False, 2),
        ):
            query = torch.empty(2, 4, 8, size, dtype=dtype, device=CUDA, requires_grad=True)
            key = torch.empty(2, heads, 8, size, dtype=dtype, device=CUDA)
            mask = torch.ones(8, 8, dtype=torch.bool, device=CUDA) if masked else None
            execution.attention.chosen.clear()
            out = nn.functional.scaled_dot_product_attention(
                query, key, key, attn_mask=mask, enable_gqa=heads < 4
            )
            assert out.shape == query.shape
            out.sum().backward()
            names += execution.attention.chosen
    return names


def uncached(job: dict[str, Any], rank: int) -> list[str]:
    """Fields of a rank's execution that the shape cache changes."""
    from hocket.rehearsal.shape_cache import ShapeCache
    from hocket.rehearsal.training import Rehearsal

    found = Rehearsal.of_json(job).rank(rank).to_json()
    assert not found["error"], found["error"]
    real = ShapeCache.call
    cache: Any = ShapeCache
    cache.call = lambda self, func, args, kwargs: func(*args, **kwargs)
    try:
        plain = Rehearsal.of_json(job).rank(rank).to_json()
    finally:
        cache.call = real
    return [name for name in found if name != "seconds" and found[name] != plain[name]]


def crash() -> None:
    """An error of ours."""
    raise ZeroDivisionError("on purpose")


def tiny_config(kind: str) -> dict[str, Any]:
    """The configuration of a type's tiny model, as config.json holds it."""
    from hocket.models.proxy import switched_proxy
    from hocket.models.samples import sample_config

    proxy, _ = switched_proxy(sample_config(kind), {})
    found: dict[str, Any] = json.loads(json.dumps(proxy.config.to_dict(), default=str))
    return found


def plain_launches(config: dict[str, Any]) -> dict[str, int]:
    """Launches by operation of a step of plain transformers on one GPU in fp32: forward and
    backward of one microbatch, clipping, AdamW with and without weight decay, the last two
    fused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    with executing(H100, 0, 1) as execution, execution.fake():
        allocate(module, CUDA)
        module.train()
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if (p.ndim > 1) == decayed], "weight_decay": 0.1}
            for decayed in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, fused=True)
        ids = torch.empty(1, 64, dtype=torch.long, device=CUDA)
        for step in range(2):
            if step:
                execution.begin(Actions(0, CUDA))
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
        execution.end()
        return dict(execution.launches.kernels)


def matmuls_in_8_bits() -> list[Any]:
    """Shape of an 8-bit matmul made and of one written to a given tensor; launches of both."""
    with executing(H100, 0, 1) as execution, execution.fake():
        one = torch.empty(16, 32, dtype=torch.float8_e4m3fn, device=CUDA)
        two = torch.empty(64, 32, dtype=torch.float8_e4m3fn, device=CUDA).t()
        scale = torch.empty((), device=CUDA)
        options: Any = {"scale_a": scale, "scale_b": scale, "out_dtype": torch.bfloat16}
        execution.begin(Actions(0, CUDA))
        made = torch._scaled_mm(one, two, **options)
        given = torch.empty(16, 64, dtype=torch.bfloat16, device=CUDA)
        written = torch._scaled_mm(one, two, **options, out=given)
        execution.end()
        launches = sum(n for k, n in execution.launches.kernels.items() if "_scaled_mm" in k)
        return [list(made.shape), list(written.shape), written is given, launches]


def flex_kernels(*, own: bool = False, **case: Any) -> dict[str, Any]:
    """`tests.rehearsal.flex_kernels.generated`. `own`: with the tiles that PyTorch chooses."""
    from unittest import mock

    from hocket.models import flex_attention
    from tests.rehearsal.flex_kernels import generated

    options = {"BACKEND": "TRITON"} if own else None
    with mock.patch.object(
        flex_attention, "kernel_options",
        (lambda *given: options) if own else flex_attention.kernel_options,
    ):  # fmt: skip
        return generated(**case)


def in_chunks() -> dict[str, Any]:
    """What of a compiled layer's collectives torch runs in chunks, next to their matmuls."""
    from hocket.doctor.compiling import rehearse_micro_pipeline
    from hocket.doctor.place import Place

    found = rehearse_micro_pipeline(Place("fake"))
    return {"ok": found.ok, "reason": found.reason, **found.values}
