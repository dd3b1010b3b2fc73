"""Defaults: options of a training job that follow from its task, its model and its device.

                  learning rate          decay                weight decay
    pretraining   by the model's size    cosine, to a tenth   0.1
    fine-tuning   5e-5                   linear, to 0         0
    LoRA          2e-4                   linear, to 0         0

Fine-tuning takes what transformers' `TrainingArguments` takes, LoRA the rate of Dettmers et al.
2023 ("QLoRA", table 9, up to 13B), pretraining those of Brown et al. 2020 ("Language Models are
Few-Shot Learners", table 2.1).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from hocket.jobs.precision import on_cuda
from hocket.spec.global_batch import default_global_batch
from hocket.spec.layout import TERMS

if TYPE_CHECKING:
    from hocket.jobs.request import JobRequest
    from hocket.models.dimensions import Dimensions
    from hocket.models.source import ModelSource
    from hocket.spec.run import TrainOptions

PRETRAINING, FINE_TUNING, LORA = "pretraining from random weights", "fine-tuning", "LoRA"

RATES = (
    (125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4), (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 0.6e-4),
)  # fmt: skip
"""Parameters of a model, and its peak learning rate (Brown et al. 2020, table 2.1)."""

LONGEST = 4096
"""Tokens of a sequence on GPUs, where none are given."""

HIGHEST = 1e-3
"""Peak learning rate of smaller models than those of the table."""


def task(request: JobRequest, source: ModelSource) -> str:
    """What a job does with its weights."""
    if request.options.lora_rank is not None:
        return LORA
    return PRETRAINING if source.weights is None else FINE_TUNING


def with_dtype(request: JobRequest) -> JobRequest:
    """The request with the compute precision of its device: bf16 on GPUs that have it (compute
    capability 8.0 or newer), elsewhere fp32."""
    if "dtype" in request.given or not on_cuda(request.options):
        return request
    from hocket.probing import devices

    capability = devices.compute_capability()
    if capability is None or capability < (8, 0):
        return request
    workload = dataclasses.replace(request.workload, dtype="bf16")
    return dataclasses.replace(request, workload=workload)


def with_length(request: JobRequest, source: ModelSource) -> JobRequest:
    """The request with the sequence length of its device, where none is given: on GPUs the model's
    positions, at most `LONGEST`."""
    if "seq_len" in request.given or not on_cuda(request.options):
        return request
    longest = min(source.dimensions.max_positions or LONGEST, LONGEST)
    workload = dataclasses.replace(request.workload, seq_len=longest)
    return dataclasses.replace(request, workload=workload)


def with_batch(request: JobRequest, ranks: int | None = None) -> JobRequest:
    """The request with the global batch of its devices, where none is given, and with as many
    microbatches as the size that is given makes of it. `ranks`: of another launcher."""
    if "global_batch" in request.given:
        return request
    from hocket.probing import devices

    layout, size = request.layout, request.micro_batch_size or 1
    gpus = 0
    if on_cuda(request.options):
        gpus = ranks or (devices.visible_gpus() if request.auto else layout.world_size)
    unit = layout.dp * (layout.microbatches or 1) * size
    workload = request.workload
    batch = default_global_batch(gpus, workload.seq_len, unit)
    workload = dataclasses.replace(workload, global_batch=batch)
    request = dataclasses.replace(request, workload=workload)
    if request.auto or request.micro_batch_size is None or layout.microbatches is not None:
        return request
    return dataclasses.replace(
        request,
        layout=dataclasses.replace(layout, microbatches=batch // unit),
        given=request.given | {"microbatches"},
    )


def with_layout(request: JobRequest) -> JobRequest:
    """The request with a layout that hocket chooses, where none is given and this process may use
    several GPUs."""
    from hocket.probing import devices

    if request.auto or request.given & {"layout", "data_parallel", *TERMS}:
        return request
    if not on_cuda(request.options) or devices.visible_gpus() < 2:
        return request
    return dataclasses.replace(request, auto=True)


def with_rates(request: JobRequest, source: ModelSource) -> JobRequest:
    """The request with learning rate, its decay and weight decay of its task, where not given."""
    pretraining = task(request, source) == PRETRAINING
    options = request.options
    if "lr" not in request.given:
        rate = 2e-4 if task(request, source) == LORA else 5e-5
        if pretraining:
            rate = pretraining_rate(parameters(source.dimensions))
        options = dataclasses.replace(options, lr=rate)
    if "lr_schedule" not in request.given:
        options = dataclasses.replace(options, lr_schedule="cosine" if pretraining else "linear")
    if "min_lr" not in request.given:
        least = options.lr if options.lr_schedule == "constant" else 0.0
        if options.lr_schedule == "cosine":
            least = options.lr / 10
        options = dataclasses.replace(options, min_lr=least)
    if "weight_decay" not in request.given and not pretraining:
        options = dataclasses.replace(options, weight_decay=0.0)
    return dataclasses.replace(request, options=options)


def pretraining_rate(count: float) -> float:
    """Peak learning rate for a model of `count` parameters, interpolated over their logarithm and
    rounded to two digits."""
    if count <= RATES[0][0]:
        first, second = RATES[:2]
    elif count >= RATES[-1][0]:
        return RATES[-1][1]
    else:
        at = next(k for k, (size, _) in enumerate(RATES) if size >= count)
        first, second = RATES[at - 1 : at + 1]
    share = math.log(count / first[0]) / math.log(second[0] / first[0])
    rate = first[1] * (second[1] / first[1]) ** share
    return min(HIGHEST, float(f"{rate:.1e}"))


def parameters(sizes: Dimensions) -> float:
    """About the parameters of a decoder: attention, a gated feed-forward block of each expert, and
    the embedding."""
    width, attention = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    layer = 2 * width * (attention + sizes.num_key_value_heads * sizes.head_dim)
    expert = sizes.num_experts * (sizes.expert_size or sizes.intermediate_size)
    layer += 3 * width * (expert or sizes.intermediate_size)
    return sizes.num_layers * layer + sizes.vocab_size * width * (1 if sizes.tied else 2)


def defaults_note(request: JobRequest, source: ModelSource) -> str:
    """What a job does, and the options chosen for it, in a line."""
    from hocket.models import text_part
    from hocket.training.learning_rate import warmup_steps

    options = request.options
    rate = f"learning rate {options.lr:g}"
    if options.lr_schedule != "constant":
        rate += f", {options.lr_schedule} to {options.min_lr:g}"
    warmup = warmup_steps(options)
    text = (
        f"{task(request, source)} in {request.workload.dtype}: {rate}, {warmup} warm-up "
        f"step{'s' * (warmup != 1)}, weight decay {options.weight_decay:g}"
    )
    if "global_batch" not in request.given:
        text += f", global batch {request.workload.global_batch}"
    left_out = text_part.left_out(source.weights)
    return f"{text}; of the multimodal model not loaded: {left_out}" if left_out else text


def idle_cores(options: TrainOptions, ranks: int) -> str:
    """The cores of this machine that CPU ranks leave idle, where those are most of them, and the
    fix; empty otherwise."""
    from hocket.runtime.host_cores import usable_cores

    here, used = usable_cores(), ranks * options.threads
    if on_cuda(options) or here < 4 * used:
        return ""
    return f"{here - used} of {here} cores are idle: --threads {here // ranks}"
