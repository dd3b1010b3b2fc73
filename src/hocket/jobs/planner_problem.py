"""What the planner is asked: a name becomes a shape, and with a cluster and a batch a Problem.

A model of the catalogue ships with its shape, so torch is imported only for a directory's model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import OptionError
from hocket.spec.global_batch import default_global_batch
from hocket.spec.prediction_layers import prediction_layers

if TYPE_CHECKING:
    from hocket.planning.problem import Problem
    from hocket.planning.tools.limits import ToolLimits
    from hocket.spec.cluster import Cluster, Gpu
    from hocket.spec.layout import Layout
    from hocket.spec.model_shape import ModelShape


def training_problem(
    shape: ModelShape,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    precision: str | None = None,
    grad_dtype: str | None = None,
    stack: str | None = None,
    limits: tuple[ToolLimits, ...] = (),
    model_type: str = "",
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize_base: str | None = None,
    optimizer: str | None = None,
    expert_imbalance: float | None = None,
    mtp_layers: int | None = None,
) -> Problem:
    """What the planner is asked of one model, cluster and batch on GPUs.

    Args: as `plan_training`; `limits`: software that must be able to run every layout. Without
        stack and limits it is hocket itself that runs them.

    Raises:
        OptionError: a precision that the GPU lacks, adapters that the model cannot have, or layers
            for multi-token prediction with software that does not train them.
    """
    from hocket.cost.adapters import of_options
    from hocket.planning.problem import EXPERT_IMBALANCE, OWN, STACK, Problem
    from hocket.planning.tools.limits import division

    _require_prediction(mtp_layers, limits, lora_rank)
    predicting = shape.on_gpu().with_prediction(mtp_layers or 0)
    return Problem(
        shape=of_options(predicting, lora_rank, lora_targets, quantize_base),
        cluster=cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision or default_precision(cluster.node.gpu),
        grad_dtype=grad_dtype,
        optimizer=optimizer or "adamw",
        stack=stack or (STACK if limits else OWN),
        division=division(limits),
        limits=limits,
        model_type=model_type,
        expert_imbalance=EXPERT_IMBALANCE if expert_imbalance is None else expert_imbalance,
    )


MOST_PREDICTION = 16
"""Layers for multi-token prediction; published models have one or two."""


def _require_prediction(
    layers: int | None, limits: tuple[ToolLimits, ...], lora_rank: int | None
) -> None:
    """Raises OptionError where the software trains no such layers, or not so many."""
    if layers is None:
        return
    if not 0 <= layers <= MOST_PREDICTION:
        raise OptionError(
            f"--mtp-layers is {layers}; it is a number from 0 to {MOST_PREDICTION}",
            hint="--mtp-layers 1",
        )
    if layers and lora_rank is not None:
        raise OptionError(
            "--mtp-layers with --lora-rank: adapters are planned without multi-token prediction",
            hint="leave --mtp-layers out",
        )
    without = (
        "hocket"
        if not limits
        else next((one.software for one in limits if not one.predictions), None)
    )
    if layers and without is not None:
        raise OptionError(
            f"--mtp-layers is {layers}; {without} trains no layers for multi-token prediction",
            hint="--stack megatron-core, or --stack nemo",
        )


PLANNED_SEQ_LEN = 4096
"""Tokens of a planned sequence where none are given and the model has as many positions."""


def planned_seq_len(model: str) -> int:
    """Tokens of a sequence where none are given: as `jobs.defaults.with_length` on GPUs."""
    return min(positions_of(model) or PLANNED_SEQ_LEN, PLANNED_SEQ_LEN)


def planned_global_batch(
    cluster: Cluster,
    seq_len: int,
    layout: Layout | None = None,
    pins: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Sequences of a step where none are given: `spec.global_batch` with what `layout` or `pins`
    fix of dp, microbatch and microbatches."""
    fixed = [pins.get(name) for name in ("dp", "microbatch", "microbatches")]
    if layout is not None:
        fixed = [layout.dp, layout.microbatches]
    unit = math.prod(value or 1 for value in fixed)
    return default_global_batch(0 if cluster.is_cpu else cluster.num_gpus, seq_len, unit)


def batch_note(batch: int, cluster: Cluster) -> str:
    """That a batch was chosen, and the flag that sets it."""
    each = "" if cluster.is_cpu else f", {batch / cluster.num_gpus:.3g} for each GPU"
    return f"Global batch: {batch:,} sequences{each}, was chosen; --global-batch N sets it."


def default_precision(gpu: Gpu) -> str:
    """The first of bf16, fp16 and fp32 that a device computes matrix products in."""
    return next((name for name in ("bf16", "fp16", "fp32") if name in gpu.flops), "bf16")


def model_shape(model: str) -> ModelShape:
    """The shape of a model: shipped for the catalogue's, traced for any other.

    Of a model of the Hub the configuration alone is downloaded; where it is one that the catalogue
    has, no torch is needed.

    Raises:
        ModelError: nothing of that name, with the nearest; or a configuration that does not run.
    """
    from hocket.models import source

    if (known := shipped_shape(model)) is not None:
        return known
    found = source.resolve_model(model, weights=False)
    found.dimensions  # noqa: B018  rejects what no trace would come to the end of
    from hocket.models.trace import trace

    return trace(found.config, name=model)


def shipped_shape(model: str) -> ModelShape | None:
    """The shape of a model of the catalogue, which needs no torch; None of any other."""
    from hocket.catalogue import shapes

    name = _shipped(model)
    return None if name is None else dataclasses.replace(shapes.shape(name), name=model)


def storage_note(model: str, *, serve: bool = False) -> str:
    """Of a quantized checkpoint how its weights are stored, and what the plan has computed with;
    empty of any other model."""
    from hocket.catalogue import models
    from hocket.models import quantization

    if model in models.model_names() or not (os.path.exists(model) or "/" in model):
        return ""
    if _shipped(model) is not None and "quantization_config" not in _hub_config(model):
        return ""  # the catalogue's own, which needs no torch to be known
    text = quantization.storage_text(model)
    if serve or not text:
        return text
    return f"{text}; hocket reads them into its own dtype, and the plan is of that"


def published_quantization(model: str) -> str:
    """How the weights of a checkpoint are quantized, as `planning.service.stored` names it; empty
    where they are not.

    Raises:
        ModelError: as `model_shape`, or a quantization that is not read.
    """
    from hocket.catalogue import models
    from hocket.models import quantization, source

    if model in models.model_names():
        return models.entry(model).quantized
    if not os.path.exists(model) and "/" not in model:
        return ""
    name = _shipped(model)
    if name is not None:
        return models.entry(name).quantized if "quantization_config" in _hub_config(model) else ""
    directory = source.resolve_model(model, weights=False).directory
    return "" if directory is None else quantization.stored_in(directory)


def _shipped(model: str) -> str | None:
    """The name in the catalogue of the shape that a model has, None where it has none of them."""
    from hocket.catalogue import models, shapes
    from hocket.models import repo_id

    if model in shapes.shape_names():
        return model
    repo = None if os.path.exists(model) else repo_id.parse_repo(model)
    named = (name for name in shapes.shape_names() if repo and models.entry(name).hub_id == repo.id)
    name = next(named, None)
    if repo is None or name is None:
        return None
    config = _hub_config(model)
    same = all(config.get(key, value) == value for key, value in models.config(name).items())
    return name if same else None


def _hub_config(model: str) -> Mapping[str, Any]:
    """The configuration of a model of the Hub, as it is there; of any other nothing."""
    from hocket.models import fetched, repo_id
    from hocket.spec.files import parse_json

    repo = None if os.path.exists(model) else repo_id.parse_repo(model)
    if repo is None:
        return {}
    found: Mapping[str, Any] = parse_json(
        (fetched.fetched_directory(repo, weights=False) / "config.json").read_text()
    )
    return found


def _config(model: str) -> Mapping[str, Any]:
    """The configuration of a model. Raises ModelError."""
    from hocket.catalogue import models
    from hocket.models import source

    name = _shipped(model)
    if name is not None:
        return models.config(name)
    return source.resolve_model(model, weights=False).config


def model_type_of(model: str) -> str:
    return str(_config(model).get("model_type", ""))


def positions_of(model: str) -> int | None:
    """Positions that a model was made for, None where its configuration does not say."""
    from hocket.models.dimensions import stated_positions

    return stated_positions(_known_config(model))


def prediction_note(model: str) -> str:
    """That a plan is without the layers for multi-token prediction; empty where there are none."""
    if not prediction_layers(_known_config(model)):
        return ""
    return (
        "The plan is without the layer for multi-token prediction, which hocket does not train; "
        "with --stack megatron-core --mtp-layers 1 it is counted."
    )


def _known_config(model: str) -> Mapping[str, Any]:
    """A model's configuration; empty of a name of the service planner's own, or of bytes."""
    from hocket.models import repo_id

    if _shipped(model) is None and not os.path.exists(model) and repo_id.parse_repo(model) is None:
        return {}
    return _config(model)
