"""vLLM and SGLang: the command that starts a server, read as a deployment's layout, and changed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from hocket.planning.reading import words
from hocket.planning.reading.configuration import (
    ToolConfiguration,
    degree,
    not_a_layout,
    unread,
    whole_number,
)
from hocket.spec.cluster import Gpu
from hocket.spec.errors import OptionError

SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
         "-dp": "--data-parallel-size", "-ep": "--enable-expert-parallel",
         "-pcp": "--prefill-context-parallel-size",
         "-dcp": "--decode-context-parallel-size"}  # fmt: skip
"""vLLM's."""

OTHER = {"--tensor-parallel-size": "--tp-size", "--tp": "--tp-size",
         "--pipeline-parallel-size": "--pp-size", "--data-parallel-size": "--dp-size",
         "--dp": "--dp-size", "--expert-parallel-size": "--ep-size", "--ep": "--ep-size",
         "--model": "--model-path"}  # fmt: skip
"""SGLang's other spellings."""

HALF = ("half", "float16")

METHODS = {
    "fp8": "fp8", "awq": "int4", "gptq": "int4", "bitsandbytes": "int4", "mxfp4": "mxfp4",
    "modelopt_fp4": "fp4", "nvfp4": "fp4", "w8a8_int8": "int8",
}  # fmt: skip
"""Beginnings of values of `--quantization`, and what the planner calls them."""

CACHES = {"fp8": "fp8", "int8": "int8", "nvfp4": "fp4", "fp4": "fp4"}
"""Beginnings of values of `--kv-cache-dtype`, and what the planner calls them."""

_NODES = {"--nnodes", "--node-rank", "--headless"}
_PLACED = {
    "vllm": {
        *_NODES, "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
        "--enable-expert-parallel", "--data-parallel-size-local", "--data-parallel-address",
        "--data-parallel-rpc-port", "--data-parallel-start-rank", "--master-addr",
    },
    "sglang": {
        *_NODES, "--tp-size", "--pp-size", "--dp-size", "--attn-dp-size", "--ep-size",
        "--dist-init-addr", "--enable-dp-attention",
    },
}  # fmt: skip
"""Flags that say where ranks are: none of an old command stays in a changed one."""

_PARTITION = re.compile(r"\b(VLLM|SGLANG)_PP_LAYER_PARTITION=([\d,]+)[ \t]*")


def _layers(text: str, pp: int) -> list[str]:
    """A note where layers are given to stages otherwise than deployments are estimated."""
    match = _PARTITION.search(text)
    if match is None:
        return []
    counts = sorted((int(n) for n in match[2].split(",") if n), reverse=True)
    each, rest = divmod(sum(counts), max(pp, 1))
    if counts == [each + (stage < rest) for stage in range(pp)]:
        return []
    return [f"{match[0].strip()} is estimated as stages of as many layers"]


def _number(found: dict[str, Any], name: str) -> int:
    return degree(found.get(name) or 1, name)


def _tokens(found: dict[str, Any], name: str, *, least: int = 1) -> int | None:
    value = found.get(name)
    return None if value is None else whole_number(value, name, least=least)


def _stored(found: dict[str, Any], notes: list[str]) -> tuple[str, str | None]:
    """Precision and quantization of the weights; None: as the checkpoint is stored."""
    asked = str(found.get("--quantization") or "")
    name = next((own for prefix, own in METHODS.items() if asked.startswith(prefix)), None)
    if asked and name is None:
        notes.append(f"--quantization {asked} is estimated as the checkpoint is stored")
    if name == "fp8":
        return name, None
    return "fp16" if found.get("--dtype") in HALF else "bf16", name


def _fraction(found: dict[str, Any], name: str) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise OptionError(
            f"{name} is {str(value)[:60]!r}; it must be a fraction, at most 1", hint=f"{name} 0.9"
        )
    return number


def _cache(found: Mapping[str, Any]) -> str:
    """Precision of keys and values."""
    kept = str(found.get("--kv-cache-dtype"))
    return next((own for prefix, own in CACHES.items() if kept.startswith(prefix)), "bf16")


def _options(
    found: dict[str, Any], notes: list[str], *, memory: str, sequences: str, ranks: int = 1
) -> dict[str, Any]:
    """What else a prediction takes from the command, as options of `serve_plan`.

    Args:
        memory, sequences: names of flags. ranks: data ranks that the latter counts together.
    """
    kept, cache = str(found.get("--kv-cache-dtype") or "auto"), _cache(found)
    if cache == "bf16" and kept not in ("auto", "bfloat16", "bf16", *HALF):
        notes.append(f"--kv-cache-dtype {kept} is estimated as bf16")
    most = _tokens(found, sequences)
    values = {
        "gpu_memory_utilization": _fraction(found, memory),
        "cache_precision": cache,
        "max_num_seqs": None if most is None else max(1, most // ranks),
    }
    return {name: value for name, value in values.items() if value is not None}


def vllm_defaults(read: ToolConfiguration, gpu: Gpu) -> ToolConfiguration:
    """A vLLM command with what vLLM takes on this kind of GPU where the command is silent: its
    `EngineArgs.get_batch_defaults`, release 0.33."""
    gib, large = gpu.usable / 2**30, 0
    if not gpu.name.startswith("A100"):
        large = int(gib >= 70) + int(gib >= 160)
    tokens = read.microbatch or (2048, 8192, 16384)[large]
    own = {
        "gpu_memory_utilization": 0.92,
        "max_num_seqs": min((256, 1024, 1024)[large], tokens),
    }
    absent = {name: value for name, value in own.items() if name not in read.server}
    if read.microbatch is None:
        absent["max_num_batched_tokens"] = tokens
    if not absent:
        return read
    said = ", ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in absent.items())
    return dataclasses.replace(
        read, microbatch=tokens, server={**own, **read.server},
        notes=(*read.notes, f"vLLM's own on {gpu.name}, where the command is silent: {said}"),
    )  # fmt: skip


def vllm(text: str) -> ToolConfiguration:
    """A `vllm serve` line."""
    others, given = words.words_and_flags(text)
    found: dict[str, Any] = {SHORT.get(name, name): value for name, value in given.items()}
    used = {
        *_PLACED["vllm"], "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
        "--enable-chunked-prefill", "--gpu-memory-utilization", "--quantization",
        "--kv-cache-dtype", "--dtype", "--model",
    }  # fmt: skip
    for axis in ("prefill", "decode"):
        if _number(found, name := f"--{axis}-context-parallel-size") > 1:
            raise not_a_layout(f"{name} {found[name]}")
        used.add(name)
    tp, pp, data = (
        _number(found, f"--{axis}-parallel-size") for axis in ("tensor", "pipeline", "data")
    )
    fields, notes = {"tp": tp, "pp": pp}, _layers(text, pp)
    if "--enable-expert-parallel" in found:
        if data > 1:
            fields["ep"] = data
        else:
            notes.append("--enable-expert-parallel without --data-parallel-size is estimated as "
                         "experts divided over tensor ranks")  # fmt: skip
    model = None
    if "serve" in others:
        after = others[others.index("serve") + 1 :]
        model = after[0] if after else None
    precision, quantization = _stored(found, notes)
    server = _options(found, notes, memory="--gpu-memory-utilization", sequences="--max-num-seqs")
    return ToolConfiguration(
        tool="vllm", fields=fields, data_ranks=data, world=tp * pp * data,
        microbatch=_tokens(found, "--max-num-batched-tokens"),
        seq_len=_tokens(found, "--max-model-len"), model=model or found.get("--model"),
        precision=precision, quantization=quantization, server=server, unread=unread(found, used),
        notes=tuple(notes),
    )  # fmt: skip


def sglang(text: str) -> ToolConfiguration:
    """A `python -m sglang.launch_server` line.

    Its tensor ranks are all ranks of a stage; with `--attn-dp-size` attention divides them into
    data ranks, and experts take all of them.
    """
    _, given = words.words_and_flags(text)
    found: dict[str, Any] = {OTHER.get(name, name): value for name, value in given.items()}
    found.pop("-m", None)
    used = {
        *_PLACED["sglang"], "--model-path", "--context-length", "--max-running-requests",
        "--chunked-prefill-size", "--mem-fraction-static", "--dtype", "--quantization",
        "--kv-cache-dtype",
    }  # fmt: skip
    for name in ("--attn-cp-size", "--dcp-size", "--moe-dp-size"):
        if _number(found, name) > 1:
            raise not_a_layout(f"{name} {found[name]}")
        used.add(name)
    ranks, pp, data, experts, attention = (
        _number(found, f"--{name}-size") for name in ("tp", "pp", "dp", "ep", "attn-dp")
    )
    if "--enable-dp-attention" in found:  # the deprecated spelling
        attention, data = max(attention, data), 1
    notes = _layers(text, pp)
    fields = {"tp": ranks, "pp": pp}
    if attention > 1:
        if ranks % attention:
            raise not_a_layout(f"--attn-dp-size {attention} of --tp-size {ranks}")
        if experts not in (1, ranks):
            raise not_a_layout(f"--ep-size {experts} of --tp-size {ranks}")
        if experts == 1:
            notes.append(f"experts divided over {ranks} tensor ranks are estimated as --ep-size")
        fields |= {"tp": ranks // attention, "ep": attention}
    elif experts > 1:
        notes.append(f"--ep-size {experts} without --attn-dp-size is estimated as experts divided "
                     "over tensor ranks")  # fmt: skip
    tokens = _tokens(found, "--chunked-prefill-size", least=-1)
    if tokens is not None and tokens < 1:
        notes.append("--chunked-prefill-size -1 (whole prompts) is estimated in chunks")
        tokens = None
    if tokens is not None:
        tokens = max(1, tokens // attention)
    precision, quantization = _stored(found, notes)
    server = _options(
        found, notes, memory="--mem-fraction-static", sequences="--max-running-requests",
        ranks=attention,
    )  # fmt: skip
    chosen = ("--mem-fraction-static", "--max-running-requests", "--chunked-prefill-size")
    if absent := [name for name in chosen if found.get(name) is None]:
        notes.append(f"estimated as hocket plan chooses them, not the server: {', '.join(absent)}")
    return ToolConfiguration(
        tool="sglang", fields=fields, data_ranks=data * attention, world=ranks * pp * data,
        microbatch=tokens, seq_len=_tokens(found, "--context-length"),
        model=found.get("--model-path"), precision=precision, quantization=quantization,
        server=server, unread=unread(found, used), notes=tuple(notes),
    )  # fmt: skip


def changed_command(text: str, tool: str, written: str) -> str:
    """A command for the deployment of another one; what it does not set stays as it is.

    Args:
        written: the other command, as `service.emit.command` prints it.
    """
    given = words.words_and_flags(written)[1]
    spelled = {long: short for short, long in (SHORT if tool == "vllm" else OTHER).items()
               if re.search(rf"(^|\s){re.escape(short)}(?![\w-])", text)}  # fmt: skip
    changes: dict[str, Any] = {
        name: True if value is None else value for name, value in given.items() if name != "-m"
    }
    changes.pop("--model-path", None)
    old = words.words_and_flags(text)[1]
    for name in ("--max-model-len", "--context-length"):  # requests that were taken still are
        if old.get(name) is not None and name in changes:
            changes[name] = max(whole_number(old[name], name), int(changes[name]))
    gone = {*_PLACED[tool]}  # and a precision of weights that the other command does without
    gone |= {"--quantization"} if str(old.get("--quantization")).startswith("fp8") else set()
    gone |= {"--dtype"} if old.get("--dtype") in HALF else set()
    if _cache(old) == _cache(given):
        changes.pop("--kv-cache-dtype", None)
    else:
        gone.add("--kv-cache-dtype")
    changes |= {name: None for name in sorted(gone) if name not in changes}
    text = words.edit_flags(
        text, {spelled.get(name, name): value for name, value in changes.items()}
    )
    text = _PARTITION.sub("", text)
    if (match := _PARTITION.search(written)) is not None:
        text = re.sub(r"(?m)^(?=(vllm serve|python\S* -m sglang))", match[0], text, count=1)
    return text
