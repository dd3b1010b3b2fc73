"""The check of a server: the answers of a layout's own ranks compared with plain transformers.

    weights (given, or random)     ranks.serving_check.prepare_model, one process
      -> LLM: replicas, router, driver, scheduler, ranks, as `hocket serve` starts them
           each prompt alone       prefill in one piece, in chunks; decode from the paged cache
           all at once             batching
           a known prefix again    prefix reuse
           more than the cache     preemption, and prefill of what was preempted
      -> LLM, started again        restart
      -> plain transformers        ranks.serving_check.compare_answers, one process

Whatever layout the server has, the answers are compared with the same reference, so tp, pp and dp
have one comparison, and an axis that serving gains has it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, LayoutError, ModelError, OptionError, RankFailure
from hocket.spec.expert_dispatch import check_copies
from hocket.spec.layout import Layout
from hocket.spec.run import Workload
from hocket.spec.served_check import ServedCheck
from hocket.spec.serving import SPLIT_TOKENS, replica_layout

if TYPE_CHECKING:
    from hocket.jobs.serving.llm import LLM, Completion
    from hocket.launch import Launcher
    from hocket.models.source import ModelSource

Answer = dict[str, Any]
Event = dict[str, Any]

REFERENCE = "hocket.ranks.serving_check"
"""The module that the reference process runs."""

LONGEST, NEW = 48, 6
"""Tokens of the longest sequence, and of an answer."""

BLOCK = {"cpu": 4, "cuda": 16}
"""Tokens of a block of the cache; on CUDA those of one context rank."""

ROWS, CROWD, ALTERNATIVES = 8, 4, 20
"""Requests at once at most; those that together outgrow the cache; most probable tokens whose
log-probabilities are compared."""


SEEDS = 3
"""Of the weights of a proxy model, at most: others are drawn after a difference where they amplify
the rounding of fp32."""

REBALANCE = 3
"""Steps after which copies of experts are placed again, so that a check sees it many times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedSizes:
    """What the checked server is started with.

    Attributes:
        longest: tokens of the longest sequence. budget: tokens of a step, half of them, so that
            prompts up to it are computed in one piece and longer ones in chunks.
        block_size: tokens of a block. num_blocks: room for little more than one longest sequence.
    """

    longest: int = LONGEST
    block_size: int = 4

    @property
    def budget(self) -> int:
        return self.longest // 2

    @property
    def num_blocks(self) -> int:
        return -(-self.longest // self.block_size) + max(2, 16 // self.block_size)


def served_check(
    values: Mapping[str, Any], *, on_event: Callable[[Event], None] | None = None
) -> ServedCheck:
    """Compare a server with plain transformers in fp32 (`hocket check --serve`).

    Args:
        values: `model`, `layout`, and options of `hocket serve` that change what is computed:
            `backend`, `threads`, `device`, `attention`, `seed`, `trust_remote_code`,
            `quantization`, `kv_cache_dtype`, `redundant_experts`. A model without weights gets
            random ones.
        on_event: called with `{"event": "phase", "name"}`.

    Raises:
        HocketError: the model cannot be served at this layout; RankFailure with a rank's own
            traceback.
    """
    from hocket.jobs.check import reject_unchecked
    from hocket.jobs.precision import device_kind
    from hocket.jobs.proxy import require_equal
    from hocket.jobs.request import request
    from hocket.jobs.serving import request as serve_request
    from hocket.jobs.serving.eight_bits import (
        emulated_on_cpu,
        require_cached,
        require_eight_bits,
    )
    from hocket.launch import joined_context
    from hocket.models.source import resolve_model

    if joined_context() is not None:
        raise OptionError(
            "check starts its own ranks; it was started as one of another launcher's",
            hint="run it without torchrun",
        )
    few, cached = values.get("quantization"), values.get("kv_cache_dtype", "auto")
    copies = values.get("redundant_experts") or 0
    own = ("quantization", "kv_cache_dtype", "redundant_experts")
    wanted = request({name: value for name, value in values.items() if name not in own})
    if wanted.workload.dtype != "fp32":
        raise OptionError(
            f"dtype is {wanted.workload.dtype}; equality is checked in fp32", hint="--dtype fp32"
        )
    options = wanted.options
    if few is not None:
        options = emulated_on_cpu(few, options)
    device_kind(options)
    trusted = options.trust_remote_code
    source = resolve_model(wanted.model, trust_remote_code=trusted, weights=False)
    require_cached(cached, "fp32", source.config, cuda=options.device == "cuda")
    layout = serve_request.legal_server_layout(source, wanted.layout, "cpu")
    reject_unchecked(source, layout, "fp32", options, served=True)
    source = resolve_model(source.repo or wanted.model, trust_remote_code=trusted)
    check_copies(copies, layout, source.dimensions.num_experts)

    def say(name: str) -> None:
        if on_event is not None:
            on_event({"event": "phase", "name": name})

    with (
        launcher_of(options.device, options.threads) as launcher,
        tempfile.TemporaryDirectory(prefix="hocket-check-") as folder,
    ):
        say("checking that the architecture can be split")
        replica = replica_layout(layout)
        require_equal(launcher, source, replica, attention=options.attention, loss=False)
        columns = None if few is None else require_eight_bits(launcher, source, replica)
        directory, longest = source.directory, longest_of(replica)
        if source.weights is None or directory is None:
            say("random weights")
            directory = Path(folder) / "model"
            made = prepare_checked_model(
                launcher, source, directory, proxy=False, seed=options.seed
            )
            longest = min(longest, made["longest"] or longest)
        say(f"{layout.axes_text()}, {layout.world_size} ranks")
        shared = {name: getattr(options, name) for name in ("device", "backend", "threads", "seed")}
        answers = answers_of(
            launcher, directory, wanted.layout,
            checked_sizes(source, layout.cp, longest, launcher.device_kind),
            restart=True, emulated=few is not None, attention=options.attention, quantization=few,
            kv_cache_dtype=cached, redundant_experts=copies, rebalance_steps=REBALANCE,
            trust_remote_code=options.trust_remote_code, **shared,
        )  # fmt: skip
        say("plain transformers")
        (report,) = layout_reports(
            launcher, directory, {str(wanted.layout): answers}, Path(folder), generate=True,
            columns=columns, cache=cached == "fp8", trust_remote_code=options.trust_remote_code,
        ).values()  # fmt: skip
    return report


def proxy_check(launcher: Launcher, source: ModelSource, layout: Layout) -> str:
    """The quick form: why the tiny proxy model of a source's class answers differently when it is
    served at `layout`, or at the largest degrees that its sizes allow; empty where it answers as
    plain transformers does. It always runs on the CPU: what is checked is the split.

    Raises:
        HocketError: its ranks died, or the server could not start for another reason than the
            model's.
    """
    with contextlib.ExitStack() as stack:
        if launcher.device_kind != "cpu":
            launcher = stack.enter_context(launcher_of("cpu", 1))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hocket-check-"))
        try:
            for seed in range(SEEDS):
                report = _proxy_report(launcher, source, layout, Path(folder), seed)
                if report.ok or not report.amplified:
                    break
        except (ModelError, LayoutError, OptionError) as error:
            return error.message
    return report.failures[0] if report.failures else ""


def _proxy_report(
    launcher: Launcher, source: ModelSource, layout: Layout, folder: Path, seed: int
) -> ServedCheck:
    directory = folder / f"model-{seed}"
    made = prepare_checked_model(launcher, source, directory, proxy=True, seed=seed)
    fitting = _fitting(made["config"], layout)
    longest = longest_of(fitting)
    size = CheckedSizes(longest=min(longest, made["longest"] or longest))
    trust = source.trust_remote_code
    options: Any = {"device": "cpu", "trust_remote_code": trust}
    answers = answers_of(launcher, directory, fitting, size, **options)
    (report,) = layout_reports(
        launcher, directory, {str(fitting): answers}, folder, trust_remote_code=trust
    ).values()
    return report


def _fitting(config: Mapping[str, Any], layout: Layout) -> Layout:
    """The layout, with smaller degrees where the proxy model has too few layers, heads or
    experts."""
    from hocket.jobs.serving import context
    from hocket.jobs.validate import validate_layout
    from hocket.models.dimensions import dimensions

    model = dimensions(config)
    pp, cp = min(layout.pp, model.num_layers), math.gcd(layout.cp, BLOCK["cpu"])
    for tp, ep in itertools.product(_up_to(layout.tp), _up_to(layout.ep)):
        try:
            found = replica_layout(
                Layout(
                    dp=ep if layout.etp is None else layout.dp,
                    pp=pp,
                    cp=cp,
                    tp=tp,
                    ep=ep,
                    etp=layout.etp,
                )
            )
            tokens = context.whole_chunks(found, model)
            validate_layout(model, found, Workload(seq_len=tokens, global_batch=1))
        except LayoutError:
            continue
        return found
    return Layout(pp=pp)


def _up_to(degree: int) -> list[int]:
    """A degree and the usual ones below it, descending."""
    return sorted({degree, *(d for d in (8, 4, 2) if d < degree)}, reverse=True)


# --- the parts, which the matrix has in common ----------------------------------------------------


def launcher_of(device: str, threads: int) -> Launcher:
    """A launcher whose ranks serve, and whose one process is the reference."""
    from hocket.launch import Launcher
    from hocket.ranks.serving import PRELOAD

    preload = (*PRELOAD, "hocket.ranks.serving", REFERENCE, "hocket.models.proxy")
    passive = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")  # as of `hocket serve`
    return Launcher(
        device, threads, preload=(*preload, "hocket.runtime.shm"),
        environment={"OMP_WAIT_POLICY": passive},
    )  # fmt: skip


def longest_of(layout: Layout) -> int:
    """Tokens of the longest sequence: over context ranks so many that its chunks are split."""
    return LONGEST if layout.cp == 1 else max(LONGEST, 2 * SPLIT_TOKENS * layout.cp)


def checked_sizes(source: ModelSource, cp: int, longest: int, device: str) -> CheckedSizes:
    """The sizes of a checked server, whose blocks divide over `cp` context ranks.

    Raises:
        OptionError: the model has too few positions for a prompt that is computed in chunks.
    """
    positions = source.dimensions.max_positions or longest
    if positions < 2 * NEW + 2:
        raise OptionError(
            f"{source.name} has {positions} positions; the check asks for {2 * NEW + 2} tokens"
        )
    block = math.lcm(BLOCK["cpu"], cp) if device == "cpu" else BLOCK[device] * cp
    return CheckedSizes(longest=min(longest, positions), block_size=block)


def prepare_checked_model(
    launcher: Launcher,
    source: ModelSource,
    folder: Path,
    *,
    proxy: bool,
    seed: int,
    switches: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """Write a model of this configuration, or the proxy model of its class, with random weights.

    Args:
        switches: values of the configuration, used as far as the class takes them.

    Returns:
        `config`, `longest`, `parameters` and `switches` of what was written.

    Raises:
        ModelError: transformers cannot build, run or save it.
    """
    heard: list[Event] = []
    payload = {
        "folder": str(folder), "config": source.config, "proxy": proxy, "seed": seed,
        "code": None if source.code is None else str(source.code),
        "switches": dict(switches or {}),
    }  # fmt: skip
    launcher.run(f"{REFERENCE}:prepare_model", 1, payload, heard.append, startup_timeout=600.0)
    (made,) = (event for event in heard if event["event"] == "prepared")
    if "rejected" in made:
        raise ModelError(made["rejected"])
    if "crashed" in made:
        raise RankFailure(made["crashed"])
    return made


def answers_of(
    launcher: Launcher,
    directory: Path,
    layout: Layout | str,
    size: CheckedSizes,
    *,
    restart: bool = False,
    emulated: bool = False,
    **options: Any,
) -> list[Answer]:
    """The answers of a server of these sizes, and of its first prompts once it was started again.

    `emulated`: what a GPU multiplies in 8 bits is multiplied so on a CPU.

    Raises:
        HocketError: the server cannot be started, with what its ranks said.
    """
    from hocket.jobs.serving import request as serve_request
    from hocket.jobs.serving.llm import LLM

    server = serve_request.server(
        {
            "model": str(directory), "layout": layout, "tokenizer": "bytes", "timeout": 120.0,
            "max_model_len": size.longest, "max_num_batched_tokens": size.budget, "max_num_seqs":
            ROWS, "block_size": size.block_size, "num_blocks": size.num_blocks, **options,
        },
        emulated=emulated,
    )  # fmt: skip
    with LLM.of(server, launcher, proxy_check=False) as llm:
        found = _answers(llm, size)
    if restart:
        with LLM.of(server, launcher, proxy_check=False) as llm:
            alone = _prompts(llm.vocab_size, size)["alone"]
            found += _asked(llm, "restart", alone, size)
    return found


def layout_reports(
    launcher: Launcher,
    directory: Path,
    answers: Mapping[str, Sequence[Answer]],
    folder: Path,
    *,
    generate: bool = False,
    columns: Mapping[str, Any] | None = None,
    cache: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, ServedCheck]:
    """The report of each layout, from its answers and one run of plain transformers.

    `columns`: of the weights in 8 bits (`ranks.eight_bits`). `cache`: whether that is in 8 bits.

    Raises:
        ModelError: plain transformers fails on the model.
    """
    file = folder / "answers.json"
    file.write_text(json.dumps(answers))
    heard: list[Event] = []
    payload = {
        "folder": str(directory), "answers": str(file), "generate": generate,
        "columns": columns, "cache": cache, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    launcher.run(
        f"{REFERENCE}:compare_answers", 1, payload, heard.append,
        startup_timeout=1800.0, silence_timeout=1800.0,
    )  # fmt: skip
    reports: dict[str, ServedCheck] = {}
    for event in heard:
        if event["event"] == "compared":
            if "crashed" in event:
                raise ModelError(f"plain transformers fails on the model: {event['crashed']}")
            reports[event["layout"]] = ServedCheck.from_json(event["report"])
    return reports


# --- what is asked of the server ------------------------------------------------------------------


def _prompts(vocab_size: int, size: CheckedSizes) -> dict[str, list[list[int]]]:
    """Random prompts of each phase."""
    drawn = random.Random(5)
    budget, most = size.budget, size.longest - NEW

    def prompt(length: int) -> list[int]:
        return [drawn.randrange(min(3, vocab_size - 1), vocab_size) for _ in range(length)]

    lengths = (min(max(1, length), most) for length in (3, budget - 5, most - 3, 1, budget // 2))
    alone = [prompt(length) for length in (1, 7, min(budget, most), most)]
    batch = [prompt(length) for length in lengths]
    known = alone[2]
    return {
        "alone": alone,
        "batching": batch,
        "prefix reuse": [known, known, *(known[: 2 * len(known) // 3] + prompt(3) for _ in "ab")],
        "preemption": [prompt(budget // 2 + row) for row in range(CROWD)],
    }


def _answers(llm: LLM, size: CheckedSizes) -> list[Answer]:
    asked = _prompts(llm.vocab_size, size)
    found = [
        answer
        for one in asked["alone"]
        for answer in _asked(llm, "alone", [one], size, prompt_logprobs=True)
    ]
    found += _asked(llm, "batching", asked["batching"], size, prompt_logprobs=True)
    # Those of a prompt are computed again whatever the cache holds: here none are asked for.
    again = [a for one in asked["prefix reuse"] for a in _asked(llm, "prefix reuse", [one], size)]
    if not any(answer["cached"] for answer in again):
        again[0]["failure"] = "no token of a known prompt came from the prefix cache"
    found += again
    new = size.longest // 4
    # Of several replicas, and data ranks of one, each gets as many requests as one would.
    caches = sum(one["blocks_total"] for one in llm.statistics()) // size.num_blocks
    crowd = asked["preemption"] * caches
    squeezed = _asked(llm, "preemption", crowd, size, new=new)
    counts = llm.statistics()
    if not any(one["preempted"] for one in counts):
        squeezed[0]["failure"] = f"{len(crowd)} requests did not fill the cache: none was preempted"
    idle = [number for number, one in enumerate(counts) if not one["finished"]]
    if idle:
        squeezed[0]["failure"] = f"replica {idle[0]} answered no request"
    return found + squeezed


def _asked(
    llm: LLM,
    phase: str,
    prompts: Sequence[Sequence[int]],
    size: CheckedSizes,
    *,
    prompt_logprobs: bool = False,
    new: int = NEW,
) -> list[Answer]:
    from hocket.serving.request import SamplingParams

    num_logprobs = min(ALTERNATIVES, llm.vocab_size)
    sampling = SamplingParams(
        max_new_tokens=new, ignore_eos=True, logprobs=num_logprobs,
        prompt_logprobs=num_logprobs if prompt_logprobs else None,
    )  # fmt: skip
    made = llm.generate(prompts, sampling, progress=False)
    return [_answer(phase, one, size, new, prompt_logprobs) for one in made]


def _answer(
    phase: str, made: Completion, size: CheckedSizes, wanted: int, prompt_logprobs: bool
) -> Answer:
    return {
        "phase": phase,
        "prompt": list(made.prompt_tokens),
        "tokens": list(made.tokens),
        "wanted": wanted,
        "chunked": len(made.prompt_tokens) > size.budget,
        "cached": made.cached,
        "logprobs": [one.to_json() for one in made.logprobs],
        "prompt_logprobs": [one.to_json() for one in made.prompt_logprobs]
        if prompt_logprobs
        else None,
        "failure": "",
    }


def reason_of(error: HocketError) -> str:
    """The first paragraph of an error, on one line: the rest is a traceback."""
    return " ".join(error.message.split("\n\n")[0].split())[:400]
