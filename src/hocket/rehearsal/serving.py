"""One rank's part of a served replica, executed by the engine's own code on fake CUDA tensors.

    ServingRehearsal   what all ranks share: the model without memory, its plan
    .rank(r)           runner, cache, graphs and sampler of rank r, then three steps:

    prefill            chunks of several prompts
    mixed              decoding rows and one more prompt
    decode             one token of each row, as a captured graph would replay it, and eagerly
    uneven             with experts over data ranks: only the first has rows, which it decodes

Requests sample in every way: the largest logit, draws with each cut, penalties, biases,
log-probabilities. What differs from a server: parameters get no values, kernels are chosen by the
table without a trial, and results are not read (that is one wait of each sampled step).
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from hocket.models.plan_cache import built_plan
from hocket.models.skeleton import build_skeleton
from hocket.models.source import run_source
from hocket.rehearsal.device import NUM_DEVICES
from hocket.rehearsal.execution import Actions, Execution, allocate, executing
from hocket.rehearsal.launches import Launches
from hocket.rehearsal.process_group import RehearsedWorld
from hocket.runtime.fp8_weights import store_in_fp8
from hocket.runtime.mesh import Mesh
from hocket.runtime.parallelize import parallelize
from hocket.schedules.registry import build_schedule
from hocket.serving.engine import attention
from hocket.serving.engine.attention_kernels import Accelerator, Choice, choose_kernels
from hocket.serving.engine.cache import cache_dtype
from hocket.serving.engine.device_sampler import DeviceSampler
from hocket.serving.engine.memory import CUDA_SHARE
from hocket.serving.engine.part import StagePart
from hocket.serving.engine.runner import StageRunner
from hocket.serving.engine.staging import Readback
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.engine.warm_up import warm_up
from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import LAST, UNKNOWN, BatchRow, StepPlan
from hocket.spec.errors import HocketError
from hocket.spec.rehearsal import RankRehearsal, RehearsedDevice
from hocket.spec.run import RunSpec
from hocket.training.build import dtype_of, group_experts

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "logit_bias": ((1, 2.0),)},
    {"min_new_tokens": 8, "max_new_tokens": 16, "stop": (0,), "temperature": 1.0},
)
"""What the requests of a rehearsal ask for, one after the other."""

UNEVEN = "uneven"
"""The step that only the first data rank has rows in."""
_MOST_ROWS = 8
"""Rows of a rehearsed step."""
_PROMPT = 24
"""Tokens of each prompt on a context rank, where steps have room for them."""


class ServingRehearsal:
    """A served replica, to be executed rank by rank in this process.

    Args:
        spec: of one replica, its `serving` with every size but the block's.
        device: the GPU that ranks run on.

    Raises:
        HocketError: the model cannot be built.
    """

    def __init__(self, spec: RunSpec, device: RehearsedDevice) -> None:
        self.spec, self.device = spec, device
        self.accelerator = Accelerator(device.capability, frozenset({"triton"}))
        source = run_source(spec)
        self.skeleton = build_skeleton(
            source.config,
            attention=attention.NAME,
            dtype=dtype_of(spec.workload.dtype),
            dropout=0.0,
            code=source.code,
            router_loss=False,
        )
        group_experts()
        self.plan = built_plan(self.skeleton)
        layout = spec.layout
        self.schedule = build_schedule(layout, 1) if layout.num_stages > 1 else None

    def rank(self, rank: int) -> dict[str, Any]:
        """Execute the steps of one rank: `rank`, a `RankRehearsal` whose launches and reads are
        those of the eager decode step and whose operations are those of all steps; `serving`:
        `steps`, `graphs`, `attention`, `memory`. An error of the engine is in `rank`."""
        begin = time.perf_counter()
        found = RankRehearsal(rank=rank)
        said: dict[str, Any] = {}
        with executing(self.device, rank, self.spec.layout.world_size) as execution:
            try:
                said = self._execute(found, execution)
            except HocketError:
                raise
            except Exception:
                found.error = traceback.format_exc()
                found.host_reads = _reads(execution.launches)
        found.seconds = time.perf_counter() - begin
        return {"rank": found.to_json(), "serving": said}

    def _chosen(self, kinds: Any, block_size: int | None) -> Choice:
        return choose_kernels(kinds, self.accelerator, block_size, ranks=self.spec.layout.cp)

    def _execute(self, found: RankRehearsal, execution: Execution) -> dict[str, Any]:
        world, memory, launches = execution.world, execution.memory, execution.launches
        rank = found.rank
        spec, options = self.spec, self.spec.serving
        assert options is not None
        assert options.max_num_seqs is not None
        assert options.max_num_batched_tokens is not None
        assert options.max_model_len is not None
        device = torch.device("cuda", rank % NUM_DEVICES)
        recorder = Actions(rank, device)
        mesh = Mesh(spec.layout, rank, device, recorder)
        parallel = parallelize(
            self.skeleton, spec.layout, self.plan, mesh=mesh, schedule=self.schedule,
            redundant_experts=options.redundant_experts,
        )  # fmt: skip
        (stage,) = parallel.stages
        stages = mesh.axis("pp").size
        lookahead = stages == 1
        capture = _Capture(launches, world)
        with execution.fake(), torch.inference_mode():
            allocate(stage.module, device)
            if options.quantization is not None:
                store_in_fp8(parallel)
            memory.own("parameters", stage.module.parameters())
            runner = StageRunner(
                stage, mesh, self.skeleton.config, block_size=options.block_size,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_model_len=options.max_model_len, lookahead=lookahead, chooser=self._chosen,
                graphs=capture, cache_dtype=cache_dtype(options),
            )  # fmt: skip
            memory.own("parameters", stage.module.parameters())
            warm_up(mesh)
            weights = memory.now()[0]
            memory.restart_peak()
            launches.counting = True
            runner.step_bytes()
            launches.counting = False
            # (What it brings to the device comes from no plan, and waits as no step does.)
            waits = [r["count"] for r in launches.reads() if "expert_parallel" in r["where"]]
            step_bytes = memory.peak - weights
            total, share = self.device.memory, options.gpu_memory_utilization
            allowed = (total - weights) * CUDA_SHARE if share is None else total * share - weights
            room = int(allowed) - step_bytes
            each = runner.bytes_per_block
            longest = -(-options.max_model_len // runner.block_size)
            most = 2 * options.max_num_seqs * longest
            fitting = max(0, room // each) if each else most  # recurrent layers alone keep no keys
            num_blocks = max(longest, min(options.num_blocks or fitting, most))
            # The graph of most rows: smaller ones hold the same kernels.
            graphs = runner.capture(num_blocks, (options.max_num_seqs,))
            assert runner.cache is not None
            memory.own("other", [*runner.cache.keys, *runner.cache.values])
            sampler = None
            if stage.is_last and mesh.axis("cp").index == 0:
                config: Any = self.skeleton.config
                vocab_size = int(config.get_text_config(decoder=True).vocab_size)
                sampler = DeviceSampler(
                    Vocabulary.of(stage, mesh), vocab_size, device, recorder, options.max_num_seqs,
                    last=runner.last_tokens,
                )  # fmt: skip
            part = StagePart(
                runner, sampler, mesh, hidden_size=stage.hidden_size or 0, dtype=runner.dtype,
                depth=2 if lookahead else stages, last=runner.last_tokens,
            )  # fmt: skip
            steps: dict[str, Any] = {}
            execution.begin(recorder)
            execution.end()
            for name, plan in self._plans(runner, lookahead, mesh.axis("dp").index):
                begun = len(world.trace.ops)
                launches.kernels.clear()
                launches.host_reads.clear()
                memory.restart_peak()
                launches.counting = True
                if name == "decode eager":
                    runner.graphs = None
                part.expect(plan)
                part.run(plan)
                launches.counting = False
                steps[name] = {
                    "tokens": len(plan.tokens),
                    "rows": len(plan.rows),
                    "launches": sum(launches.kernels.values()),
                    "host_reads": _reads(launches),
                    "collectives": [begun, len(world.trace.ops)],
                    "peak_bytes": memory.peak,
                    "result_reads": int(part.uncollected > 0),
                }
                part._launched.clear()
                if sampler is not None:  # as if the result had been read
                    sampler.readback = Readback(device)
            execution.into(found, mesh, recorder)
            found.host_reads = _reads(launches)
        return {
            "stage": mesh.axis("pp").index,
            "steps": steps,
            "attention": runner.attention_json(),
            "largest": {"tokens": options.max_num_batched_tokens, "host_reads": sum(waits)},
            "graphs": {
                "sizes": graphs.sizes if graphs.captured else [],
                "reason": capture.reason or graphs.reason,
                "launches": capture.kernels,
                "collectives": capture.collectives,
            },
            "memory": {
                "weights": weights,
                "step": step_bytes,
                "cache": num_blocks * runner.bytes_per_block,
                "cache_tokens": num_blocks * runner.block_size,
                "block_size": runner.block_size,
            },
        }  # fmt: skip

    def _plans(
        self, runner: StageRunner, lookahead: bool, data_rank: int
    ) -> Iterator[tuple[str, StepPlan]]:
        """Prompts, then decoding with one more prompt, then decoding twice, and once more on the
        first data rank alone."""
        size = runner.block_size
        prompt = _PROMPT * runner.context.size  # so that context ranks split a step of one more
        count = min(
            runner.max_num_seqs, max(1, runner.max_num_batched_tokens // prompt), _MOST_ROWS
        )
        length = min(prompt, runner.max_num_batched_tokens, runner.max_model_len - 8)
        blocks = iter(range(1 << 30))
        held: dict[int, int] = {}

        def new(slot: int, end: int) -> list[int]:
            more = -(-end // size) - held.get(slot, 0)
            held[slot] = held.get(slot, 0) + more
            return [next(blocks) for _ in range(more)]

        def admitted(slot: int) -> Admission:
            given = {"max_new_tokens": 64, "seed": slot, **SAMPLINGS[slot % len(SAMPLINGS)]}
            return Admission(
                slot=slot, sampling=SamplingParams(**given), prompt_length=length, prompt=(3, 4, 5)
            )

        def decode(slots: range, start: int) -> list[BatchRow]:
            return [BatchRow(slot, start, 1, LAST, new(slot, start + 1)) for slot in slots]

        unknown = UNKNOWN if lookahead else 5
        first = range(count - 1) if count > 1 else range(1)
        yield (
            "prefill",
            StepPlan(
                0,
                [BatchRow(slot, 0, length, LAST, new(slot, length)) for slot in first],
                [5] * (length * len(first)),
                [admitted(slot) for slot in first],
            ),
        )
        rows = decode(first, length)
        tokens, late = [unknown] * len(first), []
        if count > 1 and runner.max_num_batched_tokens > len(rows):
            chunk = min(length, runner.max_num_batched_tokens - len(rows))
            rows.append(BatchRow(count - 1, 0, chunk, LAST, new(count - 1, chunk)))
            tokens += [5] * chunk
            late = [admitted(count - 1)]
        yield "mixed", StepPlan(1, rows, tokens, late)
        for number, name in ((2, "decode"), (3, "decode eager")):
            rows = decode(first, length + number - 1)
            yield name, StepPlan(number, rows, [unknown] * len(rows))
        if self.spec.layout.dp > 1:
            rows = decode(first, length + 3) if data_rank == 0 else []
            yield UNEVEN, StepPlan(4, rows, [unknown] * len(rows) or [0], widest=len(first))


def _reads(launches: Launches) -> list[dict[str, Any]]:
    """Where the host waits; without the event of a copy of two steps before, which is over."""
    return [
        {"what": what, "where": place, "count": count}
        for (what, place), count in launches.host_reads.items()
        if not (what == "Event.synchronize" and "engine/staging.py" in place)
    ]


class _Replay:
    def replay(self) -> None:
        return None


class _Capture:
    """Stands for `graphs.CudaDevice`: a capture in which something reads the device fails.

    Attributes:
        captured: how many graphs. kernels, collectives: that the one of most rows holds.
        reason: what reads the device.
    """

    def __init__(self, launches: Launches, world: RehearsedWorld) -> None:
        self.launches, self.world = launches, world
        self.captured = self.kernels = self.collectives = 0
        self.reason = ""

    def begin(self) -> Any:
        return None

    @contextlib.contextmanager
    def warm(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def capture(self, pool: Any) -> Iterator[Any]:
        launches = self.launches
        launches.kernels.clear()
        launches.host_reads.clear()
        begun = len(self.world.trace.ops)
        launches.counting = True
        try:
            yield _Replay()
        finally:
            launches.counting = False
        reads = _reads(launches)
        if reads:
            self.reason = f"{reads[0]['what']} at {reads[0]['where']}"
            raise RuntimeError(f"the step reads the device: {self.reason}")
        if not self.captured:
            self.kernels = sum(launches.kernels.values())
            self.collectives = len(self.world.trace.ops) - begun
        self.captured += 1

    def failed(self) -> None:
        return None


_kept: dict[str, ServingRehearsal] = {}


def rehearse_server_rank(spec: str, device: dict[str, Any], rank: int) -> dict[str, Any]:
    """A worker's task: execute one rank of a replica (`ServingRehearsal.rank`)."""
    key = repr((spec, device))
    if key not in _kept:
        _kept.clear()
        _kept[key] = ServingRehearsal(RunSpec.from_json(spec), RehearsedDevice.from_json(device))
    return _kept[key].rank(rank)
