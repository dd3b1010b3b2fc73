"""What each rank of a served replica does: build its part of the model, then serve until stopped.

Rank 0 drives: it listens for the parent and for the other ranks, and holds the scheduler. Payload:

    spec       a RunSpec's JSON; its layout is one replica's, its `serving` resolved
    socket     path of the socket on which the driver awaits the parent; the folder is private
    token      32 bytes in hexadecimal: who connects must know them
    replica    number of the replica
    run        the run folder, where a measured timeline is kept; absent: none is
    depth      plans in flight; absent: chosen by the number of stages and the device
    words      {"directory", "ends"}: the tokenizer's directory (null: bytes) and the tokens that
               end a text, for answers that must obey a structure; absent: there are none
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from hocket.ranks.doors import Doors
from hocket.spec.errors import ModelError, OptionError
from hocket.spec.files import write_text
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.serving import snapshots_of
from hocket.spec.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.runtime.mesh import Mesh
    from hocket.serving.engine.channel import Channel, ChannelListener
    from hocket.serving.engine.part import StagePart
    from hocket.serving.engine.runner import StageRunner
    from hocket.serving.engine.structure import Structures
    from hocket.serving.scheduling.limits import SchedulerLimits
    from hocket.spec.serving import ServeOptions
    from hocket.training.tokenizer import Tokenizer

PRELOAD = (
    "hocket.training.build",
    "hocket.serving.engine.runner",
    "hocket.serving.engine.part",
    "hocket.serving.engine.sampler",
    "hocket.serving.engine.device_sampler",
    "hocket.serving.engine.driver",
    "hocket.serving.engine.memory",
    "hocket.serving.engine.out_of_memory",
    "hocket.serving.engine.structure",
    "hocket.serving.engine.warm_up",
    "hocket.schedules.registry",
    "hocket.training.rank",
    "hocket.models.conversion_rules",
)
"""What the fork server imports, so that no rank has to."""

SPARE_PLANS = 0
"""Plans in flight beyond one a stage: with one more, decoding rows are cut into smaller plans, each
of which reads all weights (11% fewer tokens/s of pp2 on two cores at 32 requests)."""

PLAN_TOKENS = {"cpu": 32, "cuda": 256}
"""Prompt tokens that take as long as reading the weights once. In fp32 on a core of an Intel Xeon a
plan of half of 82M parameters took 14 ms and 0.47 ms a token; an H100 reads the 2 bytes of a weight
at 3.35 TB/s and computes its 2 operations at some 800 TFLOP/s: 240."""

WINDOW = (64, 32)
"""The first replica of a run records 32 steps after its first 64, as the run's Timeline."""

PARENT_WAIT = 600.0
"""Seconds in which the parent must connect; it does so at once."""


def main(context: RankContext, payload: dict[str, Any], doors: Doors | None = None) -> None:
    """In each rank; returns when the replica has been stopped.

    `doors`: where the ranks and the parent meet; None: sockets at the payload's path.

    Raises:
        RankMemoryError: the device has no memory left, with what fills it and the flags that help.
    """
    from hocket.serving.engine.driver import Driver
    from hocket.serving.engine.follower import follow
    from hocket.serving.engine.out_of_memory import explaining
    from hocket.serving.front.frames import MAX_COMMAND, encode
    from hocket.serving.scheduling.group import SchedulerGroup
    from hocket.serving.scheduling.scheduler import Scheduler
    from hocket.training.build import join_world
    from hocket.training.rank import reading_shown

    began = time.perf_counter()
    spec = RunSpec.from_json(payload["spec"])
    options = spec.serving
    assert options is not None
    if doors is None:
        doors = Doors(payload["socket"], bytes.fromhex(payload["token"]))
    if context.rank == 0:
        # Bound before the ranks meet, so that the others find it when they have met.
        doors.listen()
    mesh = join_world(spec, context)
    channel = doors.connect(context.rank) if context.rank else None
    followers = {} if context.rank else _followers(doors.ranks, context.world_size)
    context.beat()
    with explaining(context.rank, mesh.device, options):
        with reading_shown(context):
            part, limits, said = build_part(spec, mesh, payload.get("depth"), payload.get("words"))
        depth = limits.depth
        every = _gather(context, said)
        if channel is not None:
            with mesh.recorder.in_phase("microbatch"):
                follow(channel, part)
            channel.close()  # rank 0 waits for it; a frame that a model keeps alive would hold it
            return
        assert every is not None
        found = doors.parent.accept(PARENT_WAIT, MAX_COMMAND)
        doors.parent.close()
        if found is None:
            raise OptionError("no router connected to the replica")
        parent, _ = found
        folder = RunFolder(payload["run"]) if payload.get("run") else None
        driver = Driver(
            SchedulerGroup([Scheduler(limits) for _ in range(spec.layout.dp)]),
            part,
            parent,
            followers,
            data_ranks={rank: spec.layout.coordinate(rank)["dp"] for rank in followers},
            depth=depth,
            beat=context.beat,
            on_timeline=lambda rows: keep_timeline(folder, spec, rows),
            window=WINDOW if folder is not None and not payload.get("replica") else None,
        )
        ready = {
            "event": "ready",
            "replica": payload.get("replica", 0),
            "layout": spec.layout.axes_text(),
            "cache_tokens": limits.capacity,
            **dataclasses.asdict(limits),
            "num_blocks": limits.num_blocks * spec.layout.dp,
            "memory": [one["memory"] for one in every],
            "attention": _by_stage(every, "attention", mesh),
            "graphs": [one["graphs"] for one in every],
            "seconds": time.perf_counter() - began,
        }
        context.emit(ready)
        parent.write(encode(ready))
        with mesh.recorder.in_phase("microbatch"):
            driver.run()


def _by_stage(every: list[dict[str, Any]], key: str, mesh: Mesh) -> list[dict[str, Any]]:
    """What the first rank of each stage said: its other ranks say the same."""
    ranks = mesh.layout.world_size // mesh.layout.pp
    return [
        {"stage": stage, **row} for stage, said in enumerate(every[::ranks]) for row in said[key]
    ]


def depth_of(wanted: int | None, stages: int, device: str) -> tuple[int, bool]:
    """Plans in flight, and whether decoding looks ahead: on a GPU that holds all stages the host
    plans a step while the one before it runs."""
    from hocket.serving.scheduling.limits import LOOKAHEAD_DEPTH

    ahead = device != "cpu" and stages == 1 and wanted in (None, LOOKAHEAD_DEPTH)
    if ahead:
        return LOOKAHEAD_DEPTH, True
    return wanted or stages + SPARE_PLANS * (stages > 1), False


def build_part(
    spec: RunSpec,
    mesh: Mesh,
    depth: int | None = None,
    words: dict[str, Any] | None = None,
) -> tuple[StagePart, SchedulerLimits, dict[str, Any]]:
    """This rank's part of every step, its cache allocated; the scheduler's limits; and what it
    says of itself: `memory` in bytes, `attention` kernels and `graphs`.

    Raises:
        ModelError: the cache holds less than one request may need, or the model's layers cannot
            be served from a paged cache.
    """
    from hocket.runtime.expert_parallel import balancer_of
    from hocket.schedules.registry import build_schedule
    from hocket.serving.engine import attention
    from hocket.serving.engine.cache import cache_dtype
    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.part import StagePart
    from hocket.serving.engine.runner import StageRunner
    from hocket.serving.engine.sampler import Sampler
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.serving.scheduling.limits import SchedulerLimits
    from hocket.training.build import build_model

    options = spec.serving
    assert options is not None
    longest, rows, tokens = (
        options.max_model_len,
        options.max_num_seqs,
        options.max_num_batched_tokens,
    )
    assert longest is not None
    assert rows is not None
    assert tokens is not None
    schedule = build_schedule(spec.layout, 1) if spec.layout.num_stages > 1 else None
    paged = dataclasses.replace(spec.options, attention=attention.NAME)
    spec = dataclasses.replace(spec, options=paged)
    _, skeleton, _, parallel = build_model(spec, mesh, schedule)
    (stage,) = parallel.stages
    cp = mesh.axis("cp")
    plans, lookahead = depth_of(depth, mesh.axis("pp").size, mesh.device.type)
    runner = StageRunner(
        stage,
        mesh,
        skeleton.config,
        block_size=options.block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        cache_dtype=cache_dtype(options),
        threads=spec.options.threads,
        lookahead=lookahead,
    )
    block_size = runner.block_size
    recurrent = has_states(runner)
    if recurrent and not options.no_prefix_cache:
        runner.num_snapshots = snapshots_of(rows)
    # More than twice every row at its longest would only remember very old prompts.
    most = 2 * rows * -(-longest // block_size)
    num_blocks = agreed_blocks(options, runner, most)
    if num_blocks * block_size < longest:
        room = num_blocks * block_size
        raise ModelError(
            f"the cache holds {room} tokens ({num_blocks} blocks of "
            f"{format_bytes(runner.bytes_per_block)} a rank); one request may have {longest}",
            hint=f"--max-model-len {max(room, 2)}, or more --cache-memory",
        )
    runner.allocate(num_blocks)
    config: Any = skeleton.config
    vocab_size = int(config.get_text_config(decoder=True).vocab_size)
    sampler: Sampler | DeviceSampler | None = None
    if stage.is_last and cp.index == 0:
        found = Vocabulary.of(stage, mesh)
        structures = None
        if words is not None and found.axis.index == 0:
            structures = _structures(spec, words, vocab_size)
        if mesh.device.type == "cpu":
            sampler = Sampler(
                found, vocab_size, mesh.device, mesh.recorder, rows, structures=structures
            )
        else:
            sampler = DeviceSampler(
                found, vocab_size, mesh.device, mesh.recorder, rows,
                structures=structures, last=runner.last_tokens,
            )  # fmt: skip
    part = StagePart(
        runner, sampler, mesh, hidden_size=stage.hidden_size or 0, dtype=runner.dtype, depth=plans,
        balancer=balancer_of(stage.module, options.rebalance_steps), last=runner.last_tokens,
    )  # fmt: skip
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        depth=plans,
        lookahead=lookahead,
        plan_tokens=PLAN_TOKENS[mesh.device.type],
        max_queue=options.max_queue,
        prefix_cache=not options.no_prefix_cache,
        num_snapshots=runner.num_snapshots if recurrent else None,
        vocab_size=vocab_size,
    )
    weights = sum(p.numel() * p.element_size() for p in stage.module.parameters())
    said = {
        "memory": {
            "weights": weights,
            "cache": num_blocks * runner.bytes_per_block + runner.state_bytes,
        },
        "attention": runner.attention_json(),
        "graphs": runner.graphs_json(),
    }
    return part, limits, said


def has_states(runner: StageRunner) -> bool:
    """Whether any stage of the replica has recurrent layers."""
    import torch

    from hocket.runtime.collectives import all_reduce

    found = torch.tensor(int(bool(runner.states)), device=runner.device)
    all_reduce(found, runner.mesh.axis("world"), runner.mesh.recorder, op="max")
    return bool(found)


def _structures(spec: RunSpec, words: dict[str, Any], vocab_size: int) -> Structures | None:
    """What compiles structures; None where their library is not installed."""
    from hocket.serving.engine.structure import Structures
    from hocket.training.tokenizer import resolve_tokenizer

    def load() -> Tokenizer:
        options = spec.options
        return resolve_tokenizer(
            options.tokenizer,
            model_dir=words["directory"],
            trust_remote_code=options.trust_remote_code,
        )

    try:
        return Structures(load, vocab_size, words["ends"])
    except OptionError:
        return None


def agreed_blocks(options: ServeOptions, runner: StageRunner, most: int) -> int:
    """Blocks of the cache: the fewest that any rank has room for, equal on all of them.

    Raises:
        OptionError: those that were asked for are larger than the memory that is free.
    """
    import torch

    from hocket.runtime.collectives import all_reduce
    from hocket.serving.engine.memory import affordable_cache_bytes, require_room

    mesh, each, states = runner.mesh, runner.bytes_per_block, runner.state_bytes
    if options.num_blocks is not None:
        count = options.num_blocks
    elif options.cache_memory is not None:
        room = int(parse_bytes(options.cache_memory))
        _require_states(runner, room)
        count = (room - states) // each if each else most
    else:
        share = options.gpu_memory_utilization
        room = affordable_cache_bytes(runner, mesh.world_size, share)
        _require_states(runner, room)
        count = min(most, (room - states) // each if each else most)
    if runner.device.type == "cpu":  # before any rank has taken its own: they agree below
        require_room(count * each + states, mesh.world_size)
    least = torch.tensor(min(count, 2**31 - 1), device=mesh.device)
    all_reduce(least, mesh.axis("world"), mesh.recorder, op="min")
    return int(least)


def _require_states(runner: StageRunner, room: int) -> None:
    """Raise OptionError if a cache of `room` bytes does not hold all requests' recurrent states."""
    each, rows = runner.states.bytes_per_slot, runner.max_num_seqs
    if runner.state_bytes <= room:
        return
    fit = next((n for n in range(rows, 0, -1) if (n + 1 + snapshots_of(n)) * each < room), 1)
    raise OptionError(
        f"{rows} requests at once have recurrent states of {format_bytes(each)} each, "
        f"{format_bytes(runner.state_bytes)} with {runner.num_snapshots} snapshots for the prefix "
        f"cache; the cache of a rank may take {format_bytes(room)}",
        hint=f"--max-num-seqs {fit}, or --no-prefix-cache, or more --cache-memory",
    )


def keep_timeline(
    folder: RunFolder | None, spec: RunSpec, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The Timeline of a recorded window as plain data; written to the run folder, if there is
    one, together with what was communicated in it."""
    from hocket.spec.timeline import Event, Timeline

    events = [Event(**event) for row in rows for event in row["events"]]
    timeline = Timeline.of("measured", len(rows), events)
    text = timeline.to_json()
    if folder is not None:
        communication = {
            "layout": str(spec.layout),
            "ranks": [row["collectives"] for row in rows],
        }
        write_text(folder.timeline_file, text)
        write_text(folder.communication_file, json.dumps(communication, indent=1))
    found: dict[str, Any] = json.loads(text)
    return found


def _followers(door: ChannelListener, world_size: int) -> dict[int, Channel]:
    """The channels of all other ranks, by rank. They have met this one: they are on their way."""
    found: dict[int, Channel] = {}
    while len(found) < world_size - 1:
        entered = door.accept(60.0)
        if entered is None:
            missing = sorted(set(range(1, world_size)) - set(found))
            raise ConnectionError(f"ranks {missing} did not connect to the driver")
        channel, rank = entered
        assert rank in set(range(1, world_size)) - set(found), rank
        found[rank] = channel
    door.close()
    return found


def _gather(context: RankContext, value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Every rank's value by rank, on rank 0; None on the others."""
    if context.world_size == 1:
        return [value]
    store = context.store()
    if context.rank > 0:
        store.set(f"serving/{context.rank}", json.dumps(value))
        return None
    return [value, *(json.loads(store.get(f"serving/{r}")) for r in range(1, context.world_size))]
