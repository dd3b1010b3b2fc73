"""Failure: where the code of a model's family fails, in words of ours."""

from __future__ import annotations

import errno
import logging
import traceback
from pathlib import Path

import torch

_OWN = ("torch", "hocket")
_EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC)


def raise_if_exhausted(error: BaseException | None) -> None:
    """Raise an error of a process that has no memory, files or threads left: it says nothing about
    the model that was tried, and a verdict that is kept would outlive it."""
    if (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(error, OSError) and error.errno in _EXHAUSTED)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))  # of torch's, CPU
    ):
        raise error


def failure_place(error: BaseException | None) -> str:
    """`FalconAttention.forward (line 335 of modeling_falcon.py)`: the innermost code of the family
    that raised an error, or the innermost code at all where none of it is the family's.

    The error's own text, which is PyTorch's, goes to the log at level debug.

    Raises:
        Exception: the error itself, if it is of an exhausted process (`raise_if_exhausted`).
    """
    raise_if_exhausted(error)
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
