"""Weights: names and shapes of a model's files against the model, before its ranks start.

Only headers are read. One process of the warm server does it: shapes need the model, and so torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.jobs import prepare

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.spec.run import RunFolder, RunSpec


def require_weights(launcher: Launcher, folder: RunFolder, spec: RunSpec) -> None:
    """Refuse weight files whose names or shapes do not fit. Raises WeightsError, listing them."""
    if spec.weights is not None:
        launcher.run("hocket.ranks.weights:main", 1, prepare.rank_payload(folder, spec))
