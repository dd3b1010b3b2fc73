"""The public surface: names, verbs and flags, pinned. Change these tables on purpose only."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

import hocket
from hocket.cli.main import VERBS

PUBLIC = [
    "HocketError", "LLM", "Layout", "ParallelPlan", "SamplingParams", "Schedule", "Timeline",
    "check",
    "export", "generate", "parallelize", "plan", "serve", "train",
]  # fmt: skip

LAYOUT = {
    "layout", "dp", "pp", "cp", "tp", "ep", "etp", "zero", "recompute", "sequence_parallel",
    "schedule", "microbatches", "pipeline_split", "virtual_stages", "data_parallel", "offload",
    "order",
}  # fmt: skip
WORKLOAD = {"seq_len", "global_batch", "dtype"}
TRAINING = {
    "epochs", "steps", "seed", "optimizer", "lr", "min_lr", "warmup", "lr_schedule", "weight_decay",
    "beta1", "beta2", "eps", "max_grad_norm", "dropout", "tokenizer", "vocab_size", "text_field", 
    "eval_fraction",
    "eval_every",
    "eval_batches", "save_every", "save_mode", "replicate_state", "upload", "elastic",
    "keep_checkpoints",
    "keep_every", "log_interval", "resume", "timeline_step",
    "timeline_steps", "device", "backend", "threads", "bucket_mb", "compile", "attention",
    "context_parallel", "expert_dispatch", "tracker",
    "trust_remote_code", "timeout", "max_restarts",
    "grace_seconds", "replica_check_every", "on_divergence", "max_skipped_steps",
    "emulate_links", "memory_per_rank", "grad_dtype", "data_format", "chat_template_file",
    "packing", "streaming", "token_window", "max_corrupt_records", "verify_every",
    "slow_rank_factor",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantize_base",
}  # fmt: skip

SERVICE = {
    "serve", "prompt_len", "output_len", "requests_per_second", "ttft_ms", "tpot_ms", "percentile",
    "prefix_cache_hit_rate", "trace", "weights", "quantization", "cache_precision", "engine",
    "gpu_memory_utilization",
}  # fmt: skip

FLAGS = {
    "train": {
        "model", "data", "run", "config", "cluster", "json", "dry_run", "micro_batch_size",
        "push_to_hub", "eval_data",
        "gradient_accumulation_steps", *LAYOUT, *WORKLOAD, *TRAINING,
    },
    "rehearse": {
        "model", "rank", "serve", "gpu", "layers", "rows", "seq_len", "global_batch", "dtype",
        "grad_dtype", "dropout", "attention", "compile", "context_parallel", "expert_dispatch",
        "bucket_mb", "lora_rank",
        "lora_targets", "quantize_base", "optimizer", "kv_cache_dtype", "redundant_experts",
        "quantization",
        "trust_remote_code", "json", "matrix", "models", "schedules", "options", *LAYOUT,
    },
    "doctor": {"gpu", "only", "group", "out", "minutes", "list", "json"},
    "demo": {
        "full", "steps", "seq_len", "global_batch", "vocab_size", "run", "seed", "device",
        "backend", "threads", *LAYOUT,
    },
    "check": {
        "model", "steps", "seq_len", "global_batch", "dtype", "seed", "lr", "packing", "lora_rank",
        "lora_alpha", "lora_targets", "quantize_base", "optimizer", "attention", "context_parallel",
        "expert_dispatch",
        "device", "backend",
        "threads", "trust_remote_code", "json", "serve", "quantization", "kv_cache_dtype",
        "redundant_experts", "matrix",
        "quick",
        "types", "layouts",
        *LAYOUT,
    },
    "chaos": {"model", "layout", "seed", "faults", "kinds", "json"},
    "compare": {
        "model", "devices", "strategies", "microbatches", "sweep", "input_work", "cluster",
        "emulate_links",
        "memory_per_rank", "steps", "seq_len",
        "global_batch", "seed", "attention", "device", "backend", "threads", "trust_remote_code",
        "json",
    },
    "tour": {"lang", "stops", "out", "backend", "json"},
    "generate": {
        "model", "prompt", "chat", "chat_template_file", "layout", "pipeline_split",
        "max_new_tokens", "temperature", "top_k",
        "top_p", "seed", "dtype",
        "tokenizer", "attention", "device", "backend", "threads", "trust_remote_code", "json",
    },
    "serve": {
        "model", "layout", "pipeline_split", "run", "cluster", "dtype", "tokenizer", "attention",
        "device",
        "backend", "threads", "emulate_links", "timeout", "trust_remote_code", "json",
        "host", "port", "metrics_port", "api_key_file", "insecure", "served_model_name",
        "kv_cache_dtype", "redundant_experts", "rebalance_steps",
        "quantization", "max_num_batched_tokens", "max_model_len", "max_num_seqs", "block_size",
        "cache_memory", "gpu_memory_utilization",
        "num_blocks", "max_queue", "no_prefix_cache", "deadline", "drain_seconds",
        "chat_template_file", "generation_config", "max_restarts", "reload_dir", "dry_run",
    },
    "export": {
        "run", "to", "merge", "overwrite", "push_to_hub", "private", "trust_remote_code",
    },
    "plan": {
        "model", "cluster", "seq_len", "global_batch", "objective", "top", "layout", "pin", "all",
        "explain", "links", "emit", "source", "price_list", "dtype", "grad_dtype", "stack",
        "lora_rank", "lora_targets", "quantize_base", "optimizer", "save_seconds",
        "restart_seconds", "failures",
        "repair_hours", "expert_imbalance", "mtp_layers", "html",
        "json", *SERVICE,
    },
    "validate": {"table", "infer", "rows", "json"},
    "probe": {"quick", "out", "device", "svg", "json"},
    "report": {"runs", "format", "out", "history", "by", "last", "json"},
    "schedule": {"layout", "schedule", "microbatches", "virtual_stages", "format", "json"},
    "template": {
        "kind", "model", "layout", "data", "serve", "name", "run", "gpus_per_node",
        "ranks_per_node", "gpu", "time", "image", "storage", "interface", "port", "launch",
    },
    "models": {"words", "gpus", "json"},
    "config": {"words"},
    "completion": {"shell"},
}  # fmt: skip


def flags_of(verb: str) -> set[str]:
    """The names of a verb's flags, those of its groups included."""
    module = importlib.import_module(f"hocket.cli.{verb}")
    kinds = [
        kind
        for _, kind in inspect.getmembers(module, dataclasses.is_dataclass)
        if kind.__module__ == module.__name__
    ]
    assert len(kinds) == 1, kinds
    return set(names(kinds[0]()))


def names(group: Any) -> list[str]:
    found = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        found += names(value) if dataclasses.is_dataclass(value) else [field.name]
    return found


def test_public_names() -> None:
    assert sorted(hocket.__all__) == PUBLIC
    assert all(getattr(hocket, name) is not None for name in PUBLIC if name != "parallelize")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="dance"):
        _ = hocket.dance


def test_every_verb_is_pinned() -> None:
    assert set(VERBS) == set(FLAGS)


@pytest.mark.parametrize("verb", sorted(FLAGS))
def test_flags(verb: str) -> None:
    assert flags_of(verb) == FLAGS[verb]


def test_flags_bear_the_names_of_the_words() -> None:
    from hocket.jobs.request import LAYOUT_FIELDS, OPTION_FIELDS, WORKLOAD_FIELDS

    assert set(OPTION_FIELDS) == TRAINING
    assert set(WORKLOAD_FIELDS) == WORKLOAD
    assert set(LAYOUT_FIELDS) >= LAYOUT - {"layout"}
