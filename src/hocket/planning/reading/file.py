"""File: a configuration of another tool, from a file of limited size, and the same file changed."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hocket.planning.reading import python, sections, words
from hocket.planning.reading.configuration import LARGEST_FILE, ToolConfiguration
from hocket.planning.reading.megatron import BRIDGE, OTHERS, changed_environment
from hocket.planning.reading.tools import READERS
from hocket.planning.tools import megatron, torchtitan
from hocket.planning.tools.emit import TOOLS
from hocket.planning.tools.job import ToolJob
from hocket.spec.errors import OptionError

_ENDINGS = {
    ".toml": "torchtitan-0.2.2", ".json": "deepspeed", ".yaml": "accelerate", ".yml": "accelerate",
    ".py": "torchtitan-python",
}  # fmt: skip
_WITHIN = (
    (".py", r"\b(tensor|pipeline)_model_parallel_size\b", "megatron-bridge"),
    (".yaml", r"(?m)^(distributed|step_scheduler)\s*:", "automodel"),
    (".yml", r"(?m)^(distributed|step_scheduler)\s*:", "automodel"),
)
"""Of endings that several tools have: what the text of the rarer one has."""

_SIGNS = (
    (r"\bvllm\s+serve\b", "vllm"),
    (r"\bsglang\.launch_server\b", "sglang"),
    (r"--parallelism\.", "torchtitan"),
    (r"--(tensor-model-parallel-size|micro-batch-size|use-distributed-optimizer)\b", "megatron"),
)


def read_tool_file(file: str) -> tuple[str, ToolConfiguration]:
    """The text of a file and what it says. Nothing of it is executed.

    Raises:
        OptionError: no such file, more than `LARGEST_FILE` bytes, a kind that is not known, or a
            value that no layout has.
    """
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"--from {file}: there is no such file", hint=f"ls {Path(file).parent}")
    with open(path, "rb") as stream:
        data = stream.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise OptionError(
            f"--from {file}: it has more than {LARGEST_FILE:,} bytes, which no configuration has"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise OptionError(f"--from {file}: it is not UTF-8 text") from None
    return text, READERS[file_kind(file, text)](text)


def file_kind(file: str, text: str) -> str:
    """The reader for a file, by its ending, else by its flags. Raises OptionError: none."""
    ending = os.path.splitext(file)[1]
    for end, pattern, name in _WITHIN:
        if ending == end and re.search(pattern, text):
            return name
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    for pattern, name in _SIGNS:
        if re.search(pattern, text):
            return name
    raise OptionError(
        f"--from {file}: it is not a configuration of a known tool",
        hint="torchtitan TOML or .py, Megatron-Bridge .py, DeepSpeed .json, accelerate or "
        "Automodel .yaml, a script with Megatron's flags, a `vllm serve` or an SGLang line",
    )


def target(configuration: ToolConfiguration) -> str:
    """The name of the tool, as `--emit` takes it, that runs a configuration."""
    return "torchtitan" if configuration.tool == "torchtitan-python" else configuration.tool


def changed(text: str, configuration: ToolConfiguration, job: ToolJob) -> str:
    """The text of the file for another layout of the same tool."""
    tool = configuration.tool
    if tool == "megatron":
        flags = {**_without_defaults(text, megatron._megatron_flags(job)), **dict.fromkeys(OTHERS)}
        if re.search(r"--fp8-recipe[ =]+(?!delayed)", text):  # any other one will do
            flags.pop("--fp8-recipe", None)
        environment = megatron._megatron_environment(job)
        return changed_environment(words.edit_flags(text, flags), environment)
    if tool == "torchtitan":
        text = re.sub(
            r"--parallelism\.module[_-]fqns[_-]per[_-]model[_-]part(\s+[a-z][\w.,]*(?=\s))*\s*(\\\n\s*)?",
            "",
            text,
        )
        word = torchtitan.recompute_word(job)
        text, count = re.subn(r"activation-checkpoint:[\w-]+", word, text)
        if not count:
            text = f"{text.rstrip()} {word}\n"
        flags = _without_defaults(text, torchtitan._torchtitan_flags(job))
        flags |= {f"--parallelism.{name}": None for name in _TITAN_STAGES}
        return words.edit_flags(text, flags)
    if tool == "megatron-bridge":
        others = [name for name, flag in BRIDGE.items() if flag in OTHERS and name in text]
        off = {name: False if "account" in name else None for name in others}
        values = {**megatron.bridge_values(job), **off}
        return python.edit_python(text, values, defaults=megatron.BRIDGE_DEFAULTS)
    if tool == "torchtitan-python":
        return python.edit_python(text, _titan(job, tokens="num_tokens_per_train_step" in text))
    written = TOOLS[tool].write(job)
    if tool == "torchtitan-0.2.2":
        new = tomllib.loads(written)
        new.pop("model")
        flat = {f"{s}.{k}": v for s, values in new.items() for k, v in values.items()}
        owned = [f"parallelism.{key}" for key in (*torchtitan.parallelism(job),
                 "module_fqns_per_model_part", "expert_tensor_parallel_degree")]  # fmt: skip
        owned += [f"parallelism.{key}" for key in _TITAN_STAGES]
        owned += ["training.enable_cpu_offload", "training.mixed_precision_param"]
        return sections.edit_sections(text, "toml", {**dict.fromkeys(owned), **flat})
    form = "json" if tool == "deepspeed" else "yaml"
    flat = sections.load_sections(written, form)
    owned = [*_OWNED.get(tool, ())]
    if tool == "accelerate":  # sections of another kind of job
        owned += [key for key in sections.load_sections(text, form) if key.startswith(_KINDS)]
    return sections.edit_sections(text, form, {**dict.fromkeys(owned), **flat})


def text_diff(file: str, old: str, new: str) -> str:
    """As `diff -u` prints it; empty where nothing changes."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), file, file
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


_TITAN_STAGES = (
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
"""What says with numbers which layers a stage has; a changed file names them."""

_KINDS = ("deepspeed_config.", "megatron_lm_config.")

_OWNED = {
    "accelerate": (
        *(f"fsdp_config.fsdp_{name}" for name in (
            "version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy",
            "activation_checkpointing", "offload_params", "state_dict_type",
        )),
        *(f"parallelism_config.parallelism_config_{name}_size"
          for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    ),
    "automodel": (
        "distributed.pipeline.pp_schedule", "distributed.pipeline.pp_microbatch_size",
        "distributed.pipeline.layers_per_stage",
    ),
    "deepspeed": (
        "comment", "pipeline", "tensor_parallel", "sequence_parallel_size", "data_parallel_size",
        "expert_parallel", "train_batch_size", "zero_optimization.mics_shard_size", "bf16", "fp16",
        "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
    ),
}  # fmt: skip


_DEFAULT_ONE = re.compile(
    r"((model|context)-parallel-size|(tensor|pipeline|context|expert|replicate)(_parallel)?_degree)$"
)


def _without_defaults(text: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Without degrees of 1 that the text leaves out as well."""
    return {
        name: value
        for name, value in flags.items()
        if name in text or not (value in (1, "1") and _DEFAULT_ONE.search(name))
    }


def _titan(job: ToolJob, *, tokens: bool) -> dict[str, Any]:
    """Values of torchtitan's configuration objects; `tokens`: batches in tokens."""
    found = {f"parallelism.{k}": v for k, v in torchtitan.parallelism(job).items()}
    if job.layout.pp > 1:
        found["parallelism.module_fqns_per_model_part"] = torchtitan._stage_modules(job, "lm_head")
    if tokens:
        seq = job.facts.seq_len
        found.pop("parallelism.pipeline_parallel_microbatch_size")
        found["parallelism.num_pp_microbatches"] = job.microbatches if job.layout.pp > 1 else None
        found["training.num_tokens_per_microbatch_per_dp_rank"] = job.microbatch * seq
        found["training.num_tokens_per_train_step"] = job.facts.global_batch * seq
        return found
    return found | {f"training.{k}": v for k, v in torchtitan.training(job).items()}
