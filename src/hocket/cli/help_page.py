"""`hocket VERB --help`: the most used flags and the topics of the others; all, one topic, one flag.

Plain text: it pipes into grep, and is the same on every terminal.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence

from hocket.cli import examples
from hocket.cli.spelling import Flag, flags_class, flags_of, spelled
from hocket.spec.errors import CUTOFF, OptionError, nearest

WIDTH = 100
"""Columns at most."""

COLUMN = 26
"""Where the texts of flags begin."""

MOST_USED = {
    "train": (
        "data", "run", "layout", "steps", "epochs", "seq_len", "global_batch", "micro_batch_size",
        "lr", "dtype", "lora_rank", "save_every", "resume", "dry_run",
    ),
    "serve": (
        "layout", "host", "port", "api_key_file", "served_model_name", "max_model_len",
        "max_num_seqs", "cache_memory", "run", "dry_run",
    ),
    "generate": ("prompt", "chat", "max_new_tokens", "temperature", "layout"),
    "plan": (
        "cluster", "seq_len", "global_batch", "layout", "top", "explain", "links", "lora_rank",
        "emit", "from", "html", "serve", "requests_per_second", "ttft_ms", "tpot_ms",
    ),
    "rehearse": (
        "layout", "microbatches", "seq_len", "gpu", "layers", "dtype", "serve", "matrix",
    ),
    "check": ("layout", "serve", "steps", "seq_len", "global_batch", "dtype", "matrix"),
    "compare": ("strategies", "devices", "sweep", "microbatches", "seq_len", "global_batch"),
    "demo": ("full", "steps", "layout", "run"),
}  # fmt: skip
"""The flags that short help shows, of verbs that have more."""

_LAYOUT = (
    "layout", "dp", "pp", "cp", "tp", "ep", "etp", "zero", "recompute", "sequence_parallel",
    "schedule", "microbatches", "pipeline_split", "virtual_stages", "data_parallel", "offload",
    "order", "context_parallel", "expert_dispatch", "pin", "devices", "strategies", "sweep",
    "layouts",
)  # fmt: skip

TOPICS = {
    "data": ("files, formats, tokenizer, packing", (
        "data", "eval_data", "prompt", "chat", "data_format", "text_field", "chat_template_file",
        "tokenizer", "vocab_size", "packing", "streaming", "token_window", "max_corrupt_records",
        "input_work",
    )),
    "layout": ("degrees of parallelism, ZeRO, pipeline schedule, offload", _LAYOUT),
    "batch": ("size, number and precision of steps", (
        "steps", "epochs", "seq_len", "global_batch", "micro_batch_size", "rows",
        "gradient_accumulation_steps", "dtype", "grad_dtype", "layers",
    )),
    "optimizer": ("learning rate, decay, clipping, dropout", (
        "optimizer", "lr", "lr_schedule", "min_lr", "warmup", "weight_decay", "beta1", "beta2",
        "eps", "max_grad_norm", "dropout",
    )),
    "lora": ("adapters, 4-bit base", (
        "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantize_base",
    )),
    "evaluation": ("held-out data, perplexity", ("eval_fraction", "eval_every", "eval_batches")),
    "checkpoints": ("when, how many, where; resuming", (
        "save_every", "save_mode", "keep_checkpoints", "keep_every", "upload", "replicate_state",
        "resume", "push_to_hub",
    )),
    "faults": ("restarts, time limits, checks of replicas and devices", (
        "max_restarts", "elastic", "timeout", "grace_seconds", "replica_check_every",
        "on_divergence", "max_skipped_steps", "verify_every", "slow_rank_factor",
    )),
    "access": ("address, keys, limits of requests, shutdown", (
        "host", "port", "metrics_port", "api_key_file", "insecure", "served_model_name",
        "max_queue", "deadline", "drain_seconds", "reload_dir",
    )),
    "engine": ("batch, key/value cache, sampling", (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "quantization",
        "redundant_experts", "rebalance_steps", "kv_cache_dtype", "cache_memory",
        "gpu_memory_utilization", "num_blocks", "no_prefix_cache", "generation_config",
        "max_new_tokens", "temperature", "top_k", "top_p",
    )),
    "forecast": ("machine to predict for; what is ranked, and why; files of other tools", (
        "cluster", "objective", "top", "all", "explain", "links", "emit", "from", "stack", "html",
    )),
    "service": ("load and latency goals of a service", (
        "serve", "prompt_len", "output_len", "requests_per_second", "ttft_ms", "tpot_ms",
        "percentile", "prefix_cache_hit_rate", "trace", "weights", "quantization",
        "cache_precision", "engine",
    )),
    "cost": ("prices, failures, imbalance of experts", (
        "price_list", "save_seconds", "restart_seconds", "failures", "repair_hours",
        "expert_imbalance", "mtp_layers",
    )),
    "matrix": ("many jobs at once", (
        "matrix", "quick", "models", "types", "schedules", "options",
    )),
    "runtime": ("device, backend, threads, seed, compilation, memory", (
        "device", "backend", "threads", "seed", "bucket_mb", "compile", "attention",
        "trust_remote_code", "memory_per_rank", "emulate_links", "gpu", "rank",
    )),
    "output": ("run folder, forecasts, JSON, timeline, trackers", (
        "run", "out", "full", "config", "json", "dry_run", "log_interval", "timeline_step",
        "timeline_steps", "tracker",
    )),
}  # fmt: skip
"""Topics of flags: what each is about, and its flags, in the order in which help prints them."""


def help_text(verb: str, module: types.ModuleType, topic: str = "") -> str:
    """The help of a verb: short, all of it, one topic's, or one flag's.

    Raises:
        OptionError: no such topic or flag.
    """
    known = flags_of(module)
    flags = list(dict.fromkeys(known.values()))
    topics = by_topic(flag for flag in flags if not flag.positional)
    name = topic.lstrip("-").replace("-", "_")
    if topic != "all" and topic in topics:
        return _section(topic, topics[topic])
    if topic != "all" and name in known:
        return _lines(known[name])
    if topic not in ("", "all"):
        near = nearest(topic, ("all", *topics, *map(spelled, known)), cutoff=CUTOFF)
        raise OptionError(
            f"hocket {verb} has no flag and no help topic {topic!r}; "
            f"topics: {', '.join(('all', *topics))}",
            hint=f"hocket {verb} --help{'' if near is None else f' {near}'}",
        )
    places = [flag for flag in flags if flag.positional]
    used = " ".join(flag.metavar or flag.name.upper() for flag in places)
    kind = flags_class(module)
    about = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:")[0].strip()
    parts = [
        f"usage: hocket {verb} {used} [OPTIONS]\n".replace("  ", " "),
        "\n\n".join(textwrap.fill(text, _width()) for text in about.split("\n\n")) + "\n",
    ]
    if places:
        parts.append("".join(_lines(flag) for flag in places))
    short = MOST_USED.get(verb, ()) if topic == "" else ()
    if short:
        parts.append(_section("most used", [known[name] for name in short], brief=True))
        rows = [(title, _about(title, topics[title])) for title in topics]
        rows.append(("all", "every flag"))
        listed = "".join(f"  {title:<{COLUMN - 2}}{text}\n" for title, text in rows)
        parts.append(f"{_bold(f'more, by hocket {verb} --help TOPIC (or a flag):')}\n{listed}")
    elif len(flags) > len(places):
        titles = list(topics) if verb in MOST_USED else []
        parts += [_section(title, topics[title]) for title in titles]
        if not titles:
            parts.append(_section("options", [one for one in flags if not one.positional]))
    parts.append(examples.lines(verb))
    return "\n".join(parts)


def by_topic(flags: Iterable[Flag]) -> dict[str, list[Flag]]:
    """Flags by topic, in the order of the tables."""
    left = {flag.name: flag for flag in flags}
    found = {}
    for title, (_, names) in TOPICS.items():
        found[title] = [left.pop(name) for name in names if name in left]
    return {title: flags for title, flags in {**found, "other": [*left.values()]}.items() if flags}


def _section(title: str, flags: Sequence[Flag], brief: bool = False) -> str:
    return f"{_bold(f'{title}:')}\n" + "".join(_lines(flag, brief) for flag in flags)


def _about(title: str, flags: Sequence[Flag]) -> str:
    """What a topic is about: its flags, where they are few."""
    few = ", ".join(spelled(flag.name) for flag in flags)
    return few if len(few) <= 48 else TOPICS.get(title, (few, ()))[0]


def _lines(flag: Flag, brief: bool = False) -> str:
    """One flag: its spellings and its value, then its text, indented; briefly: one sentence."""
    value = "" if flag.switch else flag.metavar
    if flag.positional:
        head = f"  {flag.metavar or flag.name.upper()}"
    else:
        head = "  " + ", ".join((*flag.aliases, spelled(flag.name))) + f" {value}".rstrip()
    room = _width() - COLUMN
    said = flag.full
    if brief and ". " in flag.text:
        said = f"{flag.text.partition('. ')[0]} ...{said.removeprefix(flag.text)}"
    text = textwrap.wrap(said, room, break_long_words=False, break_on_hyphens=False)
    indented = [" " * COLUMN + line for line in text]
    if len(head) + 2 <= COLUMN and text:
        indented[0] = f"{head:<{COLUMN}}{text[0]}"
        return "\n".join(indented) + "\n"
    return "\n".join([head, *indented]) + "\n"


def _width() -> int:
    return max(60, min(WIDTH, shutil.get_terminal_size((80, 24)).columns))


def _bold(text: str) -> str:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain or not sys.stdout.isatty() else f"\033[1m{text}\033[0m"
