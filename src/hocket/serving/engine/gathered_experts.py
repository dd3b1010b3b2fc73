"""Experts over ranks on a GPU: which steps gather their tokens.

A step whose tokens are gathered reads nothing on the host and can be captured
(`runtime.expert_parallel.gathered`); where that is impossible, every step is dispatched and none is
captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from hocket.models.experts import skip_absent
from hocket.runtime.expert_parallel import gather_experts
from hocket.runtime.expert_parallel.gathered import GatheredTokens
from hocket.runtime.mesh import Mesh

_DISPATCHED = "experts over ranks, the host reads how many rows go where: "


def gathered_tokens(
    module: nn.Module, mesh: Mesh, *, recurrent: bool
) -> tuple[GatheredTokens | None, str]:
    """The steps of a stage that gather tokens; None: there are no experts over ranks, or all steps
    are dispatched, for the reason that follows.

    Args:
        recurrent: layers keep states, whose idle steps run eagerly.
    """
    if mesh.layout.ep == 1:
        return None, ""
    found, why = None, "layers keep recurrent states"
    if not recurrent:
        found, why = gather_experts(module, skip_absent)
    return found, "" if found else _DISPATCHED + why


@contextlib.contextmanager
def gathering(
    gathered: GatheredTokens | None, rows: int | None = None, *, always: bool = False
) -> Iterator[None]:
    """Within, so many tokens of each data rank are gathered; `always`: whatever their number."""
    if gathered is None:
        yield
        return
    gathered.rows, gathered.always = rows, always
    try:
        yield
    finally:
        gathered.rows, gathered.always = None, False
