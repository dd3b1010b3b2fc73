"""hocket: plan, train and serve Hugging Face causal language models across many devices.

Which model types are trained and served, and in which layouts: docs/reference/families.md and
docs/reference/served-families.md; `hocket models check MODEL` prints it for one model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hocket.jobs.api import check, export, generate, plan, serve, train
    from hocket.jobs.parallelize import parallelize
    from hocket.jobs.serving.llm import LLM
    from hocket.serving.request import SamplingParams
    from hocket.spec.errors import HocketError
    from hocket.spec.layout import Layout
    from hocket.spec.plan import ParallelPlan
    from hocket.spec.schedule import Schedule
    from hocket.spec.timeline import Timeline

# Each public name is loaded when it is first asked for: `import hocket` loads nothing heavy.
_HOME = {
    "HocketError": "hocket.spec.errors",
    "LLM": "hocket.jobs.serving.llm",
    "Layout": "hocket.spec.layout",
    "ParallelPlan": "hocket.spec.plan",
    "SamplingParams": "hocket.serving.request",
    "Schedule": "hocket.spec.schedule",
    "Timeline": "hocket.spec.timeline",
    "check": "hocket.jobs.api",
    "export": "hocket.jobs.api",
    "generate": "hocket.jobs.api",
    "parallelize": "hocket.jobs.parallelize",
    "plan": "hocket.jobs.api",
    "serve": "hocket.jobs.api",
    "train": "hocket.jobs.api",
}

__all__ = [
    "LLM",
    "HocketError",
    "Layout",
    "ParallelPlan",
    "SamplingParams",
    "Schedule",
    "Timeline",
    "check",
    "export",
    "generate",
    "parallelize",
    "plan",
    "serve",
    "train",
]


def __getattr__(name: str) -> Any:
    from hocket.spec import renamed

    if name in renamed.EXPORTS:
        renamed.warn(f"hocket.{name}", f"hocket.{renamed.EXPORTS[name]}")
        name = renamed.EXPORTS[name]
    if name not in _HOME:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
