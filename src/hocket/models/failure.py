"""Failure: where the code of a model's family fails, in words of ours."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

_OWN = ("torch", "hocket")


def failure_place(error: BaseException | None) -> str:
    """`FalconAttention.forward (line 335 of modeling_falcon.py)`: the innermost code of the family
    that raised an error, or the innermost code at all where none of it is the family's.

    The error's own text, which is PyTorch's, goes to the log at level debug.
    """
    logging.getLogger(__name__).debug("a proxy model fails", exc_info=error)
    frames = list(traceback.walk_tb(error.__traceback__ if error is not None else None))
    family = [
        (frame, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN
        and "site-packages" in frame.f_code.co_filename
    ]
    if not family and any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames):
        return "its backward pass"
    if not frames:
        return type(error).__name__
    frame, line = (family or frames)[-1]
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    name = name if owner is None else f"{type(owner).__name__}.{name}"
    return f"{name} (line {line} of {Path(frame.f_code.co_filename).name})"
