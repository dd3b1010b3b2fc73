"""How the first deployment of a service plan is run: as `hocket serve`, vLLM or SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.spec.capabilities import QUANTIZED
from hocket.spec.errors import OptionError, unknown

if TYPE_CHECKING:
    from hocket.catalogue.models import CatalogueModel
    from hocket.planning.service.plan import ServicePlan

HOCKET = "hocket"
RUN_HERE = ("bf16", "fp32")
"""Precisions that hocket serves in."""


def check_tool(tool: str, *, model: str, one: bool) -> None:
    """Raises OptionError for an unknown tool, or a model that has several hypotheses.

    Args:
        one: whether the model is one all the same.
    """
    from hocket.jobs.serving.plan import size_is_public
    from hocket.planning.service.emit import SERVERS
    from hocket.planning.tools.emit import TOOLS

    if tool in TOOLS:
        raise OptionError(
            f"--emit {tool}: {tool} trains, and --serve plans a service",
            hint=f"one of: {', '.join(SERVERS)}",
        )
    if tool not in (HOCKET, *SERVERS):
        message, hint = unknown("tool", tool, (HOCKET, *SERVERS))
        raise OptionError(f"--emit with --serve: {message}", hint=hint)
    if not one and not size_is_public(model):
        raise OptionError(
            f"{model} has several hypotheses, and one deployment is printed",
            hint="--weights 180GB, or a model whose size is known",
        )


def pins_of(tool: str | None, layout: str | None, pins: Sequence[str]) -> tuple[str, ...]:
    """The pins of a plan that is printed for a server: those of others have no flag for cp."""
    free = layout is None and not any(pin.startswith("cp") for pin in pins)
    return (*pins, "cp=1") if tool not in (None, HOCKET) and free else tuple(pins)


def emitted_deployment(plan: ServicePlan, tool: str) -> str:
    """The best deployment as another server's command.

    Raises:
        OptionError: an unknown server, or a deployment that it cannot divide so.
    """
    from hocket.planning.service.emit import Deployment
    from hocket.planning.service.emit import server_command as tools_command

    check_tool(tool, model=plan.model, one=True)
    if tool == HOCKET:
        words = serve_command([plan])
        if words is None:
            raise OptionError(
                f"{plan.model}: hocket serve does not run this deployment: it is one node in bf16 "
                "or fp32, or with linear layers and experts in fp8, and caches in 16 bits or "
                f"fp8; the plan is of {plan.stored.title}, cached in {plan.cache_precision}",
                hint="--quantization none --cache-precision bf16, or --emit vllm",
            )
        return shlex.join(["hocket", *words]) + "\n"
    best = plan.best
    if best is None:
        raise OptionError(f"{plan.model}: there is no deployment to print")
    if best.layout.cp > 1:
        raise OptionError(
            f"{tool} has no flag for the layout {best.layout}: each of its context ranks (cp) "
            "has a part of every block",
            hint="--emit hocket",
        )
    entry = catalogue_entry(plan.model)
    kind = next(kind for kind in plan.kinds if kind.best is best)
    deployment = Deployment(
        model=_served_model(plan, entry),
        tp=best.layout.tp,
        pp=best.layout.pp,
        replicas=best.replicas,
        ep=best.layout.ep,
        redundant=best.redundant_experts,
        gpu=best.gpu,
        gpus_per_node=kind.gpus_per_node,
        tokens=plan.request_tokens,
        max_sequences=best.rank_sequences,
        max_num_batched_tokens=best.max_num_batched_tokens,
        usable=plan.usable,
        precision=plan.precision,
        expert_precision=plan.stored.expert_precision,
        cache_precision=plan.cache_precision,
        heads=plan.heads,
        layers=plan.layers,
        experts=plan.experts,
        quantized=plan.stored.published,
        dequantized=plan.stored.quantization == "none" and not plan.stored.published,
    )
    return tools_command(tool, deployment)


def serve_command(plans: Sequence[ServicePlan]) -> list[str] | None:
    """The words of `hocket serve` for the best deployment; None where hocket does not run it."""
    from hocket.planning.gpu_servers import GpuServers

    best = plans[0].best if len(plans) == 1 else None
    if best is None or plans[0].claim or best.num_nodes > 1:
        return None
    model = plans[0].model
    entry = catalogue_entry(model)
    served = _served_model(plans[0], entry)
    if not served_here(plans[0]) or served == "MODEL":
        return None
    stored = plans[0].stored
    few = [] if stored.quantization == "none" else ["--quantization", stored.quantization]
    few += ["--kv-cache-dtype", "fp8"] if plans[0].cache_precision == "fp8" else []
    copies = best.redundant_experts
    few += ["--redundant-experts", str(copies)] if copies else []
    if plans[0].usable != GpuServers.usable:
        few += ["--gpu-memory-utilization", f"{plans[0].usable:g}"]
    return [
        "serve", served, "--layout", best.layout.axes_text(), "--dtype", stored.dtype, *few,
        "--max-model-len", str(plans[0].request_tokens), "--max-num-seqs", str(best.rank_sequences),
        "--max-num-batched-tokens", str(best.max_num_batched_tokens),
    ]  # fmt: skip


def served_here(plan: ServicePlan) -> bool:
    """Whether `hocket serve` computes with weights that are stored so, and its cache."""
    few, entry = plan.cache_precision == "fp8", catalogue_entry(plan.model)
    if few and entry is not None and entry.config.get("kv_lora_rank") is not None:
        return False  # latent vectors are cached in 16 bits
    if plan.cache_precision not in ("bf16", "fp8"):
        return False
    if plan.stored.quantization in QUANTIZED:
        return True
    return plan.stored.quantization == "none" and plan.precision in RUN_HERE


def catalogue_entry(model: str) -> CatalogueModel | None:
    """The catalogue's entry of a name; None for any other model."""
    from hocket.catalogue import models as catalogued

    return catalogued.entry(model) if model in catalogued.model_names() else None


def _served_model(plan: ServicePlan, entry: CatalogueModel | None) -> str:
    """What a server loads: a name on the Hub, a directory, or `MODEL` where neither is known."""
    if plan.claim:
        return "MODEL"
    if entry is None:
        return plan.model
    return entry.hub_id or "MODEL"
