"""Verify: one step's batches are computed twice, on swapped data ranks, and compared bit by bit.

    pass 1    data rank d computes the batch of d
    pass 2    data rank d computes the batch of d + 1

Each rank hashes its loss and every gradient that backward hands to a parameter, before anything is
reduced over data ranks; equal devices with equal weights and batches give equal bits. A batch whose
two results differ has one of two ranks at fault; of three or more data ranks the one that both of
its batches accuse. This finds a device that computes wrongly, which a comparison of replicas does
not: their gradients are reduced, and so are equally wrong (Dixit et al. 2021, "Silent Data
Corruptions at Scale").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.runtime import collectives
from hocket.runtime.random import draws_random_numbers
from hocket.spec.errors import OptionError, ReplicaError
from hocket.training import timeline

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.training.inputs import Inputs


class StepVerification:
    """Computes a step's batches twice on every data rank. All ranks call it together.

    Args:
        context: of this rank.
        parallel: what computes. inputs: of this data rank.
        every: steps between two that are verified; 0: none.

    Raises:
        OptionError: results of a batch depend on more than the batch and the weights.
    """

    def __init__(self, context: RankContext, parallel: Any, inputs: Inputs, every: int) -> None:
        self._context, self._parallel, self._inputs = context, parallel, inputs
        self._every = every
        if not every:
            return
        layout = parallel.layout
        reason = None
        if layout.dp < 2 or parallel.replicas is not None:
            reason = f"the layout {layout} has no second process that computes the same"
        elif layout.ep > 1:
            reason = f"in the layout {layout} a batch is computed by experts of several data ranks"
        elif any(draws_random_numbers(stage.module) for stage in parallel.stages):
            reason = "the model draws random numbers (dropout)"
        if reason is not None:
            raise OptionError(f"verify_every: {reason}", hint="leave --verify-every out")

    def before(self, index: int) -> None:
        """Verify step `index` (from 0), if it is its turn. Raises as `compare`."""
        if self._every and (index + 1) % self._every == 0:
            self.compare(index)

    def compare(self, index: int) -> None:
        """Compute the batches of step `index` (from 0) twice; gradients are gone afterwards.

        Raises:
            ReplicaError: a batch has two results, with the rank at fault and the first difference.
        """
        parallel, inputs = self._parallel, self._inputs
        axis = parallel.mesh.axis("dp")
        other = (inputs.data_rank + 1) % inputs.order.data_ranks
        names, own = self._hashes(index, inputs.data_rank)
        _, swapped = self._hashes(index, other)
        mine = torch.stack([own, swapped]).reshape(1, -1)
        rows = collectives.all_gather(mine.view(torch.uint8), axis, parallel.mesh.recorder)
        rows = rows.contiguous().view(torch.int64).cpu().reshape(axis.size, 2, -1)
        wrong: list[tuple[int, int]] = []  # (batch, first difference)
        for batch in range(axis.size):
            first, second = rows[batch, 0], rows[(batch - 1) % axis.size, 1]
            if not torch.equal(first, second):
                wrong.append((batch, int((first != second).nonzero()[0])))
        found = timeline.gather_values(
            self._context, f"verified/{index}", self._accused(wrong, names)
        )
        text = None if found is None else next((one for one in found if one), "")
        if self._context.world_size > 1:
            store, key = self._context.store(), f"verify/{index}"
            if text is not None:
                store.set(key, text)
            text = store.get(key).decode()
        if text:
            raise ReplicaError(
                f"step {index + 1} computed twice has two results: {text}",
                hint="replace that device; --resume continues from the last checkpoint",
            )

    def _accused(self, wrong: list[tuple[int, int]], names: list[str]) -> str:
        if not wrong:
            return ""
        ranks = self._parallel.mesh.axis("dp").ranks
        size = len(ranks)
        pairs = [{batch, (batch - 1) % size} for batch, _ in wrong]
        common = set.intersection(*pairs)
        if size == 2 or len(common) != 1:
            who = f"one of ranks {sorted({ranks[i] for pair in pairs for i in pair})}"
        else:
            who = f"rank {ranks[common.pop()]}"
        where = names[wrong[0][1]]
        return f"{who} computes wrongly; first difference: {where}"

    def _hashes(self, index: int, data_rank: int) -> tuple[list[str], Tensor]:
        """Names and hashes of what one pass over a data rank's batch gives, before reduction."""
        parallel, inputs = self._parallel, self._inputs
        names: list[str] = []
        hashes: list[Tensor] = []
        handles = []
        for stage in parallel.stages:
            for name, parameter in stage.module.named_parameters():
                if not parameter.requires_grad:
                    continue

                def note(gradient: Tensor, name: str = name) -> None:
                    names.append(f"gradient of {name}")
                    hashes.append(torch.hash_tensor(gradient).view(torch.int64))

                handles.append(parameter.register_hook(note))
        try:
            parallel.forward_backward(inputs.of(index, data_rank), inputs.num_tokens(index))
            loss = torch.hash_tensor(parallel.own_loss.reshape(-1)).view(torch.int64)
        finally:
            for handle in handles:
                handle.remove()
            parallel.step -= 1
            parallel.zero_grad()
        return ["the loss", *names], torch.stack([loss, *hashes])
