"""ServeRequest: what a server is asked to be, checked before anything is started.

    model, layout, sizes, address, keys, tokenizer -> Server: all of it resolved

Torch-free. Whatever can be refused is refused here: a server that is going to fail should not read
its weights first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import stat
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import defaults, memory, precision
from hocket.jobs.request import JobRequest, request
from hocket.jobs.serving import context
from hocket.jobs.serving.deployment import catalogue_entry
from hocket.jobs.serving.eight_bits import require_cached, require_known
from hocket.jobs.serving.joined import joined_world
from hocket.spec import renamed
from hocket.spec.capabilities import absent
from hocket.spec.errors import LayoutError, ModelError, OptionError
from hocket.spec.expert_dispatch import check_copies
from hocket.spec.layout import Layout
from hocket.spec.precision import state_bytes
from hocket.spec.run import RunSpec, Workload
from hocket.spec.serving import BLOCK_SIZE, ServeOptions, replica_layout
from hocket.spec.synonyms import unknown_option
from hocket.spec.units import parse_bytes

if TYPE_CHECKING:
    from hocket.models.source import ModelSource
    from hocket.serving.defaults import SamplingDefaults
    from hocket.serving.http.auth import Keys
    from hocket.training.tokenizer import Tokenizer

SERVE_FIELDS = tuple(field.name for field in dataclasses.fields(ServeOptions))

SHARED = (
    "dtype", "device", "backend", "threads", "attention", "tokenizer", "trust_remote_code",
    "timeout", "emulate_links", "seed",
)  # fmt: skip
"""Options that a server has in common with the other jobs."""

NAMES = ("model", "layout", "pipeline_split", "run", "cluster", *SERVE_FIELDS, *SHARED)

UNBOUNDED = 4096
"""Tokens of a request where the model itself names no bound."""

LONGEST = 2**24
"""Most tokens of a request, however many positions a model claims: its table of blocks grows with
them."""

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}
ROWS = {"cpu": 64, "cuda": 256}
"""Defaults by device: a step as large as keeps products efficient, and answers prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedServer:
    """A server whose parts fit each other. Nothing is started yet.

    Attributes:
        request: model, layout and the shared options as they were asked for; its `auto` says that
            the layout is still to be chosen.
        source: where the model comes from. words: its tokenizer. stop: tokens that end an answer.
        layout: of all replicas together; what was asked for, its degrees legal.
        options: resolved. keys: one of them is needed; None: none is.
        device: `cpu` or `cuda`. name: what clients call the model.
        sampling: of requests that do not say.
        warnings: what is allowed, and should be known.
    """

    request: JobRequest
    source: ModelSource
    words: Tokenizer
    stop: tuple[int, ...]
    layout: Layout
    options: ServeOptions
    device: str
    name: str
    sampling: SamplingDefaults
    keys: Keys | None = None
    warnings: tuple[str, ...] = ()

    @property
    def replica(self) -> Layout:
        """One replica's layout: of dp the data ranks that hold the experts together."""
        return replica_layout(self.layout)

    def spec(self, *, replica: bool = False) -> RunSpec:
        """All of it as the run folder keeps it; or as the ranks of one replica get it."""
        workload = Workload(
            seq_len=context.whole_chunks(self.layout, self.source.dimensions),
            global_batch=self.replica.dp if replica else self.layout.dp,
            dtype=self.request.workload.dtype,
        )
        weights = self.source.weights
        assert weights is not None
        return RunSpec(
            model=self.source.repo or str((self.source.directory or weights).resolve()),
            config=self.source.config,
            layout=self.replica if replica else self.layout,
            workload=workload,
            options=dataclasses.replace(
                self.request.options, dropout=0.0, device=self.device, resume=False
            ),
            weights=str(weights.resolve()),
            command="serve",
            serving=self.options,
        )

    def words_payload(self) -> dict[str, Any]:
        """What ranks need of the tokenizer, for answers that must obey a structure."""
        where = self.source.tokenizer
        directory = None if where is None else str(Path(where).resolve())
        return {"directory": directory, "ends": list(self.stop)}


def server(
    values: Mapping[str, Any], *, emulated: bool = False, any_size: bool = False
) -> PreparedServer:
    """Read options by name, as flags and keywords have them; a value of None is absent.

    Args:
        emulated: a CPU may multiply in 8 bits, in fp32: slow, for checks.
        any_size: weights that this machine cannot hold pass.

    Raises:
        HocketError: the first thing that cannot be, with the numbers and what would do.
    """
    from hocket.models.chat_template import file_of
    from hocket.models.source import resolve_model
    from hocket.models.weight_headers import headers
    from hocket.serving.defaults import AUTO, SamplingDefaults, generation_settings

    given = renamed.present_options({k: v for k, v in values.items() if v is not None}, NAMES)
    for name in given:
        if name not in NAMES:
            raise unknown_option(name, NAMES, "serve")
    if not given.get("model"):
        raise OptionError("no model was named", hint="hocket serve RUN_OR_DIR --port 8000")
    options = _options({name: given.pop(name) for name in SERVE_FIELDS if name in given})
    wanted = defaults.with_dtype(request(given))
    precision.reject_served_dtype(wanted.workload)
    device = precision.device_kind(wanted.options)
    _threads(wanted, device)
    if device == "cpu" and not emulated and options.gpu_memory_utilization is not None:
        raise OptionError(
            f"gpu_memory_utilization is {options.gpu_memory_utilization:g}, a fraction of a GPU's "
            "memory; these ranks run on the CPU",
            hint="--cache-memory 2GB",
        )
    if not emulated:
        precision.reject_quantization(
            options.quantization, cuda=device == "cuda", dtype=wanted.workload.dtype
        )
    trusted = wanted.options.trust_remote_code
    source = resolve_model(wanted.model, trust_remote_code=trusted, weights=False)
    layout = wanted.layout if wanted.auto else legal_server_layout(source, wanted.layout, device)
    if not any_size and catalogue_entry(wanted.model) is None:
        _require_size(source, wanted, options, layout)
    source = resolve_model(source.repo or wanted.model, trust_remote_code=trusted)
    if source.weights is None:
        entry = catalogue_entry(wanted.model)
        hub = None if entry is None else entry.hub_id
        raise ModelError(
            f"{wanted.model} has no weights, and random ones would answer noise",
            hint=f"did you mean {hub!r}?"
            if hub
            else f"hocket train {wanted.model} --data DATA --run runs/mine",
        )
    require_cached(
        options.kv_cache_dtype, wanted.workload.dtype, source.config, cuda=device == "cuda"
    )
    headers(source.weights)  # that they are whole; whether they fit the model, the ranks say
    sizes = _sizes(options, source, device, layout)
    if sizes.redundant_experts and wanted.auto:
        raise OptionError(
            "--layout auto places no copies of experts (--redundant-experts)",
            hint="--layout dp2.ep2",
        )
    check_copies(sizes.redundant_experts, layout, source.dimensions.num_experts)
    words = tokenizer_of(source, wanted.options.tokenizer, wanted.options.trust_remote_code)
    keys, warnings = _keys(options)
    if options.chat_template_file is not None:
        file_of(options.chat_template_file)
    sampling = SamplingDefaults()
    if options.generation_config == AUTO:
        sampling = SamplingDefaults.of(generation_settings(source.directory))
    return PreparedServer(
        request=wanted,
        source=source,
        words=words,
        stop=stop_tokens(source, words),
        layout=layout,
        options=sizes,
        device=device,
        sampling=sampling,
        name=options.served_model_name or model_name(wanted.model),
        keys=keys,
        warnings=warnings,
    )


def model_name(model: str) -> str:
    """What clients call a model unless a name is given: its folder's name, or its id on the Hub."""
    from hocket.models import repo_id

    repo = None if Path(model).expanduser().exists() else repo_id.parse_repo(model)
    return Path(model).resolve().name if repo is None else repo.id


def legal_server_layout(source: ModelSource, layout: Layout, device: str) -> Layout:
    """The layout, if this model can be served in it on this machine.

    Raises:
        LayoutError: what does not fit, with what does.
    """
    from hocket.jobs.validate import validate_layout

    rows = absent(layout, serving=True)
    if rows:
        plain = dataclasses.replace(layout, **{row.field: row.runs[0] for row in rows})
        raise LayoutError(rows[0].reason(layout), hint=f"--layout {plain.axes_text()}")
    context.require_whole_experts(layout)
    tokens = context.whole_chunks(layout, source.dimensions)
    workload = Workload(seq_len=tokens, global_batch=layout.dp)
    found = validate_layout(source.dimensions, layout, workload)
    if isinstance(layout.pipeline_split, tuple) and 0 in layout.pipeline_split:
        layers, stages = source.dimensions.num_layers, layout.num_stages
        # The runtime trains over a stage that is empty; one that serves gets it from its cache.
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        fewer = dataclasses.replace(layout, pp=layers, pipeline_split="balanced")
        fit = f"--pipeline-split {'-'.join(map(str, even))}"
        raise LayoutError(
            f"pipeline_split {'-'.join(map(str, layout.pipeline_split))} leaves a stage without a "
            f"layer; the model has {layers} for {stages} stages, and each that serves needs one",
            hint=fit if stages <= layers else f"--layout {fewer.axes_text()}",
        )
    if device == "cuda" and joined_world() is None:
        from hocket.jobs.probe import present_machine

        devices = len(present_machine("cuda").found.devices)
        if layout.world_size > devices:
            raise LayoutError(
                f"the layout {layout.axes_text()} needs {layout.world_size} GPUs, one a rank; "
                f"this machine has {devices}",
                hint=f"--layout tp{devices}" if devices > 1 else "--layout dp1",
            )
    return dataclasses.replace(found, microbatches=None)


def _require_size(
    source: ModelSource, wanted: JobRequest, options: ServeOptions, layout: Layout
) -> None:
    """Reject weights that the ranks of a replica cannot hold. Raises LayoutError."""
    ranks = None if wanted.auto else replica_layout(layout).world_size
    free = memory.free_memory(wanted.options, ranks=ranks)
    each = 1.0 if options.quantization else state_bytes(wanted.workload.dtype).weight
    count = defaults.parameters(source.dimensions)
    halved = each == 4 and free is not None and count * 2 < free.bytes
    fix = "--dtype bf16" if halved else f"hocket plan {source.name} --serve --cluster H100"
    memory.reject_too_large(source, each, "weights", fix, free)


def tokenizer_of(source: ModelSource, choice: str | None, trust: bool) -> Tokenizer:
    """The tokenizer of a model that answers.

    Raises:
        ModelError: it has none. OptionError: a choice that makes one.
    """
    from hocket.training import tokenizer

    if choice == "train":
        raise OptionError("--tokenizer train makes one for training", hint="--tokenizer DIR")
    if choice is None and source.tokenizer is None:
        raise ModelError(
            f"{source.name} holds no tokenizer", hint="--tokenizer DIR, or --tokenizer bytes"
        )
    return tokenizer.resolve_tokenizer(choice, model_dir=source.tokenizer, trust_remote_code=trust)


def stop_tokens(source: ModelSource, words: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text: as the model's generation settings say, else the tokenizer's.

    Those outside the vocabulary, such as the -1 of some configurations, never come: none is kept.

    Raises:
        ModelError: what is said is no token id, or more of them than a request can name.
    """
    from hocket.serving.defaults import FILE, generation_settings
    from hocket.serving.request import MAX_STOP_TOKENS

    said = generation_settings(source.directory)
    where = FILE if "eos_token_id" in said else "config.json"
    found: Any = said.get("eos_token_id", source.config.get("eos_token_id"))
    if found is None:
        found = words.eos_id
    ids = [i for i in (found if isinstance(found, list) else [found]) if i is not None]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool):
            raise ModelError(
                f"eos_token_id is {found!r:.100} in the {where} of {source.name}; token ids are "
                "whole numbers",
                hint=f"what its makers wrote into {where}, or null: the tokenizer's own",
            )
    known = tuple(dict.fromkeys(i for i in ids if 0 <= i < source.dimensions.vocab_size))
    if len(known) > MAX_STOP_TOKENS:
        raise ModelError(
            f"eos_token_id names {len(known)} tokens in the {where} of {source.name}; at most "
            f"{MAX_STOP_TOKENS} end a text"
        )
    return known


# --- options -------------------------------------------------------------------------------------


def _options(given: Mapping[str, Any]) -> ServeOptions:
    from hocket.serving.defaults import AUTO, NONE

    hints = typing.get_type_hints(ServeOptions)
    for name, value in given.items():
        wanted = typing.get_args(hints[name]) or (hints[name],)
        good = isinstance(value, wanted) or (float in wanted and isinstance(value, int))
        if not good or (isinstance(value, bool) and bool not in wanted):
            raise OptionError(f"{name} is {value!r}; {hints[name]} is needed")
    options = ServeOptions(**given)
    for name, least, most in (
        ("port", 0, 65535), ("metrics_port", 0, 65535), ("max_num_batched_tokens", 1, 2**20),
        ("max_model_len", 2, LONGEST), ("max_num_seqs", 1, 65535), ("block_size", 1, 1024),
        ("num_blocks", 1, 2**31 - 1), ("max_queue", 0, 10**6), ("deadline", 0.001, 1e9),
        ("drain_seconds", 0, 1e6), ("max_restarts", 0, 10**6), ("redundant_experts", 0, 10**6),
        ("rebalance_steps", 1, 10**9), ("gpu_memory_utilization", 0.01, 1),
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            near = min(max(value, least), most) if value == value else least  # noqa: PLR0124
            raise OptionError(
                f"{name} is {value}; it must be in {least} .. {most}",
                hint=f"--{name.replace('_', '-')} {near}",
            )
    if options.generation_config not in (AUTO, NONE):
        raise OptionError(
            f"generation_config is {options.generation_config!r}; it is {AUTO} or {NONE}",
            hint=f"--generation-config {NONE}",
        )
    if options.quantization is not None:
        require_known(options.quantization)
    if options.served_model_name is not None and not options.served_model_name.strip():
        raise OptionError(
            f"served_model_name is {options.served_model_name!r}; clients need a name to ask for",
            hint="--served-model-name my-model, or none: the name of the model's folder",
        )
    if options.cache_memory is not None:
        parse_bytes(options.cache_memory)
    sizes = ("cache_memory", "num_blocks", "gpu_memory_utilization")
    if len(both := [name for name in sizes if getattr(options, name) is not None]) > 1:
        raise OptionError(f"{both[0]} and {both[1]} both set the cache size", hint="one of the two")
    if options.metrics_port == options.port != 0:
        raise OptionError(
            f"port and metrics_port are both {options.port}",
            hint=f"--metrics-port {options.port + 1}",
        )
    return options


def _threads(wanted: JobRequest, device: str) -> None:
    """Refuse more threads of a CPU rank than there are cores. Raises OptionError."""
    from hocket.runtime.host_cores import usable_cores

    threads, here = wanted.options.threads, usable_cores()
    if device == "cpu" and threads > here:
        raise OptionError(
            f"threads is {threads}; this machine has {here} core{'s' if here > 1 else ''} for "
            "them, and a rank's threads need one each",
            hint=f"--threads {here}",
        )


def _sizes(options: ServeOptions, source: ModelSource, device: str, layout: Layout) -> ServeOptions:
    """The options with every size settled. Raises OptionError for those that do not fit."""
    positions = source.dimensions.max_positions
    options = _blocks(options, device, layout)
    block_size = options.block_size or BLOCK_SIZE
    longest = options.max_model_len
    if longest is None:
        longest = min(positions or UNBOUNDED, LONGEST)
        if options.num_blocks is not None:
            longest = max(2, min(longest, options.num_blocks * block_size))
    elif positions is not None and longest > positions:
        raise OptionError(
            f"max_model_len is {longest}; {source.name} has {positions} positions",
            hint=f"--max-model-len {positions}",
        )
    if options.num_blocks is not None:
        room = options.num_blocks * block_size
        if room < longest:
            raise OptionError(
                f"{options.num_blocks} blocks of {block_size} tokens hold {room} tokens; "
                f"one request may have {longest}",
                hint=f"--num-blocks {-(-longest // block_size)}, or --max-model-len {room}",
            )
    metrics = options.metrics_port
    if metrics is None:
        metrics = options.port + 1 if 0 < options.port < 65535 else 0
    return dataclasses.replace(
        options,
        max_model_len=longest,
        max_num_batched_tokens=options.max_num_batched_tokens or BATCH_TOKENS[device],
        max_num_seqs=options.max_num_seqs or ROWS[device],
        metrics_port=metrics,
    )


def _blocks(options: ServeOptions, device: str, layout: Layout) -> ServeOptions:
    """With the block size of a CPU settled; a GPU's follows from its kernels, in the ranks.

    Raises:
        OptionError: a block size that no kernel reads, or a number of blocks of no size.
    """
    if device == "cpu":
        options = dataclasses.replace(options, block_size=options.block_size or BLOCK_SIZE)
    if options.block_size is not None:
        context.require_divided_blocks(options.block_size, layout, device)
    elif options.num_blocks is not None:
        size = 256 if layout.cp == 1 else context.GPU_BLOCK_MULTIPLE * layout.cp
        raise OptionError(
            f"num_blocks is {options.num_blocks}, of blocks whose size follows from the GPU's "
            "attention kernels",
            hint=f"--num-blocks {options.num_blocks} --block-size {size}, or --cache-memory",
        )
    return options


# --- the address and who may come -----------------------------------------------------------------


def _keys(options: ServeOptions) -> tuple[Keys | None, tuple[str, ...]]:
    """The keys, and what should be known about them.

    Raises:
        OptionError: a file that cannot be read or holds no key, or an address that others reach
            without one.
    """
    from hocket.serving.http.auth import Keys

    warnings: list[str] = []
    found: Keys | None = None
    if options.api_key_file is not None:
        path = Path(options.api_key_file).expanduser()
        found = Keys.read(path)
        readers = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        if readers:
            who = "every user" if readers & stat.S_IROTH else "its group"
            warnings.append(f"{path} can be read by {who} on this machine: chmod 600 {path}")
    if found is None and not is_loopback_host(options.host):
        if not options.insecure:
            raise OptionError(
                f"host {options.host} is reached from other machines, and no key is asked for",
                hint="--api-key-file FILE, --host 127.0.0.1, or --insecure to allow any client",
            )
        warnings.append(
            f"any client that reaches {options.host} may use this server: it has no API keys"
        )
    return found, tuple(warnings)


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches an address.

    Raises:
        OptionError: no address of that name.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"host {host!r} is not an address: {error}", hint="--host 127.0.0.1"
        ) from None
    return bool(host) and all(ipaddress.ip_address(a[4][0]).is_loopback for a in found)
