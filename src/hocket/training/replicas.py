"""Replicas: data-parallel ranks compare checksums of what they must hold equal.

    what                         axis over which it is replicated
    weights                      dp;        with ZeRO-3: replicas
    optimizer state, masters     dp;        with ZeRO: replicas
    of experts over ranks (ep)   expert_data; with ZeRO sharded over it, and not compared

Each rank hashes its tensors, 8 bytes each, and the axis gathers them. A flipped bit, or a device
that computes wrongly, then shows as a tensor whose checksum differs on one rank. Of three or more
replicas the majority is right; of two, either may be wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.runtime import collectives
from hocket.spec.errors import ReplicaError

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.runtime.mesh import Axis


class ReplicaCheck:
    """Compares and repairs the replicas of one rank's tensors. All ranks call it together.

    Args:
        context: of this rank.
        parallel, optimizer: whose tensors are compared.
        repair: the majority's values replace others.
    """

    def __init__(
        self, context: RankContext, parallel: Any, optimizer: Any, *, repair: bool
    ) -> None:
        self._context, self._parallel, self._optimizer = context, parallel, optimizer
        self._repair = repair
        mesh, zero = parallel.mesh, parallel.layout.zero
        self._mesh = mesh
        self._weights: Axis = mesh.axis("replicas" if zero == 3 else "dp")
        self._state: Axis = mesh.axis("replicas" if zero else "dp")
        self._experts: Axis | None = None
        if parallel.layout.ep > 1:
            self._experts = mesh.axis("expert_data")
        threads = parallel.replicas is not None
        self.needed = not threads and max(self._weights.size, self._state.size) > 1
        layout = parallel.layout  # equal on all ranks
        self.needed = self.needed and layout.dp > 1

    def _held(self) -> list[tuple[Axis, list[tuple[str, Tensor]]]]:
        sharded = self._parallel.layout.zero == 3
        self._parallel.begin_unshard()
        if not sharded and self._parallel.layout.zero:
            self._parallel.unshard()
        named = self._parallel.named_stepped() if sharded else self._parallel.named_parameters()
        weights = [(name, p.detach()) for name, p in named]
        state = [
            (f"{key} of {name}", tensor)
            for name, states in self._optimizer.state_tensors().items()
            for key, tensor in states.items()
        ]
        if self._experts is None:
            return [(self._weights, weights), (self._state, state)]
        placements, zero = self._parallel.placements, self._parallel.layout.zero
        held = []
        for axis, named_tensors, sharded in (
            (self._weights, weights, zero == 3),
            (self._state, state, bool(zero)),
        ):
            apart = [
                (name, tensor)
                for name, tensor in named_tensors
                if placements[name.rpartition(" of ")[2]].is_expert
            ]
            names = {name for name, _ in apart}
            held.append((axis, [one for one in named_tensors if one[0] not in names]))
            if not sharded:
                held.append((self._experts, apart))
        return held

    @torch.no_grad()
    def compare(self, step: int) -> str | None:
        """Compare all replicas after `step`; what was repaired, None where all are equal.

        Raises:
            ReplicaError: they differ, and are not to be repaired or have no majority.
        """
        found: list[str] = []
        stuck = False
        with self._mesh.recorder.in_phase("other"):
            for axis, held in self._held():
                if axis.size == 1 or not held:
                    continue
                for index, ranks, source in self._differences(axis, [t for _, t in held]):
                    name = held[index][0]
                    who = f"rank {ranks[0]}" if source is not None else f"one of ranks {ranks}"
                    found.append(f"{who} differs in {name}")
                    if self._repair and source is not None:
                        whole = held[index][1].contiguous()
                        collectives.broadcast(whole, axis, self._mesh.recorder, source)
                        held[index][1].copy_(whole)
                    else:
                        stuck = True
            flags = torch.tensor([float(bool(found)), float(stuck)], device=self._mesh.device)
            collectives.all_reduce(flags, self._mesh.axis("world"), self._mesh.recorder, op="max")
        if not flags[0]:
            return None
        text = self._difference(step, found)
        if not flags[1]:
            return f"replicas differed after step {step}: {text}; repaired from the majority"
        raise ReplicaError(
            f"data-parallel replicas differ after step {step}: {text}",
            hint="--on-divergence repair; a device that does so again should be replaced",
        )

    def _differences(
        self, axis: Axis, tensors: list[Tensor]
    ) -> list[tuple[int, list[int], int | None]]:
        """(index of the tensor, ranks at fault, an index of the axis that has the majority's value
        or None) of each tensor whose checksum is not the same on all of the axis."""
        sums = torch.stack(
            [torch.hash_tensor(t).view(torch.int64).to(self._mesh.device) for t in tensors]
        )
        mine = sums.reshape(1, -1)
        rows = collectives.all_gather(
            mine.view(torch.uint8), axis, self._mesh.recorder
        ).contiguous().view(torch.int64).cpu()  # fmt: skip
        found = []
        for index in (rows != rows[:1]).any(0).nonzero().flatten().tolist():
            values = rows[:, index].tolist()
            (value, count), *_ = Counter(values).most_common(1)
            most = 2 * count > len(values)
            ranks = [axis.ranks[i] for i, v in enumerate(values) if not most or v != value]
            found.append((index, ranks, values.index(value) if most else None))
        return found

    def _difference(self, step: int, found: list[str]) -> str:
        """The same text on all ranks: of the first that found a difference."""
        more = f" and {len(found) - 3} more tensors" if len(found) > 3 else ""
        text = "; ".join(found[:3]) + more
        if self._context.world_size == 1:
            return text
        store, key = self._context.store(), f"replicas/{step}"
        if found:
            return str(store.compare_set(key, "", text).decode())
        return str(store.get(key).decode())
