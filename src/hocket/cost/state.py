"""State: which ranks store a parameter, and how many of them share one copy of its state.

    dense      the dp x cp ranks of one tensor and pipeline coordinate store the same parameters
    experts    only dp x cp x tp / (etp x ep) of them do: the expert data parallel group
               (Megatron-Core's edp), since expert ranks hold different experts

The groups are those of `spec.process_groups`, their sizes those of `cost.group_strides`. ZeRO
divides state over ranks that would otherwise hold copies of it, and over no others. Sharded
over `shard` of dp ranks (HSDP), dense state is stored on shard x cp ranks, and that of experts on
those of them that hold the same experts.

Offloaded, state lies in the host's memory: a master in fp32 and two moments of what this rank
steps, pinned memory where gradients arrive and, for another type than fp32, where values leave
from; under `params` this rank's share of the parameters too.

Legend: ep expert ranks, etp tensor ranks of one expert; r rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.constants import Constants
from hocket.cost.group_strides import group_size, stride
from hocket.cost.layout_batch import Layouts
from hocket.cost.terms import BlockTerms, Floats

MASTER = 4.0
"""Bytes of a parameter's master, and of a gradient that the host steps from."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank, [r]: of experts, and all others."""

    dense: Floats
    expert: Floats

    @property
    def total(self) -> Floats:
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def times(self, factor: Floats | float) -> Parameters:
        return Parameters(self.dense * factor, self.expert * factor)


@dataclasses.dataclass(frozen=True)
class StateSharing:
    """Ranks that hold the same parameters, [r] each.

    Attributes:
        ranks: that share one copy of a sharded state. stride: ranks between neighbours of them.
        copies: groups of such ranks, each with a whole copy (HSDP's replicas).
    """

    ranks: Floats
    stride: Floats
    copies: Floats

    @property
    def holders(self) -> Floats:
        """Ranks that hold the same parameters: gradients are summed over them."""
        return self.ranks * self.copies


def local_parameters(block: BlockTerms, at: Layouts) -> Parameters:
    """Parameters of a block on one rank, as stored."""
    return _on_rank(block, "stored", at)


def local_trained(block: BlockTerms, at: Layouts) -> Parameters:
    """Those of `local_parameters` that are trained."""
    return _on_rank(block, "trained", at)


def imbalance_of(at: Layouts, constants: Constants) -> Floats:
    """Tokens of the most loaded expert rank over the mean, [r]: at most all of them, and 1 where
    every rank has every expert."""
    found: Floats = np.minimum(constants.expert_imbalance, np.maximum(at.ep, 1.0))
    return found


def _on_rank(block: BlockTerms, which: str, at: Layouts) -> Parameters:
    dense = expert = np.zeros_like(at.dp)
    for each in block.weights:
        if each.expert:
            expert = expert + getattr(each, which) * each.units_on_rank(at.expert_tp) / at.ep
        else:
            dense = dense + getattr(each, which) * each.units_on_rank(at.tp)
    return Parameters(dense, expert)


def state_groups(at: Layouts) -> tuple[StateSharing, StateSharing]:
    """Who holds the same dense parameters, and who the same experts."""
    shard, holders = group_size("shard", at), group_size("expert_data", at)
    dense = StateSharing(ranks=shard, stride=stride("shard", at), copies=group_size("replicas", at))
    # Experts: the ranks of `expert_data` that are data ranks of one `shard` group.
    near = np.maximum(np.floor(shard * holders / group_size("data", at)), 1.0)
    ranks = np.gcd(near.astype(np.int64), holders.astype(np.int64)).astype(np.float64)
    expert = StateSharing(ranks=ranks, stride=stride("expert_data", at), copies=holders / ranks)
    return dense, expert


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """State of one rank in bytes, [r]: on its device, and in the host's memory."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    host: Floats


def held(
    parameters: Parameters,
    trained: Parameters,
    widest: tuple[Parameters, Parameters],
    at: Layouts,
    constants: Constants,
    *,
    head: tuple[Parameters, Parameters],
    later: bool = False,
) -> HeldBytes:
    """Bytes of weights, gradients and optimizer state of one rank (Rajbhandari et al. 2020; Ren et
    al. 2021, ZeRO-Offload).

    Args:
        parameters, trained: of this rank before ZeRO.
        widest: the same of the largest layer, which ZeRO-3 gathers whole while it runs (and the
            next one with it), and whose gradients ZeRO-2 holds whole until they are reduced.
        head: the same of the head, where this rank has it.
        later: once the head's backward is over. Where layers are recomputed ZeRO-3 then has a
            layer's whole gradients and those of the one before it (or of the head) that are
            being reduced; else what layers saved shrinks faster.
    """
    found = [np.zeros_like(at.dp) for _ in range(4)]
    stepped, shards = at.offloads_optimizer, at.offloads_params  # in the host's memory
    wide = np.asarray(constants.weight_bytes) >= MASTER
    # Of other software the memory is fitted as it was measured.
    own = (at.zero >= 3) & (np.asarray(constants.eager_saved) > 0)
    leaving = np.where(wide, 0.0, constants.weight_bytes)
    state_there = constants.optimizer_bytes + np.where(wide, MASTER, 0.0)
    for part, group in zip(("dense", "expert"), state_groups(at), strict=True):
        if not any(np.any(getattr(w, part)) for w in (parameters, *widest)):
            continue  # no experts
        whole, of_trained = getattr(parameters, part), getattr(trained, part)
        gathers = (group.ranks > 1) | shards
        live, of_live = (np.where(gathers, getattr(w, part), 0.0) for w in widest)
        ends, of_ends = (np.where(gathers, getattr(w, part), 0.0) for w in head)
        share = whole / group.ranks
        two, in_flight = 2 * live, of_live
        if later:
            both = of_live + np.maximum(of_live, of_ends)
            # Where layers save little on the device, nothing shrinks meanwhile.
            small = at.recomputes("full") | at.offloads_activations
            in_flight = np.where(own & small, both, of_live)
        else:
            two = np.where(own, live + np.maximum(live, ends), two)
            in_flight = np.where(own, 0.0, of_live)
        found[0] = found[0] + constants.weight_bytes * np.where(
            at.zero >= 3, np.where(shards, 0.0, share) + two, whole
        )
        found[1] = found[1] + constants.gradient_bytes * np.where(
            at.zero >= 2, of_trained / group.ranks + in_flight, of_trained
        )
        state = constants.optimizer_bytes + np.asarray(constants.optimizer_copies)
        mine = of_trained / np.where(at.zero >= 1, group.ranks, 1.0)
        found[2] = found[2] + np.where(stepped, 0.0, state * mine)
        arriving = np.where(shards, constants.gradient_bytes, MASTER)
        on_host = (state_there + arriving + np.where(shards, 0.0, leaving)) * mine
        on_host = on_host + np.where(shards, constants.weight_bytes * share, 0.0)
        found[3] = found[3] + np.where(stepped, on_host, 0.0)
    return HeldBytes(*found)
