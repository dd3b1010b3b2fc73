"""Trace every decoder family transformers has a plan for, and compare parameter counts.

    python -m benchmarks.trace_families [FAMILY ...]

The configuration of each family is its class's default, at real size, with what is missing from
it for a few. The count of parameters is
that of the real modules, built on the meta device.
"""

from __future__ import annotations

import signal
import sys
import time
import warnings
from typing import Any

LONGEST = 60
"""Seconds for one family."""

SAID: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "moe_intermediate_size": 1536,
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
"""What the class's defaults leave open and only a checkpoint says."""


def families() -> list[str]:
    """Model types with a causal language model and a tensor- or pipeline-parallel plan."""
    import transformers

    from hocket.models import registry
    from hocket.models.plans.families import FAMILIES

    found = []
    for kind in sorted(registry.causal_classes()):
        try:
            config: Any = transformers.AutoConfig.for_model(kind)
        except Exception:
            continue
        plans = (
            getattr(config, "base_model_tp_plan", None),
            getattr(config, "base_model_pp_plan", None),
        )
        if kind in FAMILIES or any(plans):
            found.append(kind)
    return found


def compare(kind: str) -> tuple[str, str]:
    """(verdict, detail) of one family; the verdict is `equal`, `differs` or `fails`."""
    import torch
    import transformers

    from hocket.models import skeleton
    from hocket.models.trace import trace
    from hocket.spec.errors import ModelError

    config: Any = transformers.AutoConfig.for_model(kind)
    start = time.perf_counter()
    try:
        shape = trace(config)
    except ModelError as error:
        if kind not in SAID:
            return "fails", error.message
        # The class's defaults leave out what only a checkpoint's configuration says.
        config = transformers.AutoConfig.for_model(kind, **SAID.get(kind, {}))
        shape = trace(config)
    seconds = time.perf_counter() - start
    real = skeleton.build_skeleton(config.to_dict(), dtype=torch.bfloat16)
    count = sum(p.numel() for p in real.parameters())
    verdict = "equal" if count == shape.num_parameters else "differs"
    kinds = ", ".join(sorted({*shape.layers}))
    return verdict, f"{count:,} ({shape.num_parameters:,}) in {seconds:.2f} s; {kinds}"


def main(wanted: list[str]) -> int:
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"not traced within {LONGEST} s")

    signal.signal(signal.SIGALRM, too_long)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    verdicts: dict[str, list[str]] = {"equal": [], "differs": [], "fails": []}
    for kind in wanted or families():
        signal.alarm(LONGEST)
        try:
            verdict, detail = compare(kind)
        except Exception as error:
            verdict, detail = "fails", f"{type(error).__name__}: {str(error)[:120]}"
        finally:
            signal.alarm(0)
        verdicts[verdict].append(kind)
        print(f"{verdict:8}{kind:24}{detail}", flush=True)
    print({verdict: len(kinds) for verdict, kinds in verdicts.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
