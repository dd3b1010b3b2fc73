"""Reason: why a rehearsed job is rejected, where its proxy model shows it.

`hocket train` and `hocket serve` try the proxy model of an architecture before ranks start. A
rehearsal does so for a server, whose steps may execute and give other answers, and for a step that
a rank cannot execute: the same reason is given as without a rehearsal.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hocket.jobs.rehearsal_workers import StepFailed
from hocket.spec.errors import HocketError, ModelError
from hocket.spec.proxy_verdict import read_verdict, reject, verdict_file, write_verdict
from hocket.spec.run import RunSpec

if TYPE_CHECKING:
    from hocket.jobs.rehearsal_workers import RehearsalWorkers


def require_pages(spec: RunSpec, workers: RehearsalWorkers) -> None:
    """Reject a model that cannot be served from a paged cache. A model with code of its own is not
    tried.

    Raises:
        ModelError: with the reason that `hocket serve` gives.
    """
    from hocket.models.source import run_source

    source = run_source(spec)
    if source.code is not None:
        return
    file = verdict_file(source.config, spec.options.attention)
    known = read_verdict(file)
    if known.pages is None:
        task = {
            "task": "call",
            "entry": "hocket.ranks.proxy.trial:pages_verdict",
            "arguments": {"config": source.config},
        }
        (event,) = workers.run([task])
        known = dataclasses.replace(known, pages=event["value"])
        write_verdict(file, known)
    kind = str(source.config.get("model_type"))
    reject(known, ["pages"], spec.layout, source.name, kind)


def proxy_reason(spec: RunSpec, failed: HocketError) -> HocketError:
    """The error of a job whose rank cannot execute its step: what `hocket train` raises before its
    ranks start, for the architecture or for how it is split; where it raises nothing, `failed`."""
    from hocket.jobs.proxy import require_equal
    from hocket.launch import Launcher
    from hocket.models.source import run_source

    if not isinstance(failed, StepFailed):
        return failed
    try:
        with Launcher("cpu", 1) as launcher:
            require_equal(
                launcher,
                run_source(spec),
                spec.layout,
                attention=spec.options.attention,
                loss=spec.serving is None,
            )
    except ModelError as error:
        error.add_note(failed.message)
        return error
    return failed
