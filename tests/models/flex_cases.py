"""Models with soft caps, sinks and unequal head sizes, and steps of them, whole and over tp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

from hocket.doctor.families import FLEXIBLE as FAMILIES
from hocket.models import attention, flex_attention, rows
from hocket.models.skeleton import build_skeleton

__all__ = ["FAMILIES"]

PLAIN = torch.arange(24).expand(2, -1).contiguous()
PACKED = torch.tensor(
    [[*range(10), *range(3), *range(11)], [*range(1), *range(8), *range(15)]]
)  # fmt: skip


@contextmanager
def noted(positions: Any, documents: rows.Documents | None) -> Iterator[None]:
    """As the training loop has it."""
    rows.note_documents(positions, documents)
    with rows.one_sequence_each() if documents is None else rows.packed_rows():
        yield


@contextmanager
def unfused() -> Iterator[list[Any]]:
    """Within, CPU tensors count as CUDA's, and flex attention is PyTorch's unfused implementation,
    with gradients, which it refuses to give on a CPU. Gives the shapes of its queries."""
    calls: list[Any] = []

    def flex(query: Any, *given: Any) -> Any:
        calls.append(tuple(query.shape))
        return flex_attention.flex_attend(query, *given)

    def of_compiled(query: Any, *given: Any) -> Any:
        inside = torch.compiler.is_compiling()
        return flex_attention.flex_attend(query, *given) if inside else flex(query, *given)

    # Functions, not mocks: a compiled layer calls them.
    def on_cuda(device: Any) -> bool:
        return True

    def capability(device: Any) -> tuple[int, int]:
        return 9, 0

    def accepted(*tensors: Any) -> None:
        return None

    with (
        mock.patch.object(attention, "_on_cuda", on_cuda),
        mock.patch.object(attention, "capability_of", capability),
        mock.patch.object(attention, "_flex", of_compiled),
        mock.patch.object(torch_flex, "_validate_device", accepted),
        mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield calls


def fill(model: Any) -> None:
    """Values that make soft caps and sinks matter, the same for each name on every rank."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        drawn = torch.randn(parameter.shape, generator=generator)
        spread = 1.0 if "sinks" in name or parameter.ndim == 1 else 0.3
        parameter.data.copy_(drawn * spread)


def ids_of(positions: Any) -> Any:
    return torch.randint(0, 64, positions.shape, generator=torch.Generator().manual_seed(3))


def step(
    config: dict[str, Any],
    positions: Any,
    *,
    on_cuda: bool = False,
    bends: bool = True,
    backend: Callable[..., Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Logits and gradients of one model and batch.

    Args:
        on_cuda: as a CUDA rank prepares it. bends: with soft caps and sinks.
        backend: that compiles its layers. None: they are not.
    """
    model: Any = build_skeleton(dict(config), device="cpu")
    fill(model)
    if on_cuda:
        attention.choose_kernels_on_cuda(model)
    if backend is not None:
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True, dynamic=False)  # a break raises
    attend = flex_attention.flex_attend

    def straight(*given: Any) -> Any:
        return attend(*given[:5], None, None)

    with nullcontext() if bends else mock.patch.object(flex_attention, "flex_attend", straight):
        logits = model(input_ids=ids_of(positions), position_ids=positions, use_cache=False).logits
        if logits.requires_grad:
            logits.square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def over_tp(context: Any, families: list[str], sequence: bool = False) -> list[dict[str, Any]]:
    """A step over tp through flex attention, compared with the family's own code in one process."""
    from hocket.models.masks import of_whole_sequences
    from hocket.models.plans import plan_for
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.parallelize import parallelize
    from hocket.spec.layout import Layout
    from tests.runtime.cases import compare

    layout = Layout(tp=context.world_size, sequence_parallel=sequence)
    found = []
    for family, positions in itertools.product(families, (PLAIN, PACKED)):
        config = dict(FAMILIES[family])
        positions = positions.clone()
        ids = ids_of(positions)
        labels = torch.roll(ids, -1, 1)
        whole: Any = build_skeleton(config, device="cpu")
        fill(whole)
        logits = whole.train()(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()

        model: Any = build_skeleton(config, device="cpu")
        fill(model)
        plan = plan_for(model, sequence=sequence)
        if sequence:
            of_whole_sequences()
        attention.choose_kernels_on_cuda(model)
        mesh = Mesh(layout, context.rank)
        parallel = parallelize(model.train(), layout, plan, mesh=mesh, labels_shifted=True)
        sinks = [p for name, p in parallel.named_parameters() if name.endswith(".sinks")]
        batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
        with unfused() as calls, noted(positions, rows.documents_in(positions)):
            value = float(parallel.forward_backward([batch], num_tokens=labels.numel()))
        found.append({
            "family": family, "loss": value, "wanted": float(loss), "calls": len(calls),
            "heads": calls[0][1] if calls else 0, "sinks": [p.numel() for p in sinks],
            **compare(parallel, whole),
        })  # fmt: skip
    return found
