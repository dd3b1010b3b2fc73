"""Replicas as threads of one process, the form of PyTorch's DataParallel.

For each microbatch, with n replicas of which the first (the master) is the module itself:

    1 scatter    the batch, by rows, to the replicas
    2 broadcast  the master's parameters and buffers to the others
    3 forward    each replica in a thread of its own
    4 gather     the outputs on the master
    5 loss       there, over the whole microbatch
    6 scatter    the gradient of the outputs
    7 backward   each replica in its thread
    8 reduce     the others' gradients, added onto the master's

It exists to be compared with replicas in processes: parameters travel every microbatch, all
outputs and their gradient meet on the master, and the threads share one interpreter lock. On a
CPU each replica's "device" is its own set of tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.record import Recorder

AXIS = "dp"


class ThreadedReplicas:
    """A module and its replicas.

    Args:
        module: the master replica; its gradients are those of the step.
        replicas: how many, the master included.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`. The output it gets
            is the gathered tensor, in an object's attribute `logits` if the module returns one.
        recorder: counts each collective, and tensor bytes in the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: int,
        loss_fn: Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor | int]],
        recorder: Recorder,
    ) -> None:
        assert replicas >= 1, replicas
        self.module = module
        self.loss_fn = loss_fn
        self.recorder = recorder
        self.replicas = [module, *(copy.deepcopy(module) for _ in range(replicas - 1))]
        self._threads = ThreadPoolExecutor(replicas, thread_name_prefix="replica")
        self._counting = True
        self._bytes: list[dict[str, int]] = [{} for _ in self.replicas]

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, Tensor]], num_tokens: float
    ) -> Tensor:
        """One step: gradients are added to the master's `.grad`.

        Args:
            microbatches: dicts of tensors [B, S, ...]; B is split over the replicas.
            num_tokens: valid tokens of all of them; the losses' sum is divided by it.

        Returns:
            The mean loss, detached, fp32.
        """
        losses = [
            self._microbatch(index, microbatch, num_tokens)
            for index, microbatch in enumerate(microbatches)
        ]
        self._counting = False
        return torch.stack(losses).sum()

    def replica_bytes(self) -> list[dict[str, int]]:
        """Tensor bytes of each replica in the first step, the master first.

        Keys: `parameters` (with buffers), `gradients`, `activations` (kept for backward, without
        parameters), `outputs` (its own), `gathered` (all outputs and their gradient: the
        master's alone), `inputs`, and their sum `total`.
        """
        return [{**row, "total": sum(row.values())} for row in self._bytes]

    def close(self) -> None:
        self._threads.shutdown()

    def _microbatch(
        self, index: int, microbatch: Mapping[str, Tensor], num_tokens: float
    ) -> Tensor:
        inputs = self._scatter({k: v for k, v in microbatch.items() if k != "labels"})  # 1
        replicas = self.replicas[: len(inputs)]
        self._broadcast(replicas)  # 2
        with self.recorder.span("compute", "F", f"0F{index}", stage=0, microbatch=index):
            outputs = self._parallel(self._forward, range(len(replicas)), inputs)  # 3
        gathered = self._gather(outputs)  # 4
        whole = gathered if isinstance(outputs[0], Tensor) else SimpleNamespace(logits=gathered)
        total, _ = self.loss_fn(whole, microbatch)  # 5
        loss = total.float() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        assert gathered.grad is not None
        tensors = [_tensor(output) for output in outputs]
        self._count("scatter", gathered.grad.nbytes)  # 6
        gradients = torch.split(gathered.grad, [t.shape[0] for t in tensors])
        with self.recorder.span("compute", "B", f"0B{index}", stage=0, microbatch=index):
            self._parallel(torch.autograd.backward, tensors, gradients)  # 7
        if self._counting:
            self._count_gradients(replicas, gathered)
        self._reduce(replicas)  # 8
        return loss.detach()

    def _parallel(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """`function` in every thread at once; the first error is raised here."""
        if len(self.replicas) == 1:
            return [function(*each) for each in zip(*arguments, strict=True)]
        return list(self._threads.map(function, *arguments))

    # --- collectives -----------------------------------------------------------------------

    def _count(self, name: str, nbytes: int) -> None:
        if len(self.replicas) > 1:
            self.recorder.count(name, AXIS, nbytes)

    def _scatter(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        self._count("scatter", sum(t.nbytes for t in batch.values()))
        pieces = {name: tensor.chunk(len(self.replicas)) for name, tensor in batch.items()}
        count = len(next(iter(pieces.values())))  # fewer rows than replicas: fewer replicas
        return [{name: chunks[i] for name, chunks in pieces.items()} for i in range(count)]

    @torch.no_grad()
    def _broadcast(self, replicas: list[nn.Module]) -> None:
        sources = _state(self.module)
        self._count("broadcast", sum(t.nbytes for t in sources))
        for replica in replicas[1:]:
            for source, target in zip(sources, _state(replica), strict=True):
                target.copy_(source)

    def _gather(self, outputs: list[Any]) -> Tensor:
        gathered = torch.cat([_tensor(output).detach() for output in outputs])
        self._count("gather", gathered.nbytes)
        return gathered.requires_grad_()

    @torch.no_grad()
    def _reduce(self, replicas: list[nn.Module]) -> None:
        moved = 0
        pairs = [list(replica.parameters()) for replica in replicas]
        for master, *others in zip(*pairs, strict=True):
            if master.requires_grad:
                moved += master.nbytes
            for other in others:
                if other.grad is None:
                    continue
                if master.grad is None:
                    master.grad = other.grad
                else:
                    master.grad += other.grad
                other.grad = None
        self._count("reduce", moved)

    # --- compute ---------------------------------------------------------------------------

    def _forward(self, index: int, inputs: dict[str, Tensor]) -> Any:
        replica = self.replicas[index]
        if not self._counting:
            return replica(**inputs)
        own = {t.untyped_storage().data_ptr() for t in _state(replica)}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = replica(**inputs)
        self._bytes[index] = {
            "inputs": sum(t.nbytes for t in inputs.values()),
            "parameters": sum(t.nbytes for t in _state(replica)),
            "activations": sum(saved.values()),
            "outputs": _tensor(output).nbytes,
        }
        return output

    def _count_gradients(self, replicas: list[nn.Module], gathered: Tensor) -> None:
        for row, replica in zip(self._bytes, replicas, strict=False):
            grads = (p.grad for p in replica.parameters())
            row["gradients"] = sum(g.nbytes for g in grads if g is not None)
            row["gathered"] = 0
        if len(replicas) > 1:
            self._bytes[0]["gathered"] = 2 * gathered.nbytes


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tensor(output: Any) -> Tensor:
    """The tensor of an output that the loss is computed from."""
    found = output if isinstance(output, Tensor) else output.logits
    assert isinstance(found, Tensor), type(output)
    return found
