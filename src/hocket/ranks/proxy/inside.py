"""The proxy check inside ranks that already run: what `hocket.parallelize` does before it splits.

1 rank 0 reads the cached verdict, and all ranks learn what is missing
2 rank 0 tries the loss, the stages and recompute; ranks 0 and 1 try the tensors; the others wait
3 all ranks learn the verdict, rank 0 caches it, and each rejects or goes on
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from hocket.ranks.proxy.context import try_context
from hocket.ranks.proxy.loss import try_loss
from hocket.ranks.proxy.trial import try_recompute, try_stages, try_tensors
from hocket.spec.proxy_verdict import (
    RECOMPUTED,
    ProxyVerdict,
    read_verdict,
    reject,
    verdict_fields,
    verdict_file,
    write_verdict,
)

if TYPE_CHECKING:
    from torch import nn

    from hocket.spec.layout import Layout


_OF_TWO_RANKS = frozenset({"tensors", "slices", "context"})
"""What cannot be tried by one rank: its collectives would leave memory as it was."""


def require_equal_inside(module: nn.Module, layout: Layout, *, loss: bool) -> ProxyVerdict:
    """Reject a layout that would change what a Hugging Face model computes. Every rank calls it.

    Args:
        module: the whole model; only its configuration is read.
        layout: how it is to be split.
        loss: the model is trained on its own loss, which is compared too.

    Raises:
        ModelError: the proxy model differs, by name and with the reason.
    """
    import torch.distributed as dist

    from hocket.models.skeleton import config_of

    own: Any = module.config
    values = own.to_dict()
    wanted = verdict_fields(layout, loss=loss)
    if not wanted:
        return ProxyVerdict()
    attention = "eager" if getattr(own, "_attn_implementation", "") == "eager" else "sdpa"
    several = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(backend="gloo") if several else None
    pair = dist.new_group([0, 1], backend="gloo") if several else None
    leads = group is None or dist.get_rank() == 0
    file = verdict_file(values, attention)
    known = _agreed(read_verdict(file) if leads else ProxyVerdict(), group)
    missing = known.missing(wanted)
    assert several or not _OF_TWO_RANKS.intersection(missing), missing
    if missing:
        if leads or dist.get_rank() == 1:
            config = config_of(values, dropout=0.0)
            found = _tried(missing, config, attention, pair, leads=leads)
            known = dataclasses.replace(known, **found)
        known = _agreed(known, group)
        if leads:
            write_verdict(file, known)
    for each in (pair, group):
        if each is not None:
            dist.destroy_process_group(each)
    reject(known, wanted, layout, type(module).__name__, str(values.get("model_type")))
    return known


def _tried(
    missing: list[str], config: Any, attention: str, pair: Any, *, leads: bool
) -> dict[str, Any]:
    """What this rank finds out, by field of a Verdict."""
    found: dict[str, Any] = {}
    if "loss" in missing and leads:
        found["loss"], found["shifts"] = try_loss(config, attention)
    if "stages" in missing and leads:
        found["stages"] = try_stages(config, attention)
    if RECOMPUTED.keys() & {*missing} and leads:
        found |= try_recompute(config, attention)
    if "context" in missing:
        found["context"] = try_context(
            config, attention, index=0 if leads else 1, degree=2, group=pair
        )
    for part in ("tensors", "slices"):
        if part in missing:
            found[part], note = try_tensors(
                config, attention, index=0 if leads else 1, degree=2, slices=part == "slices",
                group=pair,
            )  # fmt: skip
            if note:
                found["note"] = note
    return found


def _agreed(mine: ProxyVerdict, group: Any) -> ProxyVerdict:
    """Rank 0's verdict, on all ranks."""
    if group is None:
        return mine
    import torch
    import torch.distributed as dist

    text = json.dumps(dataclasses.asdict(mine)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0, group=group)
    row = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        row = torch.tensor([*text], dtype=torch.uint8)
    dist.broadcast(row, 0, group=group)
    return ProxyVerdict(**json.loads(bytes(row.tolist())))
