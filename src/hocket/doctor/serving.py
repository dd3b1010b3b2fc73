"""Kernel checks of serving: paged attention, decode in CUDA graphs, sampling on the device.

A runner computes sequences in random chunks over scattered blocks; its logits are compared with
those of the plain model, which computes each sequence at once.

Not executed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, row_of
from hocket.doctor.families import FAMILIES, whole_model
from hocket.doctor.place import Place, float_dtype

if TYPE_CHECKING:
    from torch import Tensor

_SERVED = "hocket.doctor.fake:fake_server"
LIMIT = 1e-4
"""Largest difference of logits in fp32, relative to the largest logit."""

ROUNDINGS = 3.0
"""How often the error of the plain model in bf16 (against fp32) that of paged attention may be."""

PAGED = ("llama", "mistral", "gemma3", "gpt2", "mixtral")
PAGED_BF16 = ("llama", "mistral", "gemma3", "gpt2", "qwen3")
"""Without a mixture of experts, whose routing changes with a rounding."""


_row = row_of(
    "hocket.doctor.serving", prefix="kernel-", group="kernels", seconds=1.5, timeout=90.0,
)  # fmt: skip


CHECKS = (
    *(
        _row(
            f"paged-{family}-{dtype}",
            f"prefill in chunks and decode of a tiny {family} over blocks of {block} tokens",
            "paged", f"logits within {LIMIT:g} of the largest" if dtype == "fp32" else
            f"at most {ROUNDINGS:g} times the error that the plain model makes in bf16",
            capability=(8, 0) if dtype == "bf16" else (7, 0),
            arguments={"family": family, "dtype": dtype, "block_size": block},
        )
        for dtype, block, families in (("fp32", 16, PAGED), ("bf16", 256, PAGED_BF16))
        for family in families
    ),
    _row(
        "paged-choice", "the kernel, block size and CUDA graphs that serving chooses for a bf16 "
        "Llama", "kernel_choice",
        "a flash-attention kernel is chosen, and decode steps are captured",
        capability=(8, 0), arguments={"kernels": ["fa2", "fa3", "fa4"]}, rehearsals=(FAKE,),
        fake=_SERVED, slow=True,
    ),
    _row(
        "paged-block-16", "the same with blocks of 16 tokens", "kernel_choice",
        "a kernel is chosen, and "
        "decode steps are captured", capability=(8, 0), arguments={"block_size": 16},
        rehearsals=(FAKE,), fake=_SERVED, slow=True,
    ),
    _row(
        "graphs-equal", "decode steps replayed from CUDA graphs, compared with eager ones",
        "compare_graphs", "logits are equal bit for bit", capability=(8, 0), rehearsals=(FAKE,),
        fake=_SERVED, slow=True,
    ),
    _row(
        "largest-step", "the memory of the largest step, as measured to size the cache",
        "largest_step", "above the step's activations and below the free memory",
        rehearsals=(FAKE,), fake=_SERVED, slow=True,
    ),
    _row(
        "paged-triton", "Triton paged attention: prefill, decode and mixed batches, sliding "
        "windows, soft caps, sinks, head sizes 8 to 256, all in bf16 and those with prompts in "
        "fp32 too; compared with explicit softmax in fp64", "triton_paged",
        "within 3e-2 (bf16), 4e-3 (fp16) and 2e-5 (fp32) of the largest entry",
        packages=("triton",), seconds=26.0, timeout=240.0, capability=(8, 0), rehearsals=(),
        unrehearsed="Triton's kernels run on a GPU; tests execute them in Triton's interpreter",
    ),
    _row(
        "paged-triton-fp8", "the same over a cache in 8 bits (--kv-cache-dtype fp8)",
        "triton_paged", "within 3e-2 (bf16) of the largest entry",
        packages=("triton",), seconds=0.5, timeout=120.0, capability=(8, 9), rehearsals=(),
        arguments={"converted": True},
        unrehearsed="Triton's kernels run on a GPU; tests execute them in Triton's interpreter",
    ),
    _row(
        "fp8-weights", "a weight in 8 bits, as a server stores it: inputs quantized by one kernel, "
        "compared with PyTorch's operations, and the matmul with one in fp64",
        "compare_fp8_weights",
        "inputs equal bit for bit; differences of at most 2e-2 of the largest entry",
        capability=(8, 9), rehearsals=(CPU, FAKE), seconds=1.0,
    ),
    _row(
        "fp8-experts", "stacked experts in 8 bits: the grouped matmul that this GPU has for them, "
        "compared with a loop over experts in fp64", "compare_fp8_experts",
        "differences of at most 2e-2 of the largest entry",
        capability=(8, 9), rehearsals=(CPU, FAKE), seconds=0.5,
    ),
    _row(
        "lookahead", "eight requests of a tiny Llama, sampled in several ways, with and without "
        "the next step launched before the tokens of this one are read", "lookahead",
        "the same tokens; at most one read of the device a step", seconds=4.0,
    ),
)  # fmt: skip


def runner_of(
    place: Place, module: Any, *, block_size: int | None, dtype: Any, rows: int = 5,
    tokens: int = 128, max_len: int = 512, num_blocks: int = 64, lookahead: bool = False,
) -> Any:  # fmt: skip
    """A runner of a whole model on the place's device, with its cache."""
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.pipeline.stage import Stage
    from hocket.serving.engine.runner import StageRunner

    runner = StageRunner(
        Stage(module.to(place.device, dtype)), Mesh.single(place.device), module.config,
        block_size=block_size, max_num_seqs=rows, max_num_batched_tokens=tokens,
        max_model_len=max_len,
        lookahead=lookahead,
    )  # fmt: skip
    runner.allocate(num_blocks)
    return runner


def both(family: str, spread: float = 0.6) -> tuple[Any, Any]:
    """The plain model and the same for serving, with equal weights, on the CPU."""
    from hocket.models import skeleton
    from hocket.serving.engine import attention

    plain = whole_model(family, spread)
    served: Any = skeleton.build_skeleton(
        FAMILIES[family], device="cpu", dropout=0.0, attention=attention.NAME
    )
    served.load_state_dict(plain.state_dict())
    own = dict(served.named_buffers())
    for name, buffer in plain.named_buffers():
        own[name].copy_(buffer)
    return plain, served


def compare_fp8_weights(place: Place) -> CheckOutcome:
    """Rows of a batch that decodes and of a long prompt, times a weight of one scale an output."""
    import torch

    from hocket.runtime.fp8_weights import Fp8Product
    from hocket.runtime.triton.quantize_rows import quantize_rows, quantized_by_torch

    outer, inner = place.size((4096, 2048), (32, 64))
    weight, scale = quantize_rows(place.draw(outer, inner, dtype=torch.bfloat16, seed=2))
    multiply = Fp8Product(scale.t())
    for rows in (1, 7, place.size(2048, 16)):
        x = place.draw(rows, inner, dtype=torch.bfloat16, seed=rows)
        (few, own), (expected, other) = quantize_rows(x), quantized_by_torch(x)
        place.equal(f"{rows} rows, scales", bool((own == other).all()), True)
        place.equal(f"{rows} rows, bits", bool((few.float() == expected.float()).all()), True)
        exact = (few.double() * own) @ (weight.double() * scale).t()
        place.compare(f"{rows} rows", multiply(x, weight.t()), exact, 2e-2)
    return place.outcome()


def compare_fp8_experts(place: Place) -> CheckOutcome:
    """Rows of a batch that decodes, most experts without one, and of a long prompt."""
    import torch

    from hocket.runtime.fp8_experts import StackedWeight
    from hocket.runtime.triton.quantize_rows import quantize_rows, quantized_by_torch

    experts, outer, inner = place.size((8, 1536, 2048), (4, 32, 64))
    drawn = place.draw(experts * outer, inner, dtype=torch.bfloat16, seed=2)
    few, scale = quantize_rows(drawn)
    weight, scale = few.view(experts, outer, inner), scale.view(experts, outer)
    stack = StackedWeight(weight.transpose(1, 2), scale)
    for most in (1, place.size(512, 9)):
        sizes = [most, 0, 3 * most, 1, *([0] * (experts - 4))]
        ends = torch.tensor(sizes, device=place.device).cumsum(0).int()
        x = place.draw(sum(sizes), inner, dtype=torch.bfloat16, seed=most)
        own, of_rows = quantized_by_torch(x)
        parts = torch.split(own.double() * of_rows, sizes)  # type: ignore[no-untyped-call]
        exact = (weight.double() * scale[..., None]).transpose(1, 2)
        expected = torch.cat([part @ exact[i] for i, part in enumerate(parts)])
        place.compare(f"{len(x)} rows", stack.grouped_product(x, ends), expected, 2e-2)
    return place.outcome()


def paged(place: Place, *, family: str, dtype: str, block_size: int) -> CheckOutcome:
    """Sequences in chunks, some of them one after the other, against a plain forward."""
    import torch

    from hocket.doctor.paged import ToyScheduler, compare_pages

    torch.set_float32_matmul_precision("highest")
    kind = float_dtype(dtype)
    # Of weights spread wide, logits in bf16 are hardly more than rounding.
    plain, served = both(family, 0.6 if dtype == "fp32" else 0.1)
    generator = torch.Generator().manual_seed(3)
    sequences = [
        torch.randint(3, 64, (length,), generator=generator).tolist()
        for length in (60, 33, 1, 90, 12)
    ]

    @torch.no_grad()
    def logits_of(model: Any) -> list[Tensor]:
        device = next(model.parameters()).device
        return [model(torch.tensor([t], device=device)).logits[0].float() for t in sequences]

    rounded = plain.to(kind)
    exact = [e.to(place.device) for e in logits_of(rounded.float())]
    largest = max(float(e.abs().max()) for e in exact)
    limit = LIMIT * largest
    if dtype == "bf16":
        own = logits_of(rounded.to(place.device, kind))
        error = max(float((a - b).abs().max()) for a, b in zip(own, exact, strict=True))
        place.values["plain_relative_error"] = error / largest
        limit = ROUNDINGS * error
    runner = runner_of(place, served, block_size=block_size, dtype=kind)
    scheduler = ToyScheduler(
        sequences, block_size=block_size, num_blocks=64, chunks=(1, 1, 1, 20), every_logit=True
    )
    worst = compare_pages(scheduler, runner.run, exact, {0, 1, 3})
    worst = max(worst, compare_pages(scheduler, runner.run, exact))
    place.values["kernel"] = kernels_of(runner)
    place.values["logits_relative_error"] = worst / largest if worst < float("inf") else "infinite"
    if not worst <= limit:
        place.failures.append(f"logits differ by {worst:.2g}, more than {limit:.2g}")
    return place.outcome()


def kernels_of(runner: Any) -> str:
    """Names of the kernels that attend, for messages."""
    return ", ".join(dict.fromkeys(str(row["kernel"]) for row in runner.attention_json()))


def kernel_choice(
    place: Place, *, block_size: int | None = None, kernels: list[str] | None = None
) -> CheckOutcome:
    """The paged kernel and the graphs of a Llama in bf16."""
    import torch

    _, served = both("llama")
    runner = runner_of(place, served, block_size=block_size, dtype=torch.bfloat16)
    found = kernels_of(runner)
    graphs = runner.graphs_json()
    place.values |= {
        "kernel": found, "block_size": runner.block_size, "graphs": len(graphs["sizes"]),
    }  # fmt: skip
    if kernels is not None and found not in kernels:
        place.failures.append(f"{found} attends: {runner.attention_json()}")
    if graphs["reason"] or not graphs["sizes"]:
        place.failures.append(f"decode steps are not captured: {graphs['reason']}")
    return place.outcome()


def compare_graphs(place: Place) -> CheckOutcome:
    """The same decode steps, replayed and eager."""
    import torch

    from hocket.doctor.paged import ToyScheduler

    results = []
    for eager in (True, False):
        _, served = both("llama")
        runner = runner_of(place, served, block_size=None, dtype=torch.bfloat16)
        if not runner.graphs_json()["sizes"]:
            raise Cannot(f"decode steps are not captured: {runner.graphs_json()['reason']}")
        if eager:
            runner.graphs = None
        scheduler = ToyScheduler(
            [[5, 9, 33, 12], [11, 4, 50], [1, 2]], block_size=runner.block_size, num_blocks=16,
            chunks=(1,),
        )  # fmt: skip
        logits = []
        while (plan := scheduler.plan()) is not None:
            logits.append(runner.run(plan).clone())
        results.append(torch.cat(logits))
    place.equal("replayed and eager logits are equal", torch.equal(*results), True)
    place.compare("logits", results[1], results[0], 1e-6)
    return place.outcome()


def largest_step(place: Place) -> CheckOutcome:
    """Bytes of the largest step, and the cache that is left."""
    import torch

    from hocket.serving.engine.memory import affordable_cache_bytes

    _, served = both("llama")
    runner = runner_of(place, served, block_size=None, dtype=torch.bfloat16)
    taken, cache = runner.step_bytes(), affordable_cache_bytes(runner, 1)
    if taken <= 128 * 64 * 2:
        place.failures.append(f"a step of 128 tokens takes {taken} bytes, less than its logits")
    if not 0 < cache < torch.cuda.mem_get_info()[1]:
        place.failures.append(f"the cache would take {cache} bytes")
    return place.outcome(step_bytes=taken, cache_bytes=cache)


def triton_paged(place: Place, *, converted: bool = False) -> CheckOutcome:
    """The kernel's own cases, each compared with explicit softmax in fp64; `converted`: those whose
    cache is in 8 bits."""
    import dataclasses

    import torch

    from hocket.runtime.triton.paged_attention_cases import CASES, TOLERANCE, largest_error

    worst, cases = (0.0, ""), 0
    for case in CASES:
        if (case.cached is not None) != converted:
            continue
        dtypes = {torch.bfloat16 if case.dtype == torch.float32 else case.dtype}
        if (
            max(case.counts) > 1 and not converted
        ):  # of decode, the trials have every kind of layer in fp32
            dtypes.add(case.dtype)
        for kind in dtypes:
            error = largest_error(dataclasses.replace(case, dtype=kind), place.device)
            name = f"{case.name} in {str(kind).removeprefix('torch.')}"
            worst = max(worst, (error / TOLERANCE[kind], name))
            cases += 1
            if not error <= TOLERANCE[kind]:
                place.failures.append(f"{name}: {error:.2g}")
    return place.outcome(
        cases=cases, largest_error_of_what_is_allowed=min(worst[0], 1e30), largest_in=worst[1]
    )


# --- lookahead -------------------------------------------------------------------------------

_ASKED: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8}, {"temperature": 1.1, "top_k": 9}, {"temperature": 0.9, "top_p": 0.7},
    {"repetition_penalty": 1.3}, {"temperature": 1.0, "min_p": 0.05},
    {"presence_penalty": 0.6, "temperature": 1.0}, {"temperature": 1.0, "stop": (5, 9, 11)},
)  # fmt: skip
"""What the requests of the check of lookahead ask for."""


def lookahead(place: Place) -> CheckOutcome:
    """Answers of two replicas of one rank, of which one launches a step ahead of the tokens. On a
    CPU, which has no lookahead, one has two steps in flight."""
    plain, _ = _answers(place, ahead=False)
    found, reads = _answers(place, ahead=True)
    for name, tokens in plain.items():
        place.equal(f"tokens of request {name}", found[name], tokens)
    if place.on_gpu:
        place.equal("whether more than one read a step was made", reads > 0, False)
    return place.outcome(requests=len(plain), tokens=sum(map(len, plain.values())))


def _answers(place: Place, *, ahead: bool) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and by how many the reads of the device exceed the steps."""
    import torch

    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.part import StagePart
    from hocket.serving.engine.sampler import Sampler
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.serving.request import Request, SamplingParams
    from hocket.serving.scheduling.limits import SchedulerLimits
    from hocket.serving.scheduling.scheduler import Scheduler

    torch.set_float32_matmul_precision("highest")
    _, served = both("llama")
    runner = runner_of(
        place, served, block_size=16, dtype=torch.float32, rows=4, tokens=32, max_len=64,
        lookahead=ahead and place.on_gpu,
    )  # fmt: skip
    mesh = runner.mesh
    whole = Vocabulary(axis=mesh.axis("tp"))
    sampler: Any
    if place.on_gpu:
        sampler = DeviceSampler(
            whole, 64, place.device, mesh.recorder, 4, last=runner.last_tokens
        )  # fmt: skip
    else:
        sampler = Sampler(whole, 64, "cpu", mesh.recorder, 4)
    depth = 2 if ahead else 1
    part = StagePart(runner, sampler, mesh, hidden_size=32, dtype=torch.float32, depth=depth)
    scheduler = Scheduler(SchedulerLimits(
        num_blocks=64, block_size=runner.block_size, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=64, vocab_size=64, depth=depth, lookahead=runner.lookahead,
    ))  # fmt: skip
    answers: dict[str, list[int]] = {}
    for number, options in enumerate(_ASKED):
        prompt = tuple((7 * number + 3 * k) % 60 + 1 for k in range(4 + 3 * number))
        sampling = SamplingParams(**{"max_new_tokens": 12, "seed": number, **options})
        scheduler.add(Request(id=str(number), tokens=prompt, sampling=sampling), 0.0)
        answers[str(number)] = []
    waiting: list[Any] = []
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        if plan is not None:
            part.expect(plan)
            result = part.run(plan)
            waiting += [] if result is None else [result]
            if scheduler.outstanding < depth:
                continue
        ready = waiting.pop(0) if waiting else part.collect()
        for output in scheduler.apply(ready, 0.0) if ready is not None else ():
            answers[output.id] += output.tokens
    reads = sampler.readback.reads - scheduler.stats().steps if place.on_gpu else 0
    return answers, reads
