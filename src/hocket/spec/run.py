"""RunSpec and the run folder: all that a job is at its start, and where its files lie.

RUN/
  .lock               while a process writes the folder: which one
  run.json            the RunSpec, with a checksum
  schedule.txt        the Schedule that the runtime executes
  data/               tokens.bin (or windows of it), valid.bin, tokens.json, tokenizer.json
  metrics.jsonl       one JSON object a step
  timeline.json       measured Timeline of one step; forecast.json: the predicted one
  communication.json  every collective of that step, counted
  memory.json         peak tensor bytes by kind, a row a rank
  failures.txt        after a failure of ranks: what failed, where every rank was
  checkpoints/        step-000100/ ..., latest
  model/              the exported Hugging Face directory
  adapter/            of a run with LoRA, instead: peft's own files
  earlier/            1/ ...: what was recorded in a layout that the run has left
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import typing
from pathlib import Path
from typing import Any

from hocket.spec import renamed, run_names
from hocket.spec.errors import OptionError, RunFolderError, unknown
from hocket.spec.files import MALFORMED, json_crc32, parse_json, read_text, write_text
from hocket.spec.layout import Layout
from hocket.spec.options_file import toml
from hocket.spec.rows import require_types
from hocket.spec.serving import ServeOptions

VERSION = 1
CHECKSUM = "crc32"
"""The key of run.json that holds the checksum of its others."""

ALL_LINEAR = "all-linear"
"""The word of `--lora-targets` that means every linear layer but the head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step computes.

    Attributes:
        seq_len: tokens per sequence (default: 256; on GPUs the model's positions, at most 4096).
        global_batch: sequences per step (default: 8 for each GPU, at least 32; on CPU 32).
        dtype: compute precision; bf16 keeps fp32 master weights, fp8 is bf16 with linear layers in
            8-bit floats on GPUs of compute capability 8.9 or newer (default: auto: bf16 on GPUs
            that have it, else fp32). One of: auto, fp32, bf16, fp8.
    """

    seq_len: int = 256
    global_batch: int = 32
    dtype: str = "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Every option of a training job besides model, data and layout. Names are the flags'.

    Attributes:
        steps: optimizer steps (default: 100, or as --epochs).
        epochs: passes over the training data, instead of --steps; fractions are allowed.
        seed: seed of weights, data order and dropout.
        optimizer: AdamW, moments in fp32 or 8 bits (bitsandbytes). One of: adamw, adamw_8bit.
        lr: peak learning rate (default: 5e-5 for existing weights, 2e-4 with LoRA, for random
            weights by the model's size and at most 1e-3).
        lr_schedule: learning rate decay after warm-up (default: cosine for random weights, else
            linear). One of: cosine, linear, constant.
        min_lr: learning rate at the end (default: a tenth of --lr with cosine, 0 with linear).
        warmup: linear warm-up steps (default: a tenth of --steps, at most 100).
        weight_decay: AdamW weight decay, not applied to norms and biases (default: 0.1 for random
            weights, else 0).
        beta1: AdamW decay rate of the first moment.
        beta2: AdamW decay rate of the second moment.
        eps: AdamW epsilon.
        max_grad_norm: maximum global gradient norm; 0 disables clipping.
        grad_dtype: type in which gradients are accumulated over microbatches and reduced over data
            ranks; CPU ranks always reduce in fp32. One of: fp32, bf16.
        dropout: every dropout probability of the model (default: the model's configuration).
        tokenizer: a directory, model (the one with the model), bytes, or train (default: model if
            it has one; bytes for random weights without).
        vocab_size: vocabulary size of a tokenizer that is trained.
        text_field: field that contains the text, in JSON lines, parquet and datasets.
        data_format: record format: text, chat (messages or conversations; loss on the assistant's
            turns), completion (prompt and completion; loss on the completion), or auto (from each
            file's first record). One of: auto, text, chat, completion.
        chat_template_file: chat template instead of the tokenizer's own: a Jinja file, chatml,
            llama-3 or zephyr.
        streaming: tokenize data while it is read, without storing Hub files; of text, only what
            --steps need.
        token_window: with --streaming of text, bytes of tokens on disk at a time, as in 8GB
            (default: all).
        max_corrupt_records: unreadable records (not JSON, no such field) that are skipped, each
            reported with file and line; one more ends the run.
        packing: documents in rows: across (concatenated, attention crosses documents), documents
            (several per row, attention within each) or none (one per row) (default: across for
            text, documents for chats and completions). One of: across, documents, none.
        eval_fraction: fraction of the documents kept for evaluation; unused with --eval-data.
        eval_every: steps between evaluations on held-out text; 0: only at the end.
        eval_batches: global batches per evaluation; 0: all (default: 2, or all of --eval-data).
        lora_rank: rank of LoRA adapters, trained through peft (default: full fine-tuning).
        lora_alpha: LoRA alpha; adapters are scaled by alpha / rank (default: twice the rank).
        lora_dropout: dropout probability of the LoRA input.
        quantize_base: 4-bit type of LoRA's frozen linear layers (QLoRA). One of: nf4.
        lora_targets: linear layers that LoRA adapts, as in q_proj-v_proj (default: all but the
            output head).
        save_every: steps or time (30m, 2h) between checkpoints; one more at the end; 0: none.
        replicate_state: steps between copies of all ranks' states in memory, here and on the next
            host, from which a restart continues where no checkpoint is newer; 0: none.
        save_mode: writing of checkpoints: background (training continues; from a copy of weights
            and optimizer state in host memory), blocking (training waits), or auto (background
            where host memory suffices and the state is large). One of: auto, background, blocking.
        keep_checkpoints: number of newest checkpoints to keep.
        keep_every: also keep the checkpoint of every such number of steps, forever; 0: none.
        upload: destination of copies of checkpoints, written in the background: a folder, or a URL
            that fsspec knows (s3://BUCKET/RUN); an empty run folder is filled from it (default:
            nowhere).
        log_interval: steps between reports of loss and gradient norm; a CUDA rank synchronizes with
            its device once per interval (default: 1 on CPU, 10 on CUDA).
        replica_check_every: steps between comparisons of data-parallel replicas by checksums of
            weights and optimizer state, which also precede every checkpoint; 0: never.
        on_divergence: action when replicas differ: stop, or repair (take the majority's values; of
            two replicas, those of the last checkpoint). One of: stop, repair.
        max_skipped_steps: consecutive steps that are skipped because loss or gradient are not
            finite; one more ends the run.
        verify_every: steps between verifications, in which every data rank computes its batch and
            another's, compared bit by bit, to find a device that computes wrongly; 0: never.
        slow_rank_factor: report a rank that takes this many times the median of its peers, with its
            cause (compute, input, link) and the fraction of time it costs.
        grace_seconds: seconds between SIGTERM and SIGKILL on this system; a run that needs longer
            to save is rejected (default: not checked).
        max_restarts: consecutive restarts after a rank died or hung, without a new checkpoint
            between them; a failure that recurs at the same step ends the run at once.
        elastic: continue in the best layout for the remaining devices when some are lost, and for
            all when they are back.
        resume: continue from the run folder's latest checkpoint, in its layout or in the one given.
        timeline_step: first step whose timeline is recorded (default: the middle of the run).
        timeline_steps: number of steps to record, all shown by hocket report --format trace.
        device: device of the ranks. One of: auto, cpu, cuda.
        backend: communication backend; shm is shared memory. One of: auto, shm, gloo, nccl.
        threads: CPU threads per rank.
        bucket_mb: gradient bucket size in MB (default: 25 on CPU; on CUDA the larger of 160 and 4
            per data rank).
        compile: apply torch.compile to every block.
        attention: attention implementation. One of: sdpa, eager.
        context_parallel: attention over cp ranks: ring (keys and values rotate), ulysses (heads
            are split) or auto (ulysses where heads divide). One of: auto, ring, ulysses.
        expert_dispatch: tokens to experts (ep): direct (a row for each choice), node (one for each
            node; node:8: of 8 ranks), deepep (a library) or auto (node over several nodes).
        tracker: metrics trackers: tensorboard, wandb, mlflow, several with commas (default: none).
        trust_remote_code: run Python code that the model directory contains.
        timeout: seconds a rank may be silent before the run is aborted.
        emulate_links: links to emulate between CPU ranks, as in nvlink3, pcie4, nvlink3x2+net100g
            or pcie4@H100-SXM-80 (default: this machine's memory speed).
        memory_per_rank: limit of tensor bytes per rank, as in 1.2GB (default: none).
    """

    steps: int = 100
    epochs: float | None = None
    seed: int = 0
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_schedule: str = "cosine"
    min_lr: float = 1e-4
    warmup: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    grad_dtype: str = "fp32"
    dropout: float | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    text_field: str = "text"
    data_format: str = "auto"
    chat_template_file: str | None = None
    streaming: bool = False
    token_window: str | None = None
    max_corrupt_records: int = 0
    packing: str | None = None
    eval_fraction: float = 0.02
    eval_every: int = 50
    eval_batches: int = 2
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: str | None = None
    quantize_base: str | None = None
    save_every: int | str = "30m"
    save_mode: str = "auto"
    replicate_state: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    upload: str | None = None
    log_interval: int | None = None
    replica_check_every: int = 100
    on_divergence: str = "stop"
    max_skipped_steps: int = 3
    verify_every: int = 0
    slow_rank_factor: float = 1.3
    grace_seconds: float | None = None
    max_restarts: int = 3
    elastic: bool = False
    resume: bool = False
    timeline_step: int | None = None
    timeline_steps: int = 1
    device: str = "auto"
    backend: str = "auto"
    threads: int = 1
    bucket_mb: float | None = None
    compile: bool = False
    attention: str = "sdpa"
    context_parallel: str = "auto"
    expert_dispatch: str = "auto"
    tracker: str | None = None
    trust_remote_code: bool = False
    timeout: float = 120.0
    emulate_links: str | None = None
    memory_per_rank: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """All that a run folder holds at its start. JSON form with an exact inverse.

    Attributes:
        model: a Hugging Face directory, a run folder, a name of the catalogue, or `org/name@commit`
            of the Hub.
        config: the model's Hugging Face configuration as a dictionary (vocabulary resolved).
        weights: directory that holds safetensors weights; None: random from the seed.
        base: of a run with LoRA, the fingerprint of `weights` (`models.base_weights`).
        layout, workload, options: what the flags said, resolved.
        data, eval_data: paths, and data sets of the Hub at their commits; held out.
        command: `train`, `check`, `generate`, `demo` or `serve`.
        serving: of a server, resolved; None of any other job.
    """

    model: str
    config: dict[str, Any]
    layout: Layout
    workload: Workload = dataclasses.field(default_factory=Workload)
    options: TrainOptions = dataclasses.field(default_factory=TrainOptions)
    weights: str | None = None
    base: str | None = None
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    command: str = "train"
    serving: ServeOptions | None = None
    version: int = VERSION

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data["layout"] = str(self.layout)
        return json.dumps(data, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """The inverse of `to_json`.

        Raises:
            OptionError: a key this version does not know, or a value of another type than its own.
            ValueError, KeyError, TypeError, AttributeError: it is no RunSpec at all.
        """
        data = parse_json(text)
        data.pop(CHECKSUM, None)
        data["layout"] = Layout.stored(data["layout"])
        options = data.get("options", {})
        if isinstance(options, dict) and options.pop("tensorboard", False):
            options["tracker"] = "tensorboard"  # the only one of version 0.1
        data["workload"] = from_dict(Workload, data.get("workload", {}))
        data["options"] = from_dict(TrainOptions, data.get("options", {}))
        for name in ("data", "eval_data"):
            data[name] = tuple(data.get(name, ()))
            if not all(isinstance(path, str) for path in data[name]):
                raise OptionError(f"{name} is {data[name]!r:.60}; it must be a list of paths")
        if not isinstance(data["config"], dict):
            raise OptionError(f"config is {data['config']!r:.60}; it must be a table")
        if data.get("version", VERSION) != VERSION:
            raise OptionError(f"version is {data['version']!r:.60}; this hocket reads {VERSION}")
        if data.get("serving") is not None:
            data["serving"] = from_dict(ServeOptions, data["serving"])
        return from_dict(cls, data)


T = typing.TypeVar("T")


def from_dict(kind: type[T], values: dict[str, Any]) -> T:
    """A dataclass from a dictionary. Raises OptionError: an unknown key (with the nearest name), or
    a value that is not of its field's type."""
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = renamed.stored_options(values, names)
    for key in values:
        if key not in names:
            message, hint = unknown("key", key, names)
            raise OptionError(message, hint=hint)
    require_types(kind, values)
    return kind(**values)


def bucket_mb(given: float | None, *, cuda: bool, dp: int) -> float:
    """Size of a gradient bucket in MB: as given, else by the link that it goes over.

    An all-reduce among n ranks sends pieces of 1/n of a bucket, and NVLink and InfiniBand need MBs
    at once to be fast. On CUDA the default is Megatron-Core's (`DistributedDataParallelConfig`):
    40 million gradients in fp32, or a million for each data rank.
    """
    if given is not None:
        return given
    return 4.0 * max(40, dp) if cuda else 25.0


class RunFolder:
    """Paths of one run folder, and the rule that two runs never share one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def spec_file(self) -> Path:
        return self.path / "run.json"

    @property
    def schedule_file(self) -> Path:
        return self.path / "schedule.txt"

    @property
    def options_file(self) -> Path:  # a `--config` file that repeats the run
        return self.path / "run.toml"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline_file(self) -> Path:
        return self.path / "timeline.json"

    @property
    def later_file(self) -> Path:
        """Timelines of the recorded steps after the one of `timeline_file`."""
        return self.path / "timeline.later.json"

    @property
    def forecast_file(self) -> Path:
        return self.path / "forecast.json"

    @property
    def communication_file(self) -> Path:
        return self.path / "communication.json"

    @property
    def memory_file(self) -> Path:
        return self.path / "memory.json"

    @property
    def attention_file(self) -> Path:
        """On CUDA: the attention kernel of each kind of layer, and why it is that one."""
        return self.path / "attention.json"

    @property
    def experts_file(self) -> Path:
        """Under ep and etp: rows that each expert of each layer was given."""
        return self.path / "experts.json"

    @property
    def background_load_file(self) -> Path:
        """`cores`: cores' worth of time that other programs took while it ran."""
        old = self.path / "others.json"  # of a run of the previous release
        return old if old.exists() else self.path / "background_load.json"

    @property
    def topology_file(self) -> Path:
        return self.path / "topology.json"

    @property
    def failures_file(self) -> Path:
        """Every failure of ranks in full, in order."""
        return self.path / "failures.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def state_copies(self) -> Path:
        """In this host's memory: copies of ranks' states, of `--replicate-state`."""
        root = Path(os.environ.get("HOCKET_STATE_COPIES") or "/dev/shm") / f"hocket-{os.getuid()}"
        return root / hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def earlier(self) -> Path:  # a run folder for each layout that the run has left
        return self.path / "earlier"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    def create(self, spec: RunSpec) -> None:
        """Make the folder and write its spec.

        Raises:
            RunFolderError: the folder already holds a run, or is a file.
        """
        if self.spec_file.exists():
            raise RunFolderError(
                f"{self.path} already holds a run",
                hint=f"--resume to continue it, or --run {self.path}-2",
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file, not a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self.save(spec)

    def save(self, spec: RunSpec) -> None:
        """Write run.json, with a checksum of its own and without permission to run code."""
        options = dataclasses.replace(spec.options, trust_remote_code=False)
        body = parse_json(dataclasses.replace(spec, options=options).to_json())
        text = json.dumps({**body, CHECKSUM: json_crc32(body)}, indent=1, sort_keys=True)
        write_text(self.spec_file, text)
        if spec.command in ("train", "serve"):
            write_text(self.options_file, options_text(spec))

    def load(self, *, trust_remote_code: bool = False) -> RunSpec:
        """Read the spec and verify its checksum, if it has one.

        Args:
            trust_remote_code: the reading command's flag; what the file says of it is never used.

        Raises:
            RunFolderError: there is no run.json, it cannot be read, or it was changed.
        """
        try:
            text = read_text(self.spec_file)
            spec = RunSpec.from_json(text)
            body = parse_json(text)
        except (FileNotFoundError, NotADirectoryError):
            hint = run_names.hint_of_runs(self.path)
            raise RunFolderError(f"{self.path} holds no run", hint=hint) from None
        except (*MALFORMED, OptionError) as error:
            raise RunFolderError(f"{self.spec_file} cannot be read: {error}") from None
        crc32 = body.pop(CHECKSUM, None)
        if crc32 is not None and crc32 != json_crc32(body):
            raise RunFolderError(
                f"{self.spec_file} was changed after hocket wrote it: its checksum differs",
                hint=f'a copy of it as it was; or, if the change is yours, remove "{CHECKSUM}" '
                "from it",
            )
        options = dataclasses.replace(spec.options, trust_remote_code=trust_remote_code)
        return dataclasses.replace(spec, options=options)


def options_text(spec: RunSpec) -> str:
    """The options of a training run or a server, resolved, as a `--config` file."""
    options = dataclasses.asdict(spec.options)
    for name in ("resume", "trust_remote_code"):
        del options[name]
    if spec.serving is None:
        if spec.options.epochs is not None:
            del options["steps"]
        data = {"data": spec.data}
        if spec.eval_data:
            del options["eval_fraction"]
            data["eval_data"] = spec.eval_data
        job = {**data, **dataclasses.asdict(spec.workload), **options}
    else:
        shared = {name: options[name] for name in SERVED}
        job = {"dtype": spec.workload.dtype, **shared, **dataclasses.asdict(spec.serving)}
    head = f"# hocket {spec.command} --config {{this file}} repeats the run in a new folder\n"
    return head + toml({"model": spec.model, "layout": str(spec.layout), **job})


SERVED = ("device", "backend", "threads", "attention", "tokenizer", "timeout", "emulate_links")
"""Options that a server has in common with training."""


def target_words(targets: str | None) -> tuple[str, ...]:
    """The words of `--lora-targets`; none: every linear layer."""
    if targets is None or targets == ALL_LINEAR:
        return ()
    return tuple(word for word in re.split(r"[,\s-]+", targets) if word)
