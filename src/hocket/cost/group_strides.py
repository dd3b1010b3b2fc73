"""GroupStrides: ranks of a group and ranks between its neighbours, for many layouts at once.

`spec.process_groups` lists the groups of one layout rank by rank. In the default order (tp fastest,
then cp, dp, pp) the ranks of each group are equally far apart, and the distance is a product of
degrees:

    axis         stride             ranks
    tp           1                  tp
    cp           tp                 cp
    dp           tp cp              dp
    pp           tp cp dp           pp
    embedding    tp cp dp (pp - 1)  2
    expert       etp                ep
    expert_data  etp ep             dp cp tp / (etp ep)
    data         tp                 dp cp
    shard        tp                 (data ranks that share one ZeRO state) cp
    replicas     tp cp shard        dp / shard

A test compares each with the groups of random layouts. Other orders: `planning.placement`.
"""

from __future__ import annotations

import numpy as np

from hocket.cost.layout_batch import Layouts
from hocket.cost.terms import Floats


def stride(axis: str, at: Layouts) -> Floats:
    """Ranks between neighbours of the groups of an axis, [r].

    Raises:
        KeyError: the table above does not have the axis.
    """
    if axis == "tp":
        return np.ones_like(at.tp)
    if axis == "expert":
        return at.expert_tp
    if axis == "expert_data":
        return at.expert_tp * at.ep
    stage = at.tp * at.cp * at.dp
    strides: dict[str, Floats] = {
        "cp": at.tp, "dp": at.tp * at.cp, "pp": stage, "embedding": stage * (at.pp - 1),
        "data": at.tp, "shard": at.tp, "replicas": at.tp * group_size("shard", at),
    }  # fmt: skip
    return strides[axis]


def group_size(axis: str, at: Layouts) -> Floats:
    """Ranks of each group of an axis, [r]; 1 where the layout has no such group.

    Raises:
        KeyError: the table above does not have the axis.
    """
    match axis:
        case "expert":
            return at.ep
        case "embedding":
            return np.minimum(at.pp, 2.0)
        case "data":
            return at.dp * at.cp
        case "shard":
            return np.minimum(at.shard, at.dp) * at.cp
        case "replicas":
            return at.dp / np.minimum(at.shard, at.dp)
        case "expert_data":
            return np.rint(at.dp * at.cp * at.tp / (at.expert_tp * at.ep))
    return {"tp": at.tp, "cp": at.cp, "dp": at.dp, "pp": at.pp}[axis]
