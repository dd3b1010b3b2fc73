"""Synonyms: flags of transformers, accelerate, Megatron-LM and vLLM, by the names that hocket has.

A synonym is accepted wherever its target, or the target's own, is known and the name itself is not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from hocket.spec.errors import CUTOFF, OptionError, nearest

SYNONYMS = {
    "kv_cache_dtype": "cache_precision",
    # transformers, accelerate, TRL
    "model_name_or_path": "model",
    "dataset": "data",
    "dataset_name": "data",
    "train_file": "data",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "lr_scheduler": "lr_schedule",
    "scheduler": "lr_schedule",
    "warmup_steps": "warmup",
    "lr_warmup_steps": "warmup",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "eval_file": "eval_data",
    "validation_file": "eval_data",
    "eval_dataset": "eval_data",
    "train_iters": "steps",
    "max_seq_length": "seq_len",
    "max_seq_len": "seq_len",
    "seq_length": "seq_len",
    "sequence_length": "seq_len",
    "max_length": "seq_len",
    "global_batch_size": "global_batch",
    "train_batch_size": "global_batch",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_batch_size": "micro_batch_size",
    "micro_batch": "micro_batch_size",
    "per_device_batch": "micro_batch_size",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "adam_eps": "eps",
    "clip_grad": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "logging_steps": "log_interval",
    "log_every": "log_interval",
    "save_steps": "save_every",
    "save_interval": "save_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "eval_interval": "eval_every",
    "report_to": "tracker",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "mixed_precision": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attention",
    "torch_compile": "compile",
    # Megatron-LM, vLLM
    "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "zero_stage": "zero",
    "kv_cache_memory_bytes": "cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "output_len",
    "output_tokens": "output_len",
    "osl": "output_len",
    "input_len": "prompt_len",
    "input_tokens": "prompt_len",
    "isl": "prompt_len",
    "request_rate": "requests_per_second",
    "tokenizer_name_or_path": "tokenizer",
    "optim": "optimizer",
    "chat_template": "chat_template_file",
}
"""Name in another tool to the name here, of options whose values mean the same."""

VALUES = {
    "bf16": ("dtype", "bf16"),
    "fp8": ("dtype", "fp8"),
    "wandb": ("tracker", "wandb"),
    "load_in_4bit": ("quantize_base", "nf4"),
    "async_save": ("save_mode", "background"),
    "gradient_checkpointing": ("recompute", "full"),
    "recompute_activations": ("recompute", "selective"),
}
"""Switches of other tools, and the option and value that they set here."""

ALIAS = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float16": "fp16",
    "half": "fp16",
    "gpu": "cuda",
}
"""Other names of number formats and devices, by the names here."""

EXPLAINED = {
    "batch_size": "use --global-batch (sequences per step over all ranks) or --micro-batch-size "
    "(sequences per microbatch and rank)",
    "fp16": "use --dtype bf16: there is no loss scaling for fp16",
    "deepspeed": "use --zero 1, 2 or 3; `hocket plan --from FILE` reads a DeepSpeed JSON",
    "fsdp": "use --zero 3",
    "print_config": "use hocket config show",
    "nproc_per_node": "leave it out: --layout determines the number of ranks",
    "num_processes": "leave it out: --layout determines the number of ranks",
    "num_gpus": "leave it out: --layout determines the number of ranks",
    "gpus": "use --layout, as in dp8 or tp8; CUDA_VISIBLE_DEVICES selects GPUs",
    "enable_lora": "name the adapter as MODEL: it is merged into its base",
    "enforce_eager": "leave it out: a step that cannot be captured in a CUDA graph runs eagerly",
    "tool_call_parser": "leave it out: the model's template determines the format of tool calls",
    "enable_auto_tool_choice": "leave it out: requests with tools are answered",
    "speculative_config": "leave it out: speculative decoding is not supported",
    "resume_from_checkpoint": "use --run DIR --resume",
    "no_enable_prefix_caching": "use --no-prefix-cache",
    "enable_prefix_caching": "leave it out: the prefix cache is on; --no-prefix-cache disables it",
    "quantization": "leave it out: a quantized checkpoint is read by the method that its "
    "configuration names, into --dtype",
    "swap_space": "leave it out: preempted requests are prefilled again, and nothing is swapped",
    "warmup_ratio": "use --warmup: steps, not a fraction",
    "api_key": "use --api-key-file FILE: other users of the machine see its command lines",
    "prompt_file": "use the file as standard input: hocket generate MODEL < FILE",
    "interactive": "use --chat",
    "flash_attn": "leave it out: flash kernels are taken where the device has them",
    "use_flash_attention_2": "leave it out: flash kernels are taken where the device has them",
    "hidden_size": "change config.json of a model directory: sizes belong to the model",
    "num_layers": "change config.json of a model directory: sizes belong to the model",
}
"""Options of other tools without a counterpart of the same meaning, and what to use."""


def implied(name: str) -> Iterator[str]:
    """The name, what it is a synonym of, what that is one of, and so on."""
    target: str | None = name
    while target is not None:
        yield target
        target = SYNONYMS.get(target)


def meant(name: str, known: Collection[str]) -> str:
    """The option that `name` stands for where `known` are accepted; `name` where it is none."""
    return next((target for target in implied(name) if target in known), name)


def nearest_option(name: str, known: Collection[str]) -> str | None:
    """The option that a misspelled name is nearest to, by its own name or by a synonym's; None
    where nothing is near."""
    names = {option: option for option in known}
    names.update({other: option for other, option in SYNONYMS.items() if option in known})
    near = nearest(name, names, cutoff=CUTOFF)
    return None if near is None else names[near]


def unknown_option(name: str, known: Collection[str], verb: str = "train") -> OptionError:
    """The error for a name that is not an option of a verb, with the nearest ones."""
    near = nearest_option(name, known)
    if near is not None:
        return OptionError(f"unknown option {name!r}", hint=f"did you mean {near!r}?")
    few = difflib.get_close_matches(name, sorted(known), cutoff=0.4)
    nearest_few = f"; the nearest are {', '.join(few)}" if few else ""
    return OptionError(
        f"unknown option {name!r}{nearest_few}", hint=f"hocket {verb} --help all lists every option"
    )
