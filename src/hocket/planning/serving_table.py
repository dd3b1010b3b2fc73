"""Rows of a table of published serving runs, as what can be estimated: model, replica, GPUs, load.

The columns are those of a table that lists, for each measured run, the model, the GPUs and the
degrees of its layout, the engine, and the load. What a row lacks and cannot be assumed is the
reason for which it is left out. Assumed, with the reason next to the rule:

    precision absent       the checkpoint's own: 16 bits
    attention_dp absent    what the experts' ranks leave: moe_tp x ep / tp
    cache precision        8 bits with fp8 and fp4 weights under TensorRT-LLM, whose quantised
                           checkpoints say so; 16 bits elsewhere
    prompt length absent   the mean of the data set that the source names (`catalogue.prompts`)
    tp absent              fewest GPUs whose memory the weights fill to `WEIGHTS_SHARE` at most
    tp x ep > GPUs         tables of InferenceX name the same GPUs as tp and as ep; where tp is the
                           product of both, it is taken as moe_tp; tp = attn_dp with ep their
                           product (GPUs "derived") as tp alone: such runs are also listed so
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hocket.catalogue import hardware, shapes
from hocket.catalogue.curves import curves_of
from hocket.catalogue.models import model_names
from hocket.catalogue.prompts import prompt_length
from hocket.cost.machine import MeasuredCurve
from hocket.cost.serving import ServingPrices, serving_prices
from hocket.planning import csv_rows
from hocket.planning.csv_rows import LeftOut, number
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError
from hocket.spec.model_shape import ModelShape

REQUIRED = ("id", "source", "model", "gpu", "engine", "mode", "isl")
OPTIONAL = (
    "n_gpus", "precision", "tp", "pp", "ep", "moe_tp", "attn_dp", "concurrency_or_batch", "osl",
    "ttft_ms", "tpot_ms", "e2e_latency_ms", "out_tok_s_total", "prefill_bs", "prefill_workers",
    "prefill_tp",
    "prefill_dp", "prefill_moe_tp", "prefill_moe_ep", "decode_bs", "decode_workers", "decode_tp",
    "decode_dp", "decode_moe_tp", "decode_moe_ep", "engine_version", "notes",
)  # fmt: skip

MEASURED = ("ttft_ms", "tpot_ms", "out_tok_s_total")
NOT_COMPARED = (
    "id", "source", *MEASURED, "e2e_latency_ms", "out_tok_s_per_gpu", "hbm_gbps_achieved", "mfu",
    "verified", "notes",
)  # fmt: skip
"""Columns that do not make two rows different runs."""

MODELS = (
    (r"llama.?2.?70b|^llama 70b", "llama-2-70b"),
    (r"llama.?2.?7b|^llama 7b", "llama-2-7b"),
    (r"llama.*3.*405b", "llama-3.1-405b"),
    (r"llama.*3.*70b", "llama-3-70b"),
    (r"llama.*3.*8b", "llama-3-8b"),
    (r"gpt-?j", "gpt-j-6b"),
    (r"falcon.?180b", "falcon-180b"),
    (r"mistral.?7b", "mistral-7b"),
    (r"mixtral.?8x7b", "mixtral-8x7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
    (r"llama.?2.?13b", "llama-2-13b"),
    (r"llama.*3\.2.*1b", "llama-3.2-1b"),
    (r"qwen3-32b", "qwen3-32b"),
    (r"qwen3-8b", "qwen3-8b"),
    (r"qwen3-0\.6b", "qwen3-0.6b"),
    (r"gemma.?3.?27b", "gemma-3-27b"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwen3-30b", "qwen3-30b-a3b"),
    (r"gpt.oss.120b", "gpt-oss-120b"),
    (r"gpt.oss.20b", "gpt-oss-20b"),
    (r"deepseek.(r1|v3)", "deepseek-v3"),
    (r"minimax.m2", "minimax-m2"),
    (r"kimi.k2", "kimi-k2"),
)
"""Models of a table by the words they are known by (first match), and the catalogue's name. Llama
3.1 and 3.3 70B have Llama 3 70B's shape, as do MiniMax-M2.5 and Kimi K2.5 that of the first."""

WINDOWLESS = ("mistral-7b",)
"""Models whose window engines do not use: Mistral 7B since its version 0.2 has none."""

UNKNOWN_MODELS = (
    (r"llama.?4", "how its experts are run is not described by its shape"),
    (r"qwen3\.5|hybrid|nano-v3", "linear attention is not estimated"),
    (r"glm-5", "sparse attention is not estimated"),
    (r"583m|16b", "its dimensions are not given"),
)

GPUS = {
    "H100-SXM-80": "H100-SXM-80",
    "H200-SXM": "H200-SXM-141",
    "A100-SXM-80": "A100-SXM-80",
    "A100-PCIe-80": "A100-PCIe-80",
    "L40S": "L40S-48",
    "B200": "B200-SXM-180",
    "B300": "B300-SXM-288",
    "GB200": "GB200-186",
    "GB300": "GB300-288",
    "GH200-96": "GH200-96",
    "RTXPRO6000": "RTXPRO6000-96",
    "MI300X": "MI300X-192",
    "MI325X": "MI325X-256",
}

ENGINES = (
    (r"tensorrt-llm 0\.(\d|1\d)(\.|$)", "trtllm-engines"),
    (r"tensorrt|trtllm", "trtllm"),
    (r"vllm", "vllm"),
    (r"sglang", "sglang"),
    (r"gpt-fast", "gpt-fast"),
    (r"megatron", "megatron-inference"),
)

"""Engines by name and version. TensorRT-LLM is two stacks: before 0.20 it ran compiled TensorRT
engines from a C++ loop without CUDA graphs, since then PyTorch with graphs and an overlapped
scheduler."""

MLPERF_GOALS = {"mlperf_offline": float("inf"), "mlperf_server": 0.2, "mlperf_interactive": 0.04}
"""Seconds per output token that 99% of requests must keep (MLPerf Inference, Llama 2 70B and
Mixtral 8x7B). A submission's rate is the highest that keeps it, so it is measured at its limit."""

MEAN_OF_P99 = 0.85
"""Mean time per token over its 99th percentile, of requests that reach a server at random."""

WEIGHTS_SHARE = 0.6
"""Of a GPU's memory that weights fill at most where a row does not state tp: the rest is cache."""

MODES = (
    "agg",
    "inflight_max_load",
    "static_batch_offline",
    "static_batch_latency",
    "batch1_decode",
    "steady_closed_loop",
    "disagg",
    "dynamic_batching",
    *MLPERF_GOALS,
)

SAMPLED = ("steady_closed_loop",)
"""Ways of measuring whose requests ask for top-p and a repetition penalty (ML.ENERGY's client:
temperature 0.8, top-p 0.95, penalty 1.1). The others decode greedily."""

TORCH_SAMPLERS = ("vllm",)
"""Engines that draw such tokens by sorting in PyTorch (vLLM, until FlashInfer's kernels are its
default)."""

NAMED_MOST = r"source_file=20\d\d-|db-dump"
MEAN_SHARE = 0.9
"""InferenceX draws lengths evenly between 0.8 and 1 of those it names (RANDOM_RANGE_RATIO in its
README); notes name its exports by their date."""

VARIED = rf"{NAMED_MOST}|sharegpt|lengths drawn|outputs ended early"
"""Notes of rows whose requests are not equally long; isl and osl are then means."""

AT_ONCE = r"\b([1-9]\d*) requests (?:of \S+ )?at once"
"""Notes of runs that send all requests at once and divide all tokens by the whole time."""

MAINSTREAM = r"(A100|H100|H200)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggregatedWorkers:
    """One side of a service that separates prompts from decoding."""

    prices: ServingPrices
    number: int
    batch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingTableRow:
    """One run that can be estimated.

    Attributes:
        family: the GPU's: A100, H100. mainstream: A100, H100 or H200.
        experts: the model has some.
        key: rows of one key are the same run, measured again.
        load: sequences at once; infinity where as many as fit.
        sampled: tokens are drawn with top-p and penalties by PyTorch.
        total: requests of a run that ends, all sent at once; infinity of one without an end.
        goal: seconds per token, on average, that a server under its highest rate keeps.
        prompt, output: tokens of a request. varied: their lengths differ, these are means.
        prices: of one replica; `prefill` and `decode` where they are separated.
        replicas: of the model on the GPUs named.
        tpot, ttft: seconds; throughput: output tokens/s; None where it was not measured.
        median: `tpot` is the median time between tokens, not its mean.
        assumed: columns that the row leaves empty, each with the value it is predicted with.
    """

    id: str
    source: str
    family: str
    gpu: str
    engine: str
    model: str
    mainstream: bool
    experts: bool
    key: tuple[str, ...]
    mode: str
    load: float
    prompt: float
    output: float
    varied: bool
    prices: ServingPrices
    prefill: DisaggregatedWorkers | None = None
    decode: DisaggregatedWorkers | None = None
    tpot: float | None
    ttft: float | None
    throughput: float | None
    total: float = float("inf")
    goal: float = float("inf")
    median: bool = False
    sampled: bool = False
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_serving_table(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file; raises OptionError as `csv_rows.read_csv`."""
    return csv_rows.read_csv(path, REQUIRED, OPTIONAL)


def serving_rows(
    table: Iterable[Mapping[str, str]],
) -> tuple[list[ServingTableRow], dict[str, str]]:
    """The rows that can be predicted, and of the others why not, by id."""
    return csv_rows.parsed_rows(table, parse_serving_row)


def parse_serving_row(row: Mapping[str, str]) -> ServingTableRow | str:
    """What a row describes, or why it cannot be predicted."""
    return csv_rows.or_reason(_parse, row)


def _parse(row: Mapping[str, str]) -> ServingTableRow:
    mode = row["mode"]
    if mode not in MODES:
        raise LeftOut(f"unknown mode {mode or '(none)'}")
    model = _model(row["model"])
    gpu = _gpu(row["gpu"])
    engine = _first(ENGINES, f"{row['engine']} {row.get('engine_version', '')}".strip())
    if engine is None:
        raise LeftOut(f"engine {row['engine']} has no constants")
    prompt, output = number(row, "isl"), number(row, "osl")
    assumed: dict[str, str] = {}
    if not prompt:
        where = f"{row['source']} {mode} {row.get('notes', '')}"
        length = prompt_length(where, row["model"])
        prompt = length.prompt
        assumed["isl"] = f"{prompt:g} ({length.name})"
    if not output:
        if mode not in ("batch1_decode", "static_batch_latency"):
            raise LeftOut("no length of the outputs")
        output = 200.0
    load = number(row, "concurrency_or_batch")
    if mode == "inflight_max_load":
        load = float("inf")
    if mode in ("batch1_decode", "static_batch_latency"):
        load = 1.0 if load is None else load
    stated, rates = row.get("precision", ""), hardware.gpu(gpu).flops
    precision = _precision(stated)
    if not stated and mode in MLPERF_GOALS:  # submissions quantize as far as the GPU multiplies
        precision = next((p for p in ("fp4", "fp8") if p in rates), precision)
        assumed["precision"] = precision
    asked = _Asked(model=model, gpu=gpu, engine=engine, precision=precision)
    if mode in MLPERF_GOALS and not number(row, "tp"):
        tp = _fewest(asked, _whole(row, "n_gpus"))
        row = {**row, "tp": str(tp)}
        assumed["tp"] = str(tp)
    if mode in MLPERF_GOALS and load is None:
        load = float("inf")
    prefill = decode = None
    if mode == "disagg":
        prefill, decode = _workers(row, "prefill", asked), _workers(row, "decode", asked)
        prices = decode.prices
        if load is None:  # as many as the decoding workers were given
            load = float(decode.number * decode.batch * _whole(row, "decode_dp"))
    else:
        prices = _prices(dataclasses.replace(asked, **_degrees(row)))
    if not load:
        raise LeftOut("no number of requests at once")
    notes = row.get("notes", "")
    varied = re.search(VARIED, notes, re.I) is not None
    throughput = _throughput(row, number(row, "out_tok_s_total"))
    whole = number(row, "e2e_latency_ms")
    if throughput is None and mode == "static_batch_latency" and whole:
        throughput = 1e3 * load * output / whole
    if mode in MLPERF_GOALS:
        replicas = _whole(row, "n_gpus") / prices.gpus
        throughput = None if throughput is None else throughput / replicas
    if re.search(NAMED_MOST, notes):
        prompt = prompt if "isl" in assumed else MEAN_SHARE * prompt
        output = MEAN_SHARE * output
    measured = {name: number(row, name) for name in MEASURED}
    measured = {name: value if value and value > 1e-6 else None for name, value in measured.items()}
    tpot, ttft = measured["tpot_ms"], measured["ttft_ms"]
    return ServingTableRow(
        id=row["id"],
        source=row["source"],
        family=gpu.partition("-")[0],
        gpu=gpu,
        engine=engine,
        model=model,
        mainstream=re.match(MAINSTREAM, gpu) is not None,
        experts=any(p.groups > 1 for b in shapes.shape(model).blocks.values() for p in b.products),
        key=(model, *(row.get(k, "") for k in sorted(row) if k not in (*NOT_COMPARED, "model"))),
        mode=mode,
        load=load,
        prompt=prompt,
        output=output,
        varied=varied or mode in MLPERF_GOALS or mode == "steady_closed_loop",
        total=float(ends[1]) if (ends := re.search(AT_ONCE, notes, re.I)) else float("inf"),
        goal=MEAN_OF_P99 * MLPERF_GOALS.get(mode, float("inf")),
        prices=prices,
        prefill=prefill,
        decode=decode,
        median=mode == "steady_closed_loop",
        sampled=mode in SAMPLED and engine in TORCH_SAMPLERS,
        assumed=assumed,
        tpot=None if tpot is None else tpot / 1e3,
        ttft=None if ttft is None else ttft / 1e3,
        throughput=throughput,
    )


def _throughput(row: Mapping[str, str], total: float | None) -> float | None:
    """Of all GPUs; tables that give it per GPU alone are multiplied."""
    each, gpus = number(row, "out_tok_s_per_gpu"), number(row, "n_gpus")
    if total is None and each is not None and gpus is not None:
        total = each * gpus
    return total or None  # none measured where it is 0


def _model(name: str) -> str:
    reason = _first(UNKNOWN_MODELS, name)
    if reason is not None:
        raise LeftOut(f"{name}: {reason}")
    found = _first(MODELS, name) or (name if name in model_names() else None)
    if found is None:
        raise LeftOut(f"{name}: no shape in the catalogue")
    return found


def _gpu(name: str) -> str:
    """The catalogue's name of a row's GPU."""
    try:
        return GPUS.get(name) or hardware.gpu(name).name
    except HocketError:
        raise LeftOut(f"GPU {name} is not in the catalogue") from None


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((found for pattern, found in table if re.search(pattern, text, re.I)), None)


def _precision(text: str) -> str:
    if not text:
        return "bf16"
    for known in ("bf16", "fp16", "fp8", "fp4", "int8", "int4"):
        if text.startswith(known):
            return known
    raise LeftOut(f"unknown precision {text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """One replica that a row describes."""

    model: str
    gpu: str
    engine: str
    precision: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1


def _degrees(row: Mapping[str, str]) -> dict[str, Any]:
    """tp, pp, ep and ranks of attention's data parallelism."""
    tp, pp = _whole(row, "tp"), _whole(row, "pp")
    ep, moe, dp = _whole(row, "ep"), _whole(row, "moe_tp"), _whole(row, "attn_dp", 0)
    named = re.search(r"_tp(\d{1,18})(?:_0)?_ep(\d{1,18})", row["id"])
    if named and ep > 1 and int(named[1]) * int(named[2]) == tp:
        tp, moe = int(named[1]), max(int(named[1]) // ep, 1)
    elif ep > 1 and moe > 1 and tp == moe * ep and tp > 8:
        tp, moe = moe, max(moe // ep, 1)
    if ep > 1 and moe > 1 and dp == moe * ep and dp > 8:
        dp = moe
    if tp == dp and ep == tp * dp and ep > 8:
        ep, dp = tp, 1
    if dp == 0:
        dp = max(moe * ep // tp, 1)
    gpus = _whole(row, "n_gpus", 0)
    if gpus and dp > 1 and tp * pp * dp > gpus and gpus % (pp * dp) == 0:
        tp = gpus // (pp * dp)  # `DEPn` names n ranks of attention's data parallelism alone
    return {"tp": tp, "pp": pp, "ep": ep, "dp": dp}


def _fewest(asked: _Asked, gpus: int) -> int:
    """Tensor ranks of a replica of which a row only says the GPUs of all of them."""
    tp = 1
    while 2 * tp <= gpus:
        prices = _prices(dataclasses.replace(asked, tp=tp))
        if prices.weight_bytes <= WEIGHTS_SHARE * prices.memory:
            break
        tp *= 2
    return tp


def _whole(row: Mapping[str, str], name: str, absent: int = 1) -> int:
    value = number(row, name)
    return absent if not value else int(value)


def _workers(row: Mapping[str, str], side: str, asked: _Asked) -> DisaggregatedWorkers:
    count = number(row, f"{side}_workers")
    if count is None:
        raise LeftOut("separated prompts and decoding without the number of workers of each")
    degrees: dict[str, Any] = {
        name: _whole(row, f"{side}_{column}")
        for name, column in (("tp", "tp"), ("pp", "pp"), ("dp", "dp"), ("ep", "moe_ep"))
    }
    prices = _prices(dataclasses.replace(asked, **degrees))
    return DisaggregatedWorkers(prices=prices, number=int(count), batch=_whole(row, f"{side}_bs"))


@functools.lru_cache(maxsize=4096)
def _prices(asked: _Asked) -> ServingPrices:
    shape = _shape(asked.model)
    cluster, measured = _cluster(asked.gpu, asked.tp * asked.pp * asked.dp)
    precision = experts = asked.precision
    if asked.model.startswith("gpt-oss"):
        precision, experts = "bf16", "mxfp4"  # as published: experts in MXFP4, the rest in 16 bits
    few = asked.precision in ("fp8", "fp4") and asked.engine.startswith("trtllm")
    return serving_prices(
        shape,
        cluster,
        tp=asked.tp,
        pp=asked.pp,
        ep=asked.ep,
        attention_dp=asked.dp,
        precision=precision,
        expert_precision=experts,
        cache_precision="fp8" if few else "bf16",
        engine=asked.engine,
        curves=measured,
    )


@functools.cache
def _shape(model: str) -> ModelShape:
    shape = shapes.shape(model)
    if model not in WINDOWLESS:
        return shape
    blocks = {
        name: dataclasses.replace(
            block,
            attention=tuple(dataclasses.replace(core, window=None) for core in block.attention),
        )
        for name, block in shape.blocks.items()
    }
    return dataclasses.replace(shape, blocks=blocks)


@functools.cache
def _cluster(gpu: str, gpus: int) -> tuple[Cluster, tuple[MeasuredCurve, ...]]:
    whole = hardware.cluster(f"1x{gpu}").node
    node = hardware.node(whole.name, hardware.gpu(gpu))
    number = max(node.num_gpus, -(-gpus // node.num_gpus) * node.num_gpus)
    cluster = hardware.cluster(f"{number}x{gpu}")
    return cluster, curves_of(node)
