"""The proxy check: does this architecture compute the same when it is split?

Some architectures break in silence: a norm that runs again on every stage, one block that many
layers share, positions added twice. So before the ranks of a job start, the user's own
architecture, at sizes that run in milliseconds, is cut into stages of one layer and split over
two ranks; its logits and every gradient are compared with the whole. The verdict is kept in the
user's cache folder, keyed by the architecture and the versions of what runs it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.proxy_verdict import (
    ProxyVerdict,
    read_verdict,
    reject,
    verdict_fields,
    verdict_file,
    write_verdict,
)
from hocket.spec.serving import replica_layout

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource


def require_equal(
    launcher: Launcher,
    source: ModelSource,
    layout: Layout,
    *,
    attention: str = "sdpa",
    loss: bool = True,
    pages: bool = False,
    packed: bool = False,
) -> ProxyVerdict:
    """Reject a layout that would change what this model computes, before its ranks start; with
    `loss`, also a model whose own loss is another than the one that is trained; with `pages`, one
    that would compute something else when it is served at this layout; with `packed`, one whose
    documents would see each other in a row that they share.

    Takes no time where the verdict is cached. The loss of a model with code of its own is not
    tried.

    Raises:
        ModelError: the proxy model differs, by name and with the reason.
    """
    wanted = verdict_fields(layout, loss=loss and source.code is None, pages=pages, packed=packed)
    if not wanted:
        return ProxyVerdict()
    file = verdict_file(source.config, attention) if source.code is None else None
    known = read_verdict(file)
    missing = known.missing(wanted)
    if missing:
        heard: list[dict[str, Any]] = []
        payload = {
            "config": source.config,
            "attention": attention,
            "code": None if source.code is None else str(source.code),
            "parts": missing,
        }
        launcher.run(
            entry="hocket.ranks.proxy.trial:main",
            world_size=2 if {"tensors", "slices", "context"} & {*missing} else 1,
            payload=payload,
            on_event=lambda event: heard.append(event) if event["event"] == "proxy" else None,
        )
        found = {part: heard[-1][part] for part in missing}
        if "loss" in missing:
            found["shifts"] = heard[-1]["shifts"]
        known = dataclasses.replace(known, **found, note=heard[-1]["note"] or known.note)
        write_verdict(file, known)
    reject(known, wanted, layout, source.name, str(source.config.get("model_type")))
    if pages:
        known = require_answers(launcher, source, layout, known, file)
    return known


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
