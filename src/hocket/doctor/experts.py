"""Expert-parallel checks: choices that are skipped, and the two ways of tokens to experts.

Layouts with ep are rows of `multi_gpu`, the order of their collectives one of `rehearsed`.

Not executed on a GPU yet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, CheckOutcome, row_of
from hocket.doctor.place import Place
from hocket.doctor.world import join, place_of, ranks, tell, timed

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.launch import RankContext

_HERE = "hocket.doctor.experts:"
LIMITS = {"bf16": 2e-2, "fp32": 1e-4}
"""Largest difference relative to the largest entry, by dtype."""
COUNT = 2
EXPERTS, CHOICES = 8, 2

_kernel = row_of("hocket.doctor.experts", prefix="kernel-", group="kernels", seconds=0.3)
_exchange = row_of(
    "hocket.doctor.experts", group="multi-gpu", gpus=COUNT, timeout=240.0, seconds=20.0, slow=True
)

CHECKS = (
    *(
        _kernel(
            f"experts-absent-{dtype}", "experts of which this GPU has half: choices of the others "
            "are skipped, forward and backward, compared with one expert after the other",
            "absent_experts",
            f"differences of at most {LIMITS[dtype]:g} of the largest entry, without a wait of the "
            "host", arguments={"dtype": dtype}, capability=(8, 0), rehearsals=(CPU, FAKE),
        )
        for dtype in LIMITS
    ),
    _exchange(
        "experts-exchange", "experts over two GPUs, whose tokens are dispatched by all-to-all or "
        "gathered: outputs compared with one GPU, and seconds of both with 16 and 4,096 tokens a "
        "GPU", "token_exchange", f"differences of at most {LIMITS['bf16']:g} of the largest entry; "
        "gathered without a wait of the host", capability=(8, 0),
        arguments={"ways": "dispatched gathered"},
    ),
    _exchange(
        "experts-deepep", "experts over two GPUs, whose tokens DeepEP moves: outputs and gradients "
        "compared with one GPU, and seconds of it and of all-to-all", "token_exchange",
        f"differences of at most {LIMITS['bf16']:g} of the largest entry", capability=(9, 0),
        arguments={"ways": "dispatched library"}, packages=("deep_ep",), rehearsals=(),
        unrehearsed="the library's kernels run on GPUs alone; tests emulate them",
    ),
)  # fmt: skip


def absent_experts(place: Place, *, dtype: str) -> CheckOutcome:
    """Half of the experts as a rank of two has them."""
    import torch

    from hocket.runtime.expert_parallel.gathered import own_choices

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    tokens = place.size(512, 24)
    block = _block(place, kind)
    x = place.draw(tokens, block.config.hidden_size, dtype=kind, seed=1, grad=True)
    index = torch.arange(CHOICES * tokens, device=place.device).view(tokens, CHOICES) * 5 % EXPERTS
    weights = place.draw(tokens, CHOICES, dtype=kind, seed=2).softmax(-1).detach()
    weights.requires_grad_()
    grad = place.draw(tokens, block.config.hidden_size, dtype=kind, seed=3)
    half = EXPERTS // 2
    own = own_choices(index, half, half)  # the second rank's
    _halve(block, half)
    with place.no_waits():
        out = block(x, own, weights)
        out.backward(grad)
    exact, exact_weights = (y.detach().double().requires_grad_() for y in (x, weights))
    parameters = {n: p.detach().double().requires_grad_() for n, p in block.named_parameters()}
    expected = _one_by_one(parameters, exact, own, exact_weights, half)
    torch.autograd.backward(expected, grad.double())
    place.compare("output", out, expected, LIMITS[dtype])
    pairs = {"input": (x, exact), "weights": (weights, exact_weights)}
    pairs |= {n: (p, parameters[n]) for n, p in block.named_parameters()}
    for name, (found, wanted) in pairs.items():
        assert found.grad is not None
        assert wanted.grad is not None
        place.compare(f"gradient_{name}", found.grad, wanted.grad, 2 * LIMITS[dtype])
    return place.outcome()


def _block(place: Place, kind: Any) -> Any:
    """A Mixtral's experts, computed grouped; the same values in every process."""
    import torch

    from hocket.doctor.families import FAMILIES
    from hocket.models.skeleton import build_skeleton
    from hocket.training.build import group_experts

    group_experts()
    sizes = place.size({"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64}, {})
    config = {**FAMILIES["mixtral"], "num_local_experts": EXPERTS, "num_hidden_layers": 1, **sizes}
    model: Any = build_skeleton(config, dropout=0.0)
    model.config._experts_implementation = "grouped_mm"
    block = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    for seed, (name, parameter) in enumerate(list(block.named_parameters(recurse=False))):
        width = parameter.shape[-1] ** -0.5
        values = place.draw(*parameter.shape, dtype=kind, seed=20 + seed) * width
        setattr(block, name, torch.nn.Parameter(values))
    return block


def _halve(block: Any, first: int) -> None:
    """Keep the experts from number `first` on."""
    import torch

    for name, parameter in list(block.named_parameters(recurse=False)):
        setattr(block, name, torch.nn.Parameter(parameter.detach()[first:].clone()))
    block.num_experts -= first
    block._is_expert_parallel = True


def _one_by_one(
    parameters: dict[str, Tensor], x: Tensor, index: Tensor, weights: Tensor, count: int
) -> Tensor:
    """[T, H]: every expert computes all tokens; a mask of who chose it weighs its output."""
    import torch
    import torch.nn.functional as F

    out = torch.zeros_like(x)
    for number in range(count):
        gate, up = (x @ parameters["gate_up_proj"][number].t()).chunk(2, -1)
        made = (F.silu(gate) * up) @ parameters["down_proj"][number].t()
        out = out + made * (weights * (index == number)).sum(-1, keepdim=True)
    return out


def token_exchange(place: Place, *, ways: str) -> CheckOutcome:
    """Some ways on two ranks."""
    payload = {"backend": place.size("nccl", "gloo"), "ways": ways.split()}
    found = ranks(place, _HERE + "exchange_rank", COUNT, payload)
    for way in payload["ways"]:
        error = max(values[way]["error"] for values in found)
        place.values[f"{way}_relative_error"] = error
        if not error <= LIMITS["bf16"]:
            place.failures.append(f"{way} differs by {error:.2g} ({LIMITS['bf16']:g})")
        for tokens, seconds in found[0][way]["seconds"].items():
            place.values[f"{way}_{tokens}_tokens_seconds"] = seconds
    waits = [values["waits"] for values in found if values["waits"]]
    place.equal("waits of the host for gathered tokens", waits, [])
    return place.outcome()


def exchange_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: its tokens' outputs and, of ways that train, gradients by each way, and the seconds
    of a forward."""
    import torch

    from hocket.models.experts import skip_absent
    from hocket.models.plans.experts import expert_plan
    from hocket.runtime.expert_parallel import (
        DeepEP,
        apply_expert_parallel,
        gather_experts,
    )
    from hocket.runtime.mesh import Axis, Mesh
    from hocket.spec.layout import Layout
    from hocket.spec.placement import Placement

    device = join(context, payload["backend"])
    place, mesh = place_of(context), Mesh(Layout(dp=COUNT, ep=COUNT), context.rank, device)
    context.position = mesh.position
    holder = torch.nn.Module()
    holder.experts = _block(place, torch.bfloat16)
    whole = _block(place, torch.bfloat16)
    plan, why = expert_plan(holder, None)
    assert plan is not None, why
    placements = {n: Placement.whole(n, tuple(p.shape)) for n, p in holder.named_parameters()}
    apply_expert_parallel(
        holder, plan, placements,
        experts=mesh.axis("expert"), tokens=Axis("tp"), recorder=mesh.recorder,
    )  # fmt: skip
    block: Any = holder.experts
    given = {}
    for tokens in (4096 if place.on_gpu else 64, 16):  # a buffer is made for the first
        x = place.draw(
            tokens, block.config.hidden_size, dtype=torch.bfloat16, seed=5 + context.rank
        )
        index = place.draw(tokens, EXPERTS, seed=9 + context.rank).argsort(-1)[:, :CHOICES]
        weights = place.draw(tokens, CHOICES, seed=2).softmax(-1).to(torch.bfloat16)
        given[tokens] = x, index, weights
    found: dict[str, Any] = {"waits": ""}
    wanted = {tokens: _results(whole, each) for tokens, each in given.items()}
    for way in payload["ways"]:
        if way == "gathered":
            counts, why = gather_experts(holder, skip_absent)
            assert counts is not None, why
        if way == "library":
            block.deep_ep = DeepEP(mesh.axis("expert"), mesh.recorder)
        errors, seconds = [], {}
        for tokens, each in given.items():
            for result, exact in zip(_results(block, each), wanted[tokens], strict=True):
                error = (result - exact).abs().max() / exact.abs().max()
                errors.append(float(error.nan_to_num(nan=float("inf"))))
            with torch.no_grad():
                forward = functools.partial(block, *each)
                seconds[str(tokens)] = timed(forward, 20 if place.on_gpu else 2, device)
        found[way] = {"error": max(errors), "seconds": seconds}
    if "gathered" in payload["ways"]:
        place.synchronize()
        try:
            with place.no_waits(), torch.no_grad():
                block(*given[16])
        except RuntimeError as error:
            found["waits"] = str(error).splitlines()[0]
    tell(context, **found)


def _results(block: Any, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Of one forward and backward: the output, and the gradients of tokens and of their weights."""
    hidden, index, weights = given
    hidden, weights = (x.detach().clone().requires_grad_() for x in (hidden, weights))
    out = block(hidden, index, weights)
    out.backward(hidden.detach())
    assert hidden.grad is not None
    assert weights.grad is not None
    return [x.detach().double() for x in (out, hidden.grad, weights.grad)]
