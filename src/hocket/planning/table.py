"""Rows of a table of published training runs that can be estimated: model, layout, machine, stack.

The columns are those of a table that lists, for each measured step, the model's dimensions, the
degrees of its layout, the machine and free notes. What a row lacks and cannot be assumed is the
reason for which it is left out. Assumed, with the reason next to the rule:

    vocabulary absent            50304, GPT-2's padded
    feed-forward width absent    4 x hidden
    key/value heads absent       as many as heads
    microbatch, recompute, ZeRO  resolved as `plan` chooses them (`planning.unstated`), and listed
    or sequence parallel absent  with the row; recompute by `RECOMPUTE_OF` where that is known
    network absent               the cards that the catalogue's node for this GPU is sold with
    dimensions absent            those that the model's name stands for (`SIZES`)
    mixture of experts           the catalogue's model of that name, where the row's numbers agree,
                                 else one made of the row's columns (`expert_rows`)
    etp absent                   tp, Megatron-Core's default
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hocket.catalogue import shapes
from hocket.cost.constants import FEW_BITS, Constants, constants, few_bits
from hocket.cost.layout_batch import SCHEDULES
from hocket.cost.machine import ClusterNumbers
from hocket.planning import csv_rows, expert_rows
from hocket.planning.csv_rows import LeftOut, number
from hocket.planning.decoder import decoder
from hocket.planning.problem import Problem
from hocket.planning.row_machine import row_cluster, row_machine_numbers
from hocket.planning.unstated import KNOBS, resolve_unstated
from hocket.spec import recompute
from hocket.spec.cluster import Cluster
from hocket.spec.model_shape import ModelShape

REQUIRED = ("id", "source", "model", "gpu", "layers", "hidden", "heads", "seq", "global_batch")
OPTIONAL = (
    "n_gpus", "gpus_per_node", "inter_link", "tp", "pp", "vp", "cp", "ep", "dp", "sp",
    "zero_stage", "recompute", "precision", "schedule", "kv_heads", "ffn", "vocab", "micro_batch",
    "measured_iter_s", "measured_mem_gb", "mem_kind", "notes", "recompute_modules",
    *expert_rows.COLUMNS,
)  # fmt: skip

NOT_COMPARED = (
    "id", "measured_iter_s", "measured_tflops_per_gpu", "measured_mfu",
    "measured_tokens_per_s_per_gpu", "measured_mem_gb", "verified", "mem_kind", "tflops_def",
    "iter_s_derived", "notes",
)  # fmt: skip
"""Columns that do not make two rows different runs."""

STACKS = (
    (r"maxtext|\bpax\b|\bjax", "jax"),
    (r"llm-foundry", "fsdp-triton"),
    (r"compile(?!r)", "fsdp-compiled"),
    (r"torchtitan|fms-fsdp|\bfsdp2\b", "fsdp"),
    (r"bloom|bigscience", "deepspeed"),
    (r"internevo", "internevo"),
    (r"korthikanti|reducing activation recomput", "megatron-2022"),
    (r"megascale(?!.*megatron-lm)", "megascale"),
    (r"nemo|megatron-bridge|overlap", "nemo"),
    (r"golden|megatron-core|megascale|[hb][12]00|llama.?3", "megatron-core"),
    (r"", "megatron"),
)
"""Software by what a row says of its source (first match): the words it is known by."""

GATED = r"llama|intern|qwen|mistral|gemma|phi|mixtral|deepseek"
EXPERTS = r"moe|expert|gpt.oss|a\d+b\b|deepseek|mixtral|8x\d+b|kimi.?k2|nemotron_3"

SIZES: tuple[tuple[str, dict[str, int]], ...] = (
    # NeMo's GPT-3 configurations of these names.
    (r"^gpt3-5b$", {"layers": 24, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50304}),
    (r"^gpt3-20b$", {"layers": 44, "hidden": 6144, "heads": 48, "ffn": 24576, "vocab": 50304}),
    # InternLM Team 2023; huggingface.co/internlm/internlm-20b.
    (r"^internlm-20b$", {"layers": 60, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 103168}),
)
"""Dense models whose name fixes dimensions that a row leaves out."""

CATALOGUED = (
    (r"mixtral.?8x7b", "mixtral-8x7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
    (r"qwen3.?30b.?a3b", "qwen3-30b-a3b"),
    (r"qwen3.?235b.?a22b", "qwen3-235b-a22b"),
    (r"gpt.?oss.?20b", "gpt-oss-20b"),
    (r"gpt.?oss.?120b", "gpt-oss-120b"),
    (r"deepseek.?v3\b(?!.*proxy)", "deepseek-v3"),
    (r"kimi.?k2", "kimi-k2"),
)
"""Mixtures of experts by the name of a row's model: their shapes are traced, not made."""

RECOMPUTE_OF = (
    (r"^(jax|megatron|deepspeed) ", "full"),
    (r"^nemo .*(llama_?3|qwen3)", "none"),
    (r"^nemo .*deepseek", recompute.CHEAP),
)
"""Recompute by stack and model where a row does not state it and its software does (first match):
Megatron-LM before 2022 and Pax had no other kind and ran their published figures with it; NVIDIA's
recipes (Megatron-Bridge, scripts/performance) set none for Llama 3 and Qwen3, and modules for
DeepSeek-V3."""

MAINSTREAM = "mainstream"

MISSING = 4
"""Layers that the two ends may lack together: an end that lacks more would be nearly empty."""

KINDS = ("full", "selective", recompute.CHEAP)
"""Kinds of recompute that a row has a word for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One run that can be estimated.

    Attributes:
        kind: MAINSTREAM (dense, 16 bits, A100 or H100), else what it is reported under.
        group: rows of one group differ only in layout.
        key: rows of one key are the same run, measured again.
        measured: seconds; memory: bytes; None where it was not measured.
        memory_unit: bytes of the table's unit; memory_counted: a field of cost.memory.Memory.
        layout: one number for each field of cost.columns.Layouts.
        resolved: columns that the row leaves empty, each with the value that a plan has.
    """

    id: str
    source: str
    kind: str
    group: tuple[str, ...]
    key: tuple[str, ...]
    stack: str
    shape: ModelShape
    cluster: Cluster
    machine: ClusterNumbers
    constants: Constants
    layout: dict[str, float]
    seq_len: float
    resolved: Mapping[str, str]
    measured: float | None
    memory: float | None
    memory_unit: float
    memory_counted: str


def read_training_table(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file; raises OptionError as `csv_rows.read_csv`."""
    return csv_rows.read_csv(path, REQUIRED, OPTIONAL)


def parse_training_row(row: Mapping[str, str]) -> PublishedRow | str:
    """What a row describes, or why it cannot be predicted."""
    return csv_rows.or_reason(_parse, row)


def _parse(row: Mapping[str, str]) -> PublishedRow:
    said = f"{row['source']} {row.get('notes', '')} {row['gpu']}".lower()
    model = row["model"]
    if re.search(r"\blora\b", model, re.I):
        raise LeftOut("LoRA: which weights are trained is not among the columns")
    row = _completed(row)
    for name in ("layers", "hidden", "heads", "seq", "global_batch"):
        if number(row, name) is None:
            raise LeftOut(f"{name} is not given")
    precision = _precision(row.get("precision", ""))
    stack = next(name for pattern, name in STACKS if re.search(pattern, said))
    zero = number(row, "zero_stage") or 0.0
    if stack == "megatron" and zero == 3:
        stack = "deepspeed"
    layout = _layout(row, stack, said)
    selective = layout["recompute"] == recompute.code("selective")
    if stack == "megatron" and (layout["sequence_parallel"] or selective):
        stack = "megatron-2022"  # which brought both
    cluster = row_cluster(
        row["gpu"],
        row.get("inter_link", ""),
        gpus=int(layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"]),
        per_node=int(number(row, "gpus_per_node") or 8),
    )
    if precision not in cluster.node.gpu.flops:
        raise LeftOut(f"{cluster.node.gpu.name} has no rate for {precision}")
    numbers = row_machine_numbers(cluster, precision)
    grad_dtype = _grad_dtype(row.get("precision", ""), precision, stack)
    values = constants(cluster.node.gpu.name, stack, precision=precision, grad_dtype=grad_dtype)
    if stack.startswith("fsdp") and re.search(r"transformer.?engine", said):
        kernels = constants(cluster.node.gpu.name, "megatron-core", precision=precision)
        values = dataclasses.replace(values, traffic=kernels.traffic, flash_rate=kernels.flash_rate)
    if precision in FEW_BITS:
        values = few_bits(values, cluster.node.gpu.flops, precision)
    if _has_experts(row):
        values = expert_rows.with_dispatch(values, row)
    memory, seconds = number(row, "measured_mem_gb"), number(row, "measured_iter_s")
    for name, value in (("measured_mem_gb", memory), ("measured_iter_s", seconds)):
        if value is not None and value <= 0:
            raise LeftOut(f"{name} is {value:g}")
    names = [name for name in row if name not in NOT_COMPARED]
    found = PublishedRow(
        id=row["id"],
        source=row["source"],
        kind=_kind(cluster, precision, experts=_has_experts(row)),
        group=(
            *(row.get(name, "") for name in ("source", "layers", "hidden", "heads", "ffn")),
            *(row.get(name, "") for name in ("vocab", "seq", "global_batch", "gpu", "n_gpus")),
            *(row.get(name, "") for name in ("precision", "inter_link", "gpus_per_node")),
            stack,
        ),
        key=(stack, *(row[name] for name in names)),
        stack=stack,
        shape=_shape(row, stack),
        cluster=cluster,
        machine=numbers,
        constants=values,
        layout=layout,
        seq_len=_need(row, "seq"),
        resolved={},
        measured=seconds,
        memory=None if memory is None else memory * _unit(row.get("mem_kind", "")),
        memory_unit=_unit(row.get("mem_kind", "")),
        memory_counted=_counted(row.get("mem_kind", "")),
    )
    unstated = _unstated(row, found)
    return _resolved(found, unstated, grad_dtype, precision) if unstated else found


def _unstated(row: Mapping[str, str], found: PublishedRow) -> list[str]:
    """Knobs that a row leaves empty and that its degrees leave a choice of."""
    at = found.layout
    choice = {"sp": at["tp"] > 1, "zero_stage": at["dp"] > 1}
    modules = row.get("recompute_modules", "").strip()
    return [
        name
        for name in KNOBS
        if row.get(name, "").strip().lower() in ("", "nan")
        and choice.get(name, True)
        and not (name == "recompute" and (modules or _recipe(row, found.stack)))
    ]


def _recipe(row: Mapping[str, str], stack: str) -> str | None:
    """The recompute that a row's software had; None where it had a choice."""
    text = f"{stack} {row['model']}"
    return next((kind for pattern, kind in RECOMPUTE_OF if re.search(pattern, text, re.I)), None)


def _resolved(
    found: PublishedRow, unstated: Sequence[str], grad_dtype: str | None, precision: str
) -> PublishedRow:
    """The row with unstated knobs as a plan has them."""
    at = found.layout
    problem = Problem(
        shape=found.shape,
        cluster=found.cluster,
        seq_len=int(found.seq_len),
        global_batch=round(at["dp"] * at["microbatch"] * at["microbatches"]),
        precision=precision,
        grad_dtype=grad_dtype,
        stack=found.stack,
    )
    fields, resolved = resolve_unstated(problem, {**at, "lighter": 0.0}, unstated)
    layout = {**fields, "lighter": at["lighter"]}  # a plan proposes no ends that lack a part
    return dataclasses.replace(found, layout=layout, resolved=resolved)


def _need(row: Mapping[str, str], name: str) -> float:
    value = number(row, name)
    assert value is not None, name
    return value


def _precision(text: str) -> str:
    text = text.lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text:
        return "fp8"
    return "fp16" if text.startswith("fp16") else "bf16"


def _grad_dtype(text: str, precision: str, stack: str) -> str | None:
    """The type of gradients that a row states or that its software had; None: as by default."""
    # NVIDIA's recipes for these figures set grad_reduce_in_fp32 to false.
    if stack in ("internevo", "nemo") and precision != "fp16":
        return "bf16"
    if stack == "fsdp-triton" and precision != "fp16":
        return "fp32" if "fp32" in text else "bf16"
    return None


def _unit(kind: str) -> float:
    return 2.0**30 if "gib" in kind.lower() or "nvidia-smi" in kind.lower() else 1e9


def _counted(kind: str) -> str:
    """Tensors alone (`allocated`), or all that the device shows (`peak`)."""
    return "allocated" if re.search("allocated|as printed", kind) else "peak"


def _kind(cluster: Cluster, precision: str, *, experts: bool) -> str:
    family = re.split(r"[-\s]", cluster.node.gpu.name)[0]
    if experts:
        return f"experts, {family} {precision}"
    if family in ("A100", "A800", "H100") and precision in ("bf16", "fp16"):
        return MAINSTREAM
    if precision in ("fp8", "fp4") and family in ("A100", "H100"):
        return f"{family} {precision}"
    return family if family.startswith(("V100", "TPU")) else f"{family} {precision}"


@functools.cache
def _decoder(model: str, values: tuple[int | None, ...], dropout: bool) -> ModelShape:
    layers, hidden, heads, kv_heads, ffn, vocab, positions = values
    assert layers is not None
    assert hidden is not None
    assert heads is not None
    gated = re.search(GATED, model, re.I) is not None
    if gated and ffn is not None and ffn % 64:
        ffn = -(-ffn // 256) * 256  # a width printed before its rounding up
    return decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab or 50304,
        gated=gated,
        dropout=dropout and not gated,
        positions=0 if gated else positions or 0,
        name=model,
    )


def _completed(row: Mapping[str, str]) -> Mapping[str, str]:
    """The row with what its model's name fixes where it says nothing itself."""
    name = row["model"]
    known: dict[str, int] = {}
    if _has_experts(row):
        shape = _named(row)
        known = {"layers": len(shape.layers), "hidden": shape.hidden, "heads": shape.heads}
        known["heads"] = int(number(row, "heads") or shape.heads)
    for pattern, sizes in SIZES:
        if re.search(pattern, name, re.I):
            known = sizes
    return {**row, **{k: str(v) for k, v in known.items() if number(row, k) is None}}


def _has_experts(row: Mapping[str, str]) -> bool:
    """By the model's name, or because the row counts them."""
    return bool(re.search(EXPERTS, row["model"], re.I)) or (number(row, "experts") or 0) > 1


def _named(row: Mapping[str, str]) -> ModelShape:
    """The catalogue's shape of a row's mixture of experts."""
    name = row["model"]
    found = next((entry for pattern, entry in CATALOGUED if re.search(pattern, name, re.I)), None)
    if found is None:
        return _made(row)
    shape = shapes.shape(found)
    for field, value in (("layers", len(shape.layers)), ("hidden", shape.hidden)):
        said = number(row, field)
        if said is not None and said != value:
            if number(row, "experts"):
                return _made(row)
            raise LeftOut(f"mixture of experts: {field} {said:g} is not {found}'s {value}")
    return shape


_SHAPES: dict[tuple[str, ...], ModelShape] = {}


def _made(row: Mapping[str, str]) -> ModelShape:
    """The shape of a row's columns; rows of the same model share one."""
    names = ("model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "attention")
    key = tuple(row.get(name, "") for name in (*names, *expert_rows.COLUMNS[:4]))
    if key not in _SHAPES:
        _SHAPES[key] = expert_rows.made(row)
    return _SHAPES[key]


def _shape(row: Mapping[str, str], stack: str) -> ModelShape:
    if _has_experts(row):
        return _named(row)
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    numbers = (number(row, name) for name in names)
    sizes = tuple(None if n is None else int(n) for n in numbers)
    return _decoder(row["model"], sizes, not stack.startswith("fsdp"))


def _layout(row: Mapping[str, str], stack: str, said: str) -> dict[str, float]:
    def degree(name: str) -> float:
        value = number(row, name)
        return 1.0 if value is None or value < 1 else value

    tp, pp, cp, ep = (degree(name) for name in ("tp", "pp", "cp", "ep"))
    gpus, dp = number(row, "n_gpus"), number(row, "dp")
    if dp is None:
        if gpus is None:
            raise LeftOut("neither dp nor n_gpus is given")
        dp = gpus / (tp * pp * cp)
    if dp < 1 or (gpus is not None and abs(dp * tp * pp * cp - gpus) > 0.01 * gpus):
        raise LeftOut(f"dp {dp:g} x tp {tp:g} x pp {pp:g} x cp {cp:g} is not n_gpus {gpus}")
    batch = _need(row, "global_batch")
    micro = number(row, "micro_batch") or batch / dp  # unstated: resolved later
    named = row.get("schedule", "").lower()
    virtual = number(row, "vp") or (2.0 if "interleaved" in named else 1.0)
    schedule = "1f1b"
    for pattern, name in (("zb-?1p|h1", "zb-h1"), ("zb-?2p|h2", "zb-h2"), ("zb-?v", "zb-v")):
        if re.search(pattern, named):
            schedule = name
    if pp > 1 and virtual > 1 and schedule == "1f1b":
        schedule = "interleaved"
    zero = number(row, "zero_stage") or 0.0
    shard = dp
    stated = re.search(r"zero1 group size (\d+)", said)
    if stated:
        shard = min(dp, float(stated[1]))
    elif re.search(r"\bhsdp\b", said):
        shard = min(dp, number(row, "gpus_per_node") or 8.0)
    etp = number(row, "etp") or (1.0 if ep > dp * cp else tp)
    again = row.get("recompute", "").lower()
    if row.get("recompute_modules", "").strip():
        again = recompute.CHEAP
    if again in ("", "nan"):
        again = _recipe(row, stack) or "none"
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "virtual": virtual if pp > 1 else 1.0,
        "microbatch": micro,
        "microbatches": max(1.0, round(batch / (micro * dp))),
        "zero": zero,
        "shard": shard,
        "recompute": float(next((recompute.code(name) for name in KINDS if name in again), 0)),
        "sequence_parallel": float((number(row, "sp") or 0.0) > 0 and tp > 1),
        "schedule": float(SCHEDULES.index(schedule)),
        "lighter": _lighter(number(row, "layers") or 0.0, pp, virtual if pp > 1 else 1.0, said),
        "offload": 0.0,
    }


def _lighter(layers: float, pp: float, virtual: float, said: str) -> float:
    """Layers fewer on the first and on the last rank, on average of both. Stages hold equally many;
    what no stage can have is missing at the ends, which have the embedding and the loss instead
    (Megatron-Core divides layers no other way: `--account-for-embedding-in-pipeline-split`)."""
    missing = -layers % (pp * virtual)
    if pp > 1 and 0 < missing <= MISSING:
        return missing / 2
    return float("one layer fewer" in said)


def training_rows(table: Iterable[Mapping[str, str]]) -> tuple[list[PublishedRow], dict[str, str]]:
    """The rows that can be predicted, and of the others why not, by id."""
    return csv_rows.parsed_rows(table, parse_training_row)
