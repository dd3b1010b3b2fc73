"""Plans and logits for the sampler, alone and on ranks that split the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import ALL, LAST, NONE, BatchRow, StepPlan

MIXED: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"logit_bias": ((3, 100.0), (5, -100.0))},
    {"min_new_tokens": 30, "max_new_tokens": 40, "stop": (0, 1, 2)},
    {"temperature": 0.8, "min_p": 0.2, "logprobs": 20},
    {},
]
PROMPT = tuple(range(3, 40))


def logits_of(rows: int, vocabulary: int, seed: int, dtype: str = "float32") -> Any:
    """[rows, vocabulary], with equals at the top of every third row."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    best = logits.amax(-1, keepdim=True)
    logits[::3] = torch.where(logits[::3] > best[::3] - 1, best[::3], logits[::3])
    return logits.to(getattr(torch, dtype))


def admissions(samplings: Sequence[dict[str, Any]], first: int = 0) -> list[Admission]:
    return [
        Admission(
            slot=first + i,
            sampling=SamplingParams(**{"seed": 1000 + i, **options}),
            index=i % 3,
            prompt_length=len(PROMPT),
            prompt=PROMPT,
        )
        for i, options in enumerate(samplings)
    ]


def decode_plan(number: int, slots: Sequence[int], length: int, **settings: Any) -> StepPlan:
    """One token for each slot whose sequence is of `length` with it."""
    rows = [BatchRow(slot, length - 1, 1, LAST) for slot in slots]
    return StepPlan(number, rows, [7] * len(rows), **settings)


def prompt_plan(number: int, slot: int, decoding_slot: int) -> StepPlan:
    """A row without logits, a chunk with all of them, the last chunk of a prompt, and a token."""
    rows = [
        BatchRow(decoding_slot, 50, 1, LAST),
        BatchRow(slot, 0, 5, ALL, next_token=9),
        BatchRow(slot + 1, 5, 4, ALL),
        BatchRow(slot + 2, 0, 3, NONE),
    ]
    return StepPlan(number, rows, [8, *range(20, 25), *range(30, 34), 1, 2, 3])


def run(sampler: Any, vocabulary: int, dtype: str, part: slice) -> list[Any]:
    """Several steps of one sampler on its part of the logits: what it told."""
    slots = list(range(len(MIXED)))
    first = decode_plan(0, slots, len(PROMPT), admitted=admissions(MIXED))
    settings = []
    for number in range(4):
        plan = first if number == 0 else decode_plan(number, slots, len(PROMPT) + number)
        sampler.begin(plan)
        logits = logits_of(plan.num_logits, vocabulary, 50 + number, dtype)
        settings.append(plain(sampler.sample(logits[:, part], plan)))
    sampler.begin(
        decode_plan(4, (), 0, admitted=admissions([{"prompt_logprobs": n} for n in (4, 0, 1)], 20))
    )
    plan = prompt_plan(4, 20, 1)
    logits = logits_of(plan.num_logits, vocabulary, 60, dtype)
    settings.append(plain(sampler.sample(logits[:, part], plan)))
    return settings


def plain(result: Any) -> Any:
    """A result as plain data."""
    if result is None:
        return None
    return [
        result.number,
        result.tokens,
        [[place, one.to_json()] for place, one in sorted(result.logprobs.items())],
        [
            [row, [one.to_json() for one in several]]
            for row, several in sorted(result.prompt_logprobs.items())
        ],
        sorted([place, why] for place, why in result.failed.items()),
    ]


def split(context: Any, cases: list[list[Any]], kind: str = "host") -> list[Any]:
    """What the ranks of one tensor axis tell, for each [sizes, dtype]; empty sizes: not split."""
    from hocket.runtime.mesh import Mesh
    from hocket.serving.engine.device_sampler import DeviceSampler
    from hocket.serving.engine.sampler import Sampler
    from hocket.serving.engine.vocabulary import Vocabulary
    from hocket.spec.layout import Layout

    mesh = Mesh(Layout.parse(f"tp{context.world_size}"), context.rank)
    found = []
    for vocabulary, sizes, dtype in cases:
        start = sum(sizes[: context.rank])
        part = slice(start, start + sizes[context.rank]) if sizes else slice(None)
        axis = mesh.axis("tp")
        held = Vocabulary(axis=axis, sizes=tuple(sizes), start=start if sizes else 0)
        made: Any = Sampler if kind == "host" else DeviceSampler
        sampler = made(held, vocabulary, "cpu", mesh.recorder, 32)
        found.append(run(sampler, vocabulary, dtype, part))
    return found
