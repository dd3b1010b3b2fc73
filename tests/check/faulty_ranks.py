"""The matrix's ranks, of which some die, raise or compute something else."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hocket.ranks import matrix as matrix_rank
from hocket.ranks.matrix import try_parts, widen  # noqa: F401  entries without faults
from hocket.training import check


def prepare_cases(context: Any, payload: dict[str, Any]) -> None:
    whole = matrix_rank._prepare

    def faulty(kind: str, *rest: Any) -> dict[str, Any]:
        if kind == "gemma":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(kind, *rest)

    matrix_rank._prepare = faulty
    matrix_rank.prepare_cases(context, payload)


def compare_cases(context: Any, payload: dict[str, Any]) -> None:
    whole = matrix_rank._compare

    def faulty(context: Any, spec: Any, *rest: Any) -> Any:
        case = spec.model, str(spec.layout)
        if case == ("gpt2", "tp2") and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == ("opt", "dp2"):
            raise RuntimeError("out of luck")
        with pytest.MonkeyPatch.context() as patch:
            tipped = case == ("llama", "tp2") and spec.workload.dtype == "fp32"
            if case == ("llama", "dp2") or tipped:
                patch.setattr(check._Rank, "gradient", lambda rank, n: rank.gradients[n] * 1.001)
            return whole(context, spec, *rest)

    matrix_rank._compare = faulty
    matrix_rank.compare_cases(context, payload)
