"""The engine as on a GPU, on CPU tensors: a step is launched before the last result is read.

Scheduler, runner with recorded graphs, device sampler and part together answer as the CPU's do.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.serving.engine.device_sampler import DeviceSampler  # noqa: E402
from hocket.serving.engine.part import StagePart  # noqa: E402
from hocket.serving.engine.sampler import Sampler  # noqa: E402
from hocket.serving.engine.vocabulary import Vocabulary  # noqa: E402
from hocket.serving.request import Request, SamplingParams  # noqa: E402
from hocket.serving.scheduling.limits import SchedulerLimits  # noqa: E402
from hocket.serving.scheduling.scheduler import Scheduler  # noqa: E402
from tests.serving.recorded_graph import reference_operator  # noqa: E402
from tests.serving.test_paged import on_device, runner_of  # noqa: E402

__all__ = ["reference_operator"]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.1, "top_k": 9, "seed": 4},
    {"temperature": 0.9, "top_p": 0.7, "seed": 5, "logprobs": 2},
    {"repetition_penalty": 1.3, "seed": 6},
    {"stop": (5, 9, 11, 30, 31, 32), "seed": 7, "temperature": 1.0},
    {"presence_penalty": 0.6, "temperature": 1.0, "seed": 8, "logit_bias": ((7, 1.0),)},
    {"prompt_logprobs": 1},
]


def answers(part: StagePart, limits: SchedulerLimits) -> tuple[dict[str, Any], Scheduler]:
    """Drive a part as `Driver` does; by request tokens, reason and log-probabilities."""
    scheduler = Scheduler(limits, secret=b"x")
    for number, options in enumerate(ASKED):
        prompt = tuple((7 * number + 3 * k) % 60 + 1 for k in range(4 + 3 * number))
        seeded = {"seed": 0, **options}
        sampling = SamplingParams(max_new_tokens=12, **seeded)
        scheduler.add(Request(id=str(number), tokens=prompt, sampling=sampling), 0.0)
    streamed: dict[str, Any] = {str(n): [[], None, [], []] for n in range(len(ASKED))}

    def take(result: Any) -> None:
        for output in scheduler.apply(result, 0.0):
            mine = streamed[output.id]
            mine[0] += output.tokens
            mine[1] = output.finish_reason
            mine[2] += output.logprobs or []
            mine[3] += output.prompt_logprobs or []

    for _ in range(500):
        plan = scheduler.plan(0.0)
        if plan is not None:
            part.expect(plan)
            result = part.run(plan)
            if result is not None:
                take(result)
            if scheduler.outstanding < limits.depth:
                continue
        collected = part.collect()
        if collected is not None:
            take(collected)
        if scheduler.idle:
            return streamed, scheduler
    raise AssertionError("it does not end")


@pytest.mark.usefixtures("reference_operator")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_requests_are_answered_as_on_a_cpu(family: str) -> None:
    bounds: dict[str, Any] = {
        "num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "max_model_len": 64, "vocab_size": 64,
    }  # fmt: skip
    mesh = Mesh.single()
    whole = Vocabulary(axis=mesh.axis("tp"))
    _, plain = runner_of(family, 4, max_num_batched_tokens=16)
    sampler: Any = Sampler(whole, 64, "cpu", mesh.recorder, 4)
    sizes: dict[str, Any] = {"hidden_size": 32, "dtype": torch.float32}
    expected, _ = answers(
        StagePart(plain, sampler, mesh, depth=1, **sizes), SchedulerLimits(**bounds)
    )
    _, runner, _ = on_device(family, 4, max_num_batched_tokens=16, lookahead=True)
    runner.allocate(40)
    device = DeviceSampler(whole, 64, "cpu", mesh.recorder, 4, last=runner.last_tokens)
    part = StagePart(runner, device, mesh, depth=2, **sizes)
    found, scheduler = answers(part, SchedulerLimits(**bounds, depth=2, lookahead=True))
    for name, (tokens, finish, logprobs, prompt) in expected.items():
        mine = found[name]
        assert (mine[0], mine[1]) == (tokens, finish), name
        for many, more in ((mine[2], logprobs), (mine[3], prompt)):
            assert [one.token for one in many] == [one.token for one in more]
            assert [one.logprob for one in many] == pytest.approx(
                [one.logprob for one in more], abs=1e-4
            )
    stats = scheduler.stats()
    assert stats.generated_tokens == sum(len(one[0]) for one in found.values())
    assert runner.graphs is not None
    assert runner.graphs.replays > 10
    assert device.readback.reads <= stats.steps, "one read a step"
    assert part.uncollected == 0
