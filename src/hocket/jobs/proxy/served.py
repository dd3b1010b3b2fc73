"""The proxy model served at a layout, compared with plain transformers before a server starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.proxy_verdict import ProxyVerdict, write_verdict
from hocket.spec.serving import replica_layout

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource


def require_answers(
    launcher: Launcher, source: ModelSource, layout: Layout, known: ProxyVerdict, file: Path | None
) -> ProxyVerdict:
    """Serve the proxy model at a layout that splits, unless the verdict is known. Raises
    ModelError: its answers are not those of plain transformers."""
    from hocket.jobs.serving import check

    replica = replica_layout(
        Layout(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    )
    if replica.world_size == 1:
        return known
    if (text := str(replica)) not in known.served:
        reason = check.proxy_check(launcher, source, replica)
        known = dataclasses.replace(known, served={**known.served, text: reason})
        write_verdict(file, known)
    if known.served[text]:
        raise ModelError(
            f"{source.name} does not answer as plain transformers does when it is served at "
            f"{text}: of its tiny proxy model, {known.served[text]}",
            hint="--layout dp1",
        )
    return known
