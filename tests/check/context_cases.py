"""What ranks run in the tests of split sequences that are packed, adapted or rejected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.check.cases import CONFIGS, compose, spec_of


def trained(
    context: Any, folder: str, family: str, layout: str, options: dict[str, Any],
    dtype: str = "fp32",
) -> Any:  # fmt: skip
    """The report of a layout beside one process, with options of training."""
    from hocket.training.check import compare_layout
    from hocket.training.reference import write_reference

    spec = spec_of(family, layout)
    workload = dataclasses.replace(spec.workload, dtype=dtype)
    options = dataclasses.replace(spec.options, **options)
    spec = dataclasses.replace(spec, options=options, workload=workload)
    where = Path(folder)
    if context.rank == 0:
        write_reference(dataclasses.replace(spec, layout=spec_of(family, "dp1").layout), where, 3)
    dist.barrier()
    parallel, optimizer = compose(context, spec, {}, layout)
    report = compare_layout(spec, parallel, optimizer, where, 3)
    return report and json.loads(report.to_json())


def reasons(context: Any, types: list[str]) -> list[str]:
    """Why sequences of the smallest model of each type cannot be split; empty: they can."""
    from transformers import AutoConfig

    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.context import try_context

    found = []
    for kind in types:
        values = CONFIGS.get(kind) or AutoConfig.for_model(kind).to_dict()
        found.append(
            try_context(config_of(values, dropout=0.0), "sdpa", index=context.rank, degree=2)
        )
    return found
