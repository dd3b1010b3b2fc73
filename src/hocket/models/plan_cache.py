"""Plans of models as their configurations make them, kept in the user's cache folder.

To find one takes a second small model and several of its forwards, which each rank would repeat,
and each start of a rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from hocket.models.plans import plan_for
from hocket.spec.files import json_crc32, parse_json, write_text
from hocket.spec.plan import ParallelPlan
from hocket.spec.user_cache import computed_file


def built_plan(skeleton: nn.Module, *, sequence: bool = False) -> ParallelPlan:
    """`plan_for` of a model that `build_skeleton` made and nothing has changed since.

    A model with code of its own is looked at each time, and so is one of whose splits any is
    missing: its trial may have failed for a reason of this process.
    """
    kind, config = type(skeleton), cast(Any, skeleton.config)
    if not kind.__module__.startswith("transformers."):
        return plan_for(skeleton, sequence=sequence)
    inputs = [kind.__module__, kind.__name__, repr(config.to_dict()), sequence]
    file = computed_file("plans", inputs, "models", "spec")
    plan = read_plan(file)
    if plan is None:
        plan = plan_for(skeleton, sequence=sequence)
        if plan.tensor and plan.stages and (plan.sequence or not sequence):
            write_plan(file, plan)
    return plan


def read_plan(file: Path) -> ParallelPlan | None:
    """The plan in a file; None where there is none, or not as it was written."""
    try:
        found: Any = parse_json(file.read_text())
        if json_crc32(found["plan"]) == found["crc32"]:
            return ParallelPlan.from_json(found["plan"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return None


def write_plan(file: Path, plan: ParallelPlan) -> None:
    """Keep a plan; a folder that cannot be written is passed over."""
    text = plan.to_json()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"plan": text, "crc32": json_crc32(text)}))
    except OSError:
        return  # a cache that cannot be written only costs the next start its search
