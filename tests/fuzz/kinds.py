"""Kinds: each file that may come from someone else, and the readers that it goes through."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import mutate

Mutation = Callable[[bytes, random.Random], bytes]
Step = Callable[[Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of input.

    Attributes:
        name: of the kind. file: inside of the folder, the one that is mutated.
        prepare: writes the folder with a good file. read: what hocket does with it.
        mutate: a good file and a random generator to another file.
        calls: whether it may call a server on loopback.
    """

    name: str
    file: str
    prepare: Step
    read: Step
    mutate: Mutation
    calls: bool = False


KINDS: dict[str, Kind] = {}


def kind(
    name: str, file: str, prepare: Step, mutation: Mutation, calls: bool = False
) -> Callable[[Step], Step]:
    """Register a reader as a kind."""

    def register(read: Step) -> Step:
        KINDS[name] = Kind(
            name=name, file=file, prepare=prepare, read=read, mutate=mutation, calls=calls
        )
        return read

    return register


EVIL = "import pathlib; pathlib.Path(__file__).with_name('../executed').touch()\n"


# --- folders ---------------------------------------------------------------------------------


def copied(make: Callable[[Path], None]) -> Step:
    """Make a folder once a process, and copy it each time."""

    @functools.cache
    def once() -> tempfile.TemporaryDirectory[str]:
        there = tempfile.TemporaryDirectory(prefix="hocket-fuzz-good-")
        make(Path(there.name))
        return there

    def prepare(folder: Path) -> None:
        shutil.copytree(once().name, folder, dirs_exist_ok=True)

    return prepare


def run_folder(folder: Path) -> None:
    """A run folder with data, one checkpoint, a schedule file and a model."""
    import numpy as np

    from hocket.jobs import prepare
    from hocket.jobs.request import request
    from hocket.spec.checkpoint import Manifest, Shard, TensorRecord
    from hocket.spec.placement import Placement, TensorBlock
    from hocket.spec.tensor_file import TensorEntry, write_tensors

    data = folder / "text.txt"
    data.write_text("".join(f"line {n} of some text\n\n" for n in range(60)))
    wanted = request(
        {"model": "tiny-llama", "data": [str(data)], "run": str(folder / "run"), "seq_len": 16,
         "global_batch": 4, "steps": 4, "save_every": 2, "device": "cpu", "layout": "pp2",
         "eval_fraction": 0.3}
    )  # fmt: skip
    job = prepare.prepare_job(wanted)
    run = prepare.train_folder(wanted)
    _, tokens, config = prepare.data(job, run)
    prepare.write_run(prepare.fitted_to(job, tokens), run, config, "train")
    (folder / "run" / "mine.txt").write_text(run.schedule_file.read_text())
    checkpoint = run.checkpoints / "step-000002"
    checkpoint.mkdir(parents=True)
    entries, values = [], []
    for name, shape in (("a.weight", (4, 3)), ("b.weight", (6,))):
        entries.append(TensorEntry(name=f"parameter/{name}", dtype="F32", shape=shape))
        values.append(np.arange(np.prod(shape), dtype=np.float32))
    sums = write_tensors(checkpoint / "rank-00000.safetensors", entries, values)
    placements = {}
    for entry in entries:
        name, zero = entry.name.removeprefix("parameter/"), (0,) * len(entry.shape)
        block = TensorBlock(start=zero, size=entry.shape, local=zero)
        placements[name] = Placement(
            name=name, shape=entry.shape, local_shape=entry.shape, blocks=(block,)
        )
    records = tuple(
        TensorRecord(
            key=e.name, kind="parameter", name=e.name[10:], dtype="F32", shape=e.shape, crc32=s
        )
        for e, s in zip(entries, sums, strict=True)
    )
    shard = Shard(rank=0, file="rank-00000.safetensors", placements=placements, tensors=records)
    manifest = Manifest(step=2, layout="dp1", model="x", shards=(shard,))
    (checkpoint / "manifest.json").write_text(manifest.to_json())
    (run.checkpoints / "latest").write_text("step-000002\n")


def model_folder(folder: Path) -> None:
    """A Hugging Face directory with a configuration, an index, weights and a tokenizer."""
    import numpy as np

    from hocket.catalogue import models
    from hocket.spec.tensor_file import TensorEntry, write_tensors
    from hocket.training.tokenizer import byte_tokenizer

    (folder / "config.json").write_text(json.dumps(models.config("tiny-llama")))
    (folder / "evil.py").write_text(EVIL)
    byte_tokenizer().save(folder)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    settings = {"eos_token_id": [256], "temperature": 0.7, "top_k": 40, "top_p": 0.9,
                "repetition_penalty": 1.1, "max_new_tokens": 20, "do_sample": True}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings))
    names = {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        entries = [
            TensorEntry(name=f"layer.{number}.{k}", dtype="BF16", shape=(3, 2)) for k in "ab"
        ]
        write_tensors(folder / file, entries, [np.zeros(6, np.uint16) for _ in entries])
        names |= {entry.name: file for entry in entries}
    index = {"metadata": {"total_size": 48}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def reported_folder(folder: Path) -> None:
    """A run folder with all that a report reads."""
    from tests.reporting.run_folders import gpus, make

    make(folder / "run", layout="pp2.tp2:microbatches=2", steps=3, machine=gpus())
    timeline = (folder / "run" / "timeline.json").read_text()
    later = [{"step": 9, "timeline": json.loads(timeline)}]
    (folder / "run" / "timeline.later.json").write_text(json.dumps(later))
    (folder / "run" / "background_load.json").write_text('{"cores": 1.25}')
    row = {"layer": "full", "kernel": "flash", "reason": "", "layers": 4}
    (folder / "run" / "attention.json").write_text(json.dumps([row]))


def served_folder(folder: Path) -> None:
    """The folder of a server."""
    from tests.reporting.test_served import folder as make

    make(folder / "run")
    (folder / "run" / "background_load.json").write_text('{"cores": 1.25}')


RUN, MODEL = copied(run_folder), copied(model_folder)
REPORTED, SERVED = copied(reported_folder), copied(served_folder)


# --- a run that is resumed ---------------------------------------------------------------------


def _resume(folder: Path) -> None:
    from hocket.jobs import resume
    from hocket.jobs.record import JobRecorder
    from hocket.jobs.request import request
    from hocket.jobs.train import resumed

    run = folder / "run"
    found = resume.resume_job(request({"model": run, "run": run, "resume": True}))
    nothing: Any = None
    resumed(found, JobRecorder(None), launcher=nothing)


kind("run.json", "run/run.json", RUN, mutate.checksummed)(_resume)


@kind("schedule.txt", "run/schedule.txt", RUN, mutate.damaged)
def _schedule(folder: Path) -> None:
    from hocket.spec.schedule import Schedule

    _resume(folder)
    Schedule.parse((folder / "run" / "schedule.txt").read_text())


@kind("schedule file", "run/mine.txt", RUN, mutate.damaged)
def _schedule_file(folder: Path) -> None:
    from hocket.jobs import prepare
    from hocket.schedules.validate import validate_schedule
    from hocket.spec.layout import Layout

    path = folder / "run" / "mine.txt"
    layout = Layout.parse(f"pp2:microbatches=4,schedule={path}")
    validate_schedule(prepare.scheduled(layout), layout=layout, num_microbatches=4)


@kind("tokens.json", "run/data/tokens.json", RUN, mutate.checksummed)
def _tokens(folder: Path) -> None:
    from hocket.training.dataset import open_dataset
    from hocket.training.token_manifest import TRAIN, VALID, Tokens, verify_tokens

    data = folder / "run" / "data"
    verify_tokens(data, 16)
    tokens = Tokens.load(data)
    for name in (TRAIN, VALID):
        samples = open_dataset(data, name, tokens, 16, 0)
        if len(samples):
            samples.batch(range(3))


@kind("checkpoint manifest", "run/checkpoints/step-000002/manifest.json", RUN, mutate.checksummed)
def _manifest(folder: Path) -> None:
    from hocket.spec import checkpoint
    from hocket.training.export import checkpoint_opened

    there, _, _ = checkpoint.newest_whole(folder / "run" / "checkpoints")
    with checkpoint_opened(there) as whole:
        for name in whole.names():
            whole.tensor(name)


kind(
    "checkpoint shard", "run/checkpoints/step-000002/rank-00000.safetensors", RUN,
    mutate.safetensors,
)(_manifest)  # fmt: skip


# --- a model's directory ------------------------------------------------------------------------


@kind("config.json", "config.json", MODEL, mutate.json_file)
def _config(folder: Path) -> None:
    from hocket.jobs.serving.request import stop_tokens
    from hocket.jobs.validate import validate_layout
    from hocket.models.source import resolve_model
    from hocket.spec.layout import Layout
    from hocket.spec.run import Workload
    from hocket.training.tokenizer import Tokenizer

    source = resolve_model(folder)
    assert source.code is None
    validate_layout(
        source.dimensions, Layout.parse("dp2.pp2.tp2"), Workload(seq_len=16, global_batch=8)
    )
    stop_tokens(source, Tokenizer.load(folder))


@kind("model index", "model.safetensors.index.json", MODEL, mutate.json_file)
def _headers(folder: Path) -> None:
    from hocket.models.weight_headers import headers

    for name, file in headers(folder).items():
        file.buffer(name)


kind("weights", "model-00001-of-00002.safetensors", MODEL, mutate.safetensors)(_headers)


def _tokenizer(folder: Path) -> None:
    from hocket.training.tokenizer import Tokenizer

    words = Tokenizer.load(folder)
    words.encode("a text of some words")
    assert words.hash


kind("tokenizer.json", "tokenizer.json", MODEL, mutate.json_file)(_tokenizer)
kind("tokenizer_config.json", "tokenizer_config.json", MODEL, mutate.json_file)(_tokenizer)
kind("special_tokens_map.json", "special_tokens_map.json", MODEL, mutate.json_file)(_tokenizer)


@kind("generation_config.json", "generation_config.json", MODEL, mutate.json_file)
def _generation(folder: Path) -> None:
    from hocket.jobs.serving.request import stop_tokens
    from hocket.models.source import resolve_model
    from hocket.serving.defaults import SamplingDefaults, generation_settings
    from hocket.training.tokenizer import Tokenizer

    SamplingDefaults.of(generation_settings(folder)).text()
    stop_tokens(resolve_model(folder), Tokenizer.load(folder))


def _quantized(**settings: Any) -> Step:
    def make(folder: Path) -> None:
        model_folder(folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(config))

    return copied(make)


def _read_quantized(folder: Path) -> None:
    from hocket.models import quantization
    from hocket.models.source import resolve_model

    resolve_model(folder)
    quantization.of_directory(folder)


_PACKED = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "type": "int"}
kind(
    "config.json of packed weights", "config.json",
    _quantized(
        quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": _PACKED}},
    ),
    mutate.json_file,
)(_read_quantized)  # fmt: skip
kind(
    "config.json of fp8", "config.json",
    _quantized(
        quant_method="fp8", weight_block_size=[16, 16], activation_scheme="dynamic",
        modules_to_not_convert=["lm_head"],
    ),
    mutate.json_file,
)(_read_quantized)  # fmt: skip


def _adapter(folder: Path) -> None:
    model_folder(folder)
    settings = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base",
        "revision": None, "bias": "none", "fan_in_fan_out": False, "use_rslora": True,
        "target_modules": ["q_proj"], "init_lora_weights": True, "rank_pattern": {},
        "lora_dropout": 0.1, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@kind("adapter_config.json", "adapter_config.json", copied(_adapter), mutate.json_file)
def _read_adapter(folder: Path) -> None:
    from hocket.models.merged import adapter

    assert adapter("adapter", folder).scale < float("inf")


def _adapter_weights(folder: Path) -> None:
    """A small base and the two matrices of an adapter of one of its layers."""
    import numpy as np

    from hocket.spec.tensor_file import TensorEntry, write_tensors

    (folder / "base").mkdir()
    for file, shapes in (
        ("base/model.safetensors", {"a.q_proj.weight": (6, 4), "a.norm.weight": (4,)}),
        (
            "adapter_model.safetensors",
            {f"base_model.model.a.q_proj.lora_{m}.weight": s for m, s in
             (("A", (2, 4)), ("B", (6, 2)))},
        ),
    ):  # fmt: skip
        entries = [TensorEntry(name=n, dtype="F32", shape=s) for n, s in shapes.items()]
        values = [np.arange(np.prod(s), dtype=np.float32) for s in shapes.values()]
        write_tensors(folder / file, entries, values)


@kind("adapter weights", "adapter_model.safetensors", copied(_adapter_weights), mutate.safetensors)
def _read_adapter_weights(folder: Path) -> None:
    """As the process that merges, which reports any error and ends."""
    from safetensors import SafetensorError

    from hocket.models.merged import _merge_tensors
    from hocket.spec.errors import ModelError

    (folder / "to").mkdir(exist_ok=True)
    try:
        _merge_tensors(folder, folder / "base", folder / "to", 2.0, False)
    except (SafetensorError, RuntimeError) as error:
        raise ModelError(str(error)) from None


def _window_parts(folder: Path) -> Any:
    from hocket.training import data_paths
    from hocket.training.corrupt import CorruptRecords
    from hocket.training.token_window import TokenStream, WindowMaker
    from hocket.training.tokenizer import byte_tokenizer
    from hocket.training.windowed import _texts

    sources = data_paths.find_sources([folder / "a.jsonl"], streaming=True).sources
    stream = TokenStream(_texts(sources, "text", CorruptRecords()), byte_tokenizer(), 2)
    return WindowMaker(
        folder, stream, samples=4, seq_len=16, dtype="uint16", first=0, last=9
    )  # fmt: skip


def _windows(folder: Path) -> None:
    lines = (json.dumps({"text": f"{number} " * 9}) + "\n" for number in range(30))
    (folder / "a.jsonl").write_text("".join(lines))
    maker = _window_parts(folder)
    for window in range(4):
        maker.make(window)


@kind("windows.json", "windows.json", copied(_windows), mutate.checksummed)
def _read_windows(folder: Path) -> None:
    maker = _window_parts(folder)
    maker.clean()
    for window in (1, 3, 5):
        maker.make(window)


# --- what a report reads --------------------------------------------------------------------------


def _report(folder: Path) -> None:
    from hocket.jobs import report

    # The page holds the text as well.
    report.write_report(report.report_records([folder / "run"]), "html", str(folder / "page.html"))


for _name, _mutation in (
    ("run.json", mutate.checksummed), ("schedule.txt", mutate.damaged),
    ("metrics.jsonl", mutate.json_lines), ("timeline.json", mutate.json_file),
    ("timeline.predicted.json", mutate.json_file), ("timeline.later.json", mutate.json_file),
    ("forecast.json", mutate.json_file), ("communication.json", mutate.json_file),
    ("memory.json", mutate.json_file), ("topology.json", mutate.json_file),
    ("background_load.json", mutate.json_file), ("attention.json", mutate.json_file),
):  # fmt: skip
    kind(f"report of {_name}", f"run/{_name}", REPORTED, _mutation)(_report)
for _name in ("run.json", "forecast.json", "measured.json"):
    kind(f"server's {_name}", f"run/{_name}", SERVED, mutate.json_file)(_report)


# --- files of options and machines -------------------------------------------------------------


def _options(folder: Path) -> None:
    (folder / "job.toml").write_text(
        'model = "tiny-llama"\ndata = ["a.txt", "b.txt"]\nlayout = "dp2.pp2"\nschedule = "1f1b"\n'
        "steps = 20\nlr = 1e-3\nseq-len = 128\nglobal-batch = 16\nmicrobatches = 4\nzero = 1\n"
        'dtype = "fp32"\ncut = "balanced"\nsequence-parallel = false\nlinks = "nvlink4"\n'
    )


@kind("options TOML", "job.toml", _options, mutate.damaged)
def _read_options(folder: Path) -> None:
    from hocket.cli.config import read_config
    from hocket.jobs.request import request

    request({"model": "tiny-llama", **read_config(str(folder / "job.toml"))})


def _machine(folder: Path) -> None:
    from hocket.catalogue import machine_file
    from hocket.catalogue.hardware import cluster

    (folder / "machine.toml").write_text(machine_file.cluster_toml(cluster("2x8xH100-SXM")))


@kind("machine file", "machine.toml", _machine, mutate.damaged)
def _read_machine(folder: Path) -> None:
    from hocket.catalogue import machine_file
    from hocket.catalogue.hardware import cluster

    found = cluster(str(folder / "machine.toml"))
    (folder / "again.toml").write_text(machine_file.cluster_toml(found))
    assert cluster(str(folder / "again.toml")) == found


def _measured(folder: Path) -> None:
    from tests.reporting.run_folders import gpus

    (folder / "measured.json").write_text(gpus().to_json())


@kind("measured machine", "measured.json", _measured, mutate.json_file)
def _read_measured(folder: Path) -> None:
    from hocket.catalogue import measured_file
    from hocket.spec.measured import MachineMeasurements

    measured_file.measured_toml(
        MachineMeasurements.from_json((folder / "measured.json").read_text(errors="replace"))
    )


# --- requests ----------------------------------------------------------------------------------


def _body(folder: Path) -> None:
    body = {
        "model": "m", "prompt": ["abc", [1, 2, 3]], "max_tokens": 6, "temperature": 0.5, "n": 2,
        "top_p": 0.9, "stop": ["x", "yz"], "stream": True, "logprobs": True, "seed": 3,
        "stream_options": {"include_usage": True}, "logit_bias": {"5": 1.5}, "user": "me",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    }  # fmt: skip
    (folder / "body.json").write_text(json.dumps(body))


@kind("request body", "body.json", _body, mutate.json_file)
def _request(folder: Path) -> None:
    from hocket.serving.defaults import SamplingDefaults
    from hocket.serving.http.body import parsed
    from hocket.serving.http.errors import ApiError
    from hocket.serving.http.fields import ChatFields, ResponseFields
    from hocket.serving.http.responses import read_input
    from hocket.serving.http.settings import HttpSettings
    from hocket.spec.errors import OptionError

    settings = HttpSettings()
    try:
        body = parsed((folder / "body.json").read_bytes(), settings.max_values)
        for form in (ChatFields, ResponseFields):
            fields: Any = form.read(body)
            fields.stop_strings(settings)
            fields.structure()
            fields.sampling(max_tokens=6, stop=(256,), vocab_size=300, defaults=SamplingDefaults())
            if form is ResponseFields:
                read_input(fields)
    except ApiError as error:
        if not 400 <= error.status < 500:
            raise
        raise OptionError(error.message) from None


# --- configurations of other tools, and tables of runs -------------------------------------------

# Small, so that the search for a better layout takes milliseconds.
MODEL_PLANNED = "tiny-qwen3"
PLANNED: dict[str, Any] = {"cluster": "2xH100-SXM", "global_batch": 4}
TOOL_FILES = {
    "torchtitan-0.2.2": "job.toml", "torchtitan": "job.py", "deepspeed": "ds.json",
    "accelerate": "accelerate.yaml", "megatron": "train.sh", "megatron-bridge": "bridge.py",
    "automodel": "recipe.yaml",
}  # fmt: skip
_TITAN = """import os
def mine():
    c = qwen3_0_6b()
    c.training.num_tokens_per_microbatch_per_dp_rank = 2 * 4096
    c.training.num_tokens_per_train_step = 4 * 4096
    c.training.max_context_length = 4096
    c.parallelism.data_parallel_shard_degree = 2
    c.parallelism.tensor_parallel_degree = 1
    return c
"""
_TITAN_TOML = """[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def _tool_file(tool: str) -> Step:
    def make(folder: Path) -> None:
        from hocket.jobs.plan import emitted_layout, plan_training

        written = {"torchtitan": _TITAN, "torchtitan-0.2.2": _TITAN_TOML}.get(tool)
        if written is None:
            found = plan_training(MODEL_PLANNED, **PLANNED, seq_len=4096, emit=tool)
            written = emitted_layout(found, tool)
        (folder / TOOL_FILES[tool]).write_text(written)

    return copied(make)


def _predict(file: str) -> Step:
    def read(folder: Path) -> None:
        from hocket.jobs.plan_from import plan_from, reading_text

        path = str(folder / file)
        reading_text(plan_from(path, model=MODEL_PLANNED, **PLANNED))

    return read


for _name, _file in TOOL_FILES.items():
    _mutation = mutate.json_file if _file.endswith("json") else mutate.damaged
    kind(f"plan --from {_name}", _file, _tool_file(_name), _mutation)(_predict(_file))


def _trace(folder: Path) -> None:
    rows = [{"arrival": n / 4, "prompt_tokens": 64 + n, "output_tokens": 8 + n} for n in range(20)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [",".join(map(str, row.values())) for row in rows]
    (folder / "trace.csv").write_text("\n".join([",".join(rows[0]), *lines, ""]))


def _read_trace(file: str) -> Step:
    def read(folder: Path) -> None:
        from hocket.planning.service.trace import read_trace
        from hocket.spec.service import Service

        found = read_trace(folder / file)
        assert found.rate > 0
        other = found.under(Service(prompt_len=32, output_len=4, requests_per_second=2.0))
        assert len(other) == len(found)

    return read


kind("trace of requests", "trace.jsonl", _trace, mutate.json_lines)(_read_trace("trace.jsonl"))
kind("trace in CSV", "trace.csv", _trace, mutate.damaged)(_read_trace("trace.csv"))


def _serve_line(folder: Path) -> None:
    (folder / "serve.sh").write_text(
        "vllm serve Qwen/Qwen3-0.6B --tensor-parallel-size 2 --dtype bfloat16 "
        "--max-num-seqs 128 --max-num-batched-tokens 4096 --max-model-len 4096 "
        "--gpu-memory-utilization 0.9 --enable-prefix-caching --port 8000\n"
    )


def _sglang_line(folder: Path) -> None:
    (folder / "serve.sh").write_text(
        "python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --tp-size 2 --dp-size 1 "
        "--max-running-requests 128 --chunked-prefill-size 4096 --context-length 4096 "
        "--mem-fraction-static 0.9 --attn-dp-size 1 --port 8000\n"
    )


@kind("plan --from sglang", "serve.sh", _sglang_line, mutate.damaged)
@kind("plan --from vllm", "serve.sh", _serve_line, mutate.damaged)
def _read_serve_line(folder: Path) -> None:
    from hocket.jobs.plan_from import serve_from

    serve_from(
        str(folder / "serve.sh"), model="tiny-qwen3", cluster="2xH100-SXM", prompt_len=64,
        output_len=16, requests_per_second=2.0,
    )  # fmt: skip


def _published(folder: Path) -> None:
    (folder / "runs.csv").write_text(
        "id,source,model,gpu,n_gpus,layers,hidden,heads,kv_heads,ffn,vocab,seq,global_batch,tp,pp,"
        "dp,zero_stage,micro_batch,precision,recompute,measured_iter_s,measured_mem_gb\n"
        "a,s,llama,H100-SXM-80,8,32,4096,32,8,14336,128256,4096,64,1,1,8,3,1,bf16,full,6.1,60\n"
        "b,s,llama,A100-SXM-80,16,32,4096,32,8,14336,128256,4096,128,4,2,2,1,2,bf16,none,14,70\n"
    )


@kind("table of runs", "runs.csv", _published, mutate.damaged)
def _validate(folder: Path) -> None:
    from hocket.jobs.accuracy import accuracy, accuracy_text

    accuracy_text(accuracy(str(folder / "runs.csv")))


def _served_runs(folder: Path) -> None:
    (folder / "runs.csv").write_text(
        "id,source,model,gpu,engine,mode,isl,osl,concurrency_or_batch,tp,n_gpus,precision,"
        "tpot_ms,ttft_ms,out_tok_s_total\n"
        "a,s,llama-3-8b,H100-SXM-80,vllm,closed_loop,512,128,16,1,1,bf16,9.5,120,1500\n"
        "b,s,llama-3-70b,H100-SXM-80,trtllm,batch1_decode,2048,2048,1,8,8,fp8,9,200,110\n"
    )


@kind("table of servers", "runs.csv", _served_runs, mutate.damaged)
def _validate_servers(folder: Path) -> None:
    from hocket.jobs.accuracy import serving_accuracy, serving_text

    serving_text(serving_accuracy(str(folder / "runs.csv")))
