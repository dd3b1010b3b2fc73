"""Kernel checks of training: each against a reference in fp32 or fp64, forward and backward.

The reference is plain PyTorch: explicit softmax, loops over groups, torch's own optimizer. Limits
are relative to the largest entry: 2^-8 is half a unit in the last place of bf16 at 1, of which a
sum of products of rounded numbers loses a few.

Legend: B batch, A query heads, K key/value heads, S sequence, D head size, N tokens, V vocabulary.

Not executed on a GPU yet.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, GpuCheck, row_of
from hocket.doctor.place import Place, float_dtype

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = {"bf16": 2e-2, "fp32": 1e-4}
"""Largest difference relative to the largest entry, by dtype."""

_BOTH = (CPU, FAKE)


_made = row_of(
    "hocket.doctor.numbers", prefix="kernel-", group="kernels", rehearsals=_BOTH, seconds=1.0
)


def _row(name: str, what: str, function: str, dtype: str = "", **more: Any) -> GpuCheck:
    limit = f"differences of at most {LIMITS[dtype]:g} of the largest entry" if dtype else ""
    arguments = {**more.pop("arguments", {}), **({"dtype": dtype} if dtype else {})}
    capability = (8, 0) if dtype == "bf16" else (7, 0)
    return _made(name, what, function, **{
        "criterion": limit, "arguments": arguments, "capability": capability, **more,
    })  # fmt: skip


CHECKS = (
    *(
        _row(
            f"sdpa-{backend}-{dtype}",
            f"causal attention with grouped heads, torch's {backend} kernel, forward and backward",
            "compare_sdpa", dtype, arguments={"backend": backend},
        )
        for backend, dtype in (
            ("flash", "bf16"), ("efficient", "bf16"), ("efficient", "fp32"), ("cudnn", "bf16"),
            ("math", "fp32"),
        )
    ),
    _row(
        "sdpa-mask-bf16", "attention with a padding mask, forward and backward", "sdpa_mask",
        "bf16",
    ),
    _row(
        "varlen-bf16", "variable-length attention over packed documents, forward and backward, "
        "compared with each document alone", "compare_varlen", "bf16", rehearsals=_BOTH,
    ),
    *(
        _row(
            f"cross-entropy-{dtype}", "vocabulary-parallel cross-entropy, loss and gradient",
            "cross_entropy", dtype,
        )
        for dtype in ("bf16", "fp32")
    ),
    *(
        _row(
            f"adamw-{dtype}", "ten steps of fused AdamW with fp32 masters, compared with torch's "
            "plain AdamW", "adamw", dtype, criterion="masters within 1e-5, parameters within one "
            "rounding of them",
        )
        for dtype in ("bf16", "fp32")
    ),
    *(
        _row(
            f"matmul-{dtype}", "matrix multiplication of a linear layer, forward and backward",
            "compare_matmul", dtype, seconds=0.5,
        )
        for dtype in ("bf16", "fp32")
    ),
    _row(
        "grouped-mm-bf16", "grouped matrix multiplication of experts, forward and backward, "
        "compared with a loop over experts", "grouped", "bf16", capability=(9, 0),
    ),
    *(
        _row(
            f"grouped-gemm-{dtype}", "grouped matrix multiplication of experts in Triton, forward "
            "and backward, compared with a loop over experts", "grouped", dtype,
            arguments={"triton": True}, capability=(8, 0), packages=("triton",), rehearsals=(FAKE,),
        )
        for dtype in ("bf16", "fp32")
    ),
    *(
        _row(
            f"experts-{dtype}", "a mixture-of-experts block of transformers in its grouped form, "
            "forward and backward, compared with its loop", "compare_experts", dtype,
            rehearsals=(CPU,),
        )
        for dtype in ("bf16", "fp32")
    ),
    *(
        _row(
            f"rms-norm-{dtype}", "RMSNorm, forward and backward", "rms_norm", dtype, seconds=0.5
        )
        for dtype in ("bf16", "fp32")
    ),
    _row(
        "fp8-linear", "a linear layer in fp8, forward and backward, compared with bf16",
        "compare_fp8",
        capability=(8, 9), packages=("torchao",), criterion="differences of at most 0.1 of the "
        "largest entry", rehearsals=(CPU,),
    ),
    _row(
        "deferred-weight-gradient", "a linear layer whose weight gradient is deferred (zero-bubble "
        "schedules), compared with one backward", "deferred", "fp32",
    ),
    _row(
        "dropout-streams", "dropout seeded by seed, step, microbatch and layer", "dropout",
        criterion="the same key gives the same mask, another key another; the fraction kept is 0.9 "
        "within 0.01", rehearsals=(CPU,),
    ),
    _row(
        "recompute", "activation checkpointing of every layer with dropout, compared with none",
        "compare_recompute", criterion="loss and gradients are equal within 1e-5", rehearsals=(CPU,
        ),
    ),
    _row(
        "compile", "torch.compile of every layer of two, loss and gradients compared with eager",
        "compare_compiled", criterion="differences of at most 1e-4, no graph break", seconds=12.0,
        timeout=180.0, slow=True, rehearsals=(CPU,),
    ),
)  # fmt: skip


def _exact(place: Place, dtype: str) -> None:
    """fp32 products are computed in fp32: TF32 keeps ten bits of them."""
    import torch

    torch.set_float32_matmul_precision("highest")
    if place.on_gpu and dtype == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        raise Cannot("bf16 needs compute capability 8.0")


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k' scale) v in fp64, of [B, A, S, D] and [B, K, S, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


def _compare_backward(
    place: Place, out: Tensor, expected: Tensor, inputs: dict[str, Tensor], limit: float
) -> None:
    """Compare two results and their gradients with respect to `inputs`."""
    import torch

    place.compare("output", out, expected, limit)
    grad = place.draw(*out.shape, seed=99, dtype=out.dtype)
    leaves = list(inputs.values())
    ours = torch.autograd.grad(out, leaves, grad)
    theirs = torch.autograd.grad(expected, leaves, grad.to(expected.dtype))
    for name, found, want in zip(inputs, ours, theirs, strict=True):
        place.compare(f"gradient_{name}", found, want, limit)


def _causal(place: Place, size: int) -> Tensor:
    import torch

    return torch.ones(size, size, dtype=torch.bool, device=place.device).tril()


def compare_sdpa(place: Place, *, backend: str, dtype: str) -> CheckOutcome:
    """Causal attention by one of torch's kernels. On a CPU by those that it has."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _exact(place, dtype)
    heads, kv_heads, length, width = place.size((32, 8, 2048, 128), (4, 2, 16, 32))
    kind = float_dtype(dtype)
    q = place.draw(2, heads, length, width, dtype=kind, seed=1, grad=True)
    k = place.draw(2, kv_heads, length, width, dtype=kind, seed=2, grad=True)
    v = place.draw(2, kv_heads, length, width, dtype=kind, seed=3, grad=True)
    name = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
            "cudnn": "CUDNN_ATTENTION", "math": "MATH"}[backend]  # fmt: skip
    on_cpu = backend in ("efficient", "cudnn") and not place.on_gpu
    chosen = [SDPBackend.MATH if on_cpu else getattr(SDPBackend, name)]
    keys, values = k, v
    if backend == "efficient":  # this kernel takes no groups of heads
        keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    with sdpa_kernel(chosen):
        out = F.scaled_dot_product_attention(
            q, keys, values, is_causal=True, enable_gqa=backend != "efficient"
        )
    expected = _attention(q, k, v, _causal(place, length), width**-0.5)
    _compare_backward(place, out, expected, {"query": q, "key": k, "value": v}, LIMITS[dtype])
    return place.outcome()


def sdpa_mask(place: Place, *, dtype: str) -> CheckOutcome:
    """Attention in which some keys of each row are padding."""
    import torch
    import torch.nn.functional as F

    heads, length, width = place.size((16, 1024, 128), (2, 16, 32))
    kind = float_dtype(dtype)
    q, k, v = (
        place.draw(2, heads, length, width, dtype=kind, seed=s, grad=True) for s in (1, 2, 3)
    )
    ends = torch.tensor([length, length // 2], device=place.device).view(2, 1, 1, 1)
    mask = _causal(place, length) & (torch.arange(length, device=place.device) < ends)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = _attention(q, k, v, mask, width**-0.5)
    _compare_backward(place, out, expected, {"query": q, "key": k, "value": v}, LIMITS[dtype])
    return place.outcome()


def compare_varlen(place: Place, *, dtype: str) -> CheckOutcome:
    """Packed documents in one call, and one after the other."""
    import torch
    import torch.nn.functional as F

    lengths = place.size([700, 1, 300, 1047], [7, 1, 8])
    heads, width = place.size((16, 128), (2, 32))
    kind = float_dtype(dtype)
    total = sum(lengths)
    q, k, v = (place.draw(total, heads, width, dtype=kind, seed=s, grad=True) for s in (1, 2, 3))
    splits: list[tuple[Tensor, ...]] = [
        torch.split(t, lengths)
        for t in (q, k, v)  # type: ignore[no-untyped-call]
    ]
    documents = [
        tuple(t[None].transpose(1, 2) for t in parts) for parts in zip(*splits, strict=True)
    ]
    exact = [
        _attention(one, two, three, _causal(place, one.shape[2]), width**-0.5)
        for one, two, three in documents
    ]
    expected = torch.cat([each.squeeze(0).transpose(0, 1) for each in exact])
    if place.form == CPU:  # the operation exists for CUDA alone: each document is computed alone
        alone = [
            F.scaled_dot_product_attention(one, two, three, is_causal=True)
            for one, two, three in documents
        ]
        out = torch.cat([each.squeeze(0).transpose(0, 1) for each in alone])
    else:
        from hocket.models.flash_varlen import flash_varlen

        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        begins = torch.tensor(ends, dtype=torch.int32, device=place.device)
        longest = max(lengths)
        out = flash_varlen(q, k, v, (begins, begins), (longest, longest))
    _compare_backward(place, out, expected, {"query": q, "key": k, "value": v}, LIMITS[dtype])
    return place.outcome()


def cross_entropy(place: Place, *, dtype: str) -> CheckOutcome:
    """Ours, which overwrites its logits, and torch's in fp64."""
    import torch
    import torch.nn.functional as F

    from hocket.runtime.mesh import Axis
    from hocket.runtime.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    tokens, vocabulary = place.size((2048, 128256), (24, 64))
    logits = place.draw(tokens, vocabulary, dtype=float_dtype(dtype), seed=1, grad=True)
    labels = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(2)).to(
        place.device
    )
    labels[::7] = -100
    count = tokens - len(range(0, tokens, 7))
    expected = F.cross_entropy(logits.double(), labels, reduction="sum", ignore_index=-100) / count
    (want,) = torch.autograd.grad(expected, logits)
    loss = vocab_parallel_cross_entropy(logits * 1.0, labels, Axis("tp")).sum() / count
    (found,) = torch.autograd.grad(loss, logits)
    place.compare("loss", loss.detach().reshape(1), expected.detach().reshape(1), 1e-4)
    place.compare("gradient", found, want, LIMITS[dtype])
    return place.outcome()


def adamw(place: Place, *, dtype: str) -> CheckOutcome:
    """The optimizer of training, and torch's single-tensor AdamW on the CPU."""
    import torch

    from hocket.spec.run import TrainOptions
    from hocket.training.optimizer import Optimizer

    kind = float_dtype(dtype)
    shapes = place.size([(2048, 2048), (2048,), (513, 77)], [(16, 8), (8,), (5, 3)])
    options = TrainOptions(lr=1e-2)
    start = [place.draw(*shape, dtype=kind, seed=i) for i, shape in enumerate(shapes)]
    ours = {f"p{i}.weight": torch.nn.Parameter(t.clone()) for i, t in enumerate(start)}
    optimizer = Optimizer(ours.items(), options)
    theirs = [torch.nn.Parameter(t.float().clone()) for t in start]
    plain = torch.optim.AdamW(
        [{"params": [p for p in theirs if p.ndim > 1], "weight_decay": options.weight_decay},
         {"params": [p for p in theirs if p.ndim == 1], "weight_decay": 0.0}],
        lr=1e-2, betas=(options.beta1, options.beta2), eps=options.eps, foreach=False, fused=False,
    )  # fmt: skip
    for step in range(10):
        for i, (mine, other) in enumerate(zip(ours.values(), theirs, strict=True)):
            grad = place.draw(*mine.shape, seed=100 * step + i)
            mine.grad_dtype = torch.float32
            mine.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step(1e-2)
        plain.step()
    for i, (name, mine) in enumerate(ours.items()):
        place.compare(f"master_{i}", optimizer.masters.get(name, mine), theirs[i], 1e-5)
        place.compare(f"parameter_{i}", mine, theirs[i], 1e-2 if dtype == "bf16" else 1e-5)
    return place.outcome()


def compare_matmul(place: Place, *, dtype: str) -> CheckOutcome:
    """x W' in one dtype and in fp64."""
    _exact(place, dtype)
    rows, inner, outer = place.size((1024, 4096, 1024), (8, 32, 16))
    x = place.draw(rows, inner, dtype=float_dtype(dtype), seed=1, grad=True)
    weight = place.draw(outer, inner, dtype=float_dtype(dtype), seed=2, grad=True)
    out = x @ weight.t()
    expected = x.double() @ weight.double().t()
    _compare_backward(place, out, expected, {"input": x, "weight": weight}, LIMITS[dtype])
    return place.outcome()


def grouped(place: Place, *, dtype: str, triton: bool = False) -> CheckOutcome:
    """torch's grouped matmul or the one in Triton, and one matmul for each group."""
    import torch
    import torch.nn.functional as F

    from hocket.runtime.triton.grouped_gemm import grouped_mm

    sizes = place.size([512, 128, 0, 1408], [16, 8, 0, 8])
    inner, outer = place.size((2048, 1024), (32, 16))
    x = place.draw(sum(sizes), inner, dtype=float_dtype(dtype), seed=1, grad=True)
    weight = place.draw(len(sizes), inner, outer, dtype=float_dtype(dtype), seed=2, grad=True)
    ends = torch.tensor(sizes, device=place.device).cumsum(0).int()
    out = grouped_mm(x, weight, ends) if triton else F.grouped_mm(x, weight, offs=ends)
    parts = torch.split(x.double(), sizes)  # type: ignore[no-untyped-call]
    expected = torch.cat([part @ weight[i].double() for i, part in enumerate(parts)])
    _compare_backward(place, out, expected, {"input": x, "weight": weight}, LIMITS[dtype])
    return place.outcome()


def compare_experts(place: Place, *, dtype: str) -> CheckOutcome:
    """Mixtral's experts as transformers computes them grouped, and one expert after the other."""
    import torch

    from hocket.models.proxy import proxy_of
    from hocket.models.skeleton import config_of

    tokens = place.size(512, 24)
    results = []
    for implementation, kind in (("eager", "fp32"), ("grouped_mm", dtype)):
        config = config_of({"model_type": "mixtral", "num_local_experts": 4}, dropout=0.0)
        model: Any = proxy_of(config).build(seed=3).to(float_dtype(dtype))
        model = model.to(place.device, float_dtype(kind))
        model.config._experts_implementation = implementation
        block = next(m for n, m in model.named_modules() if n.endswith(".experts"))
        width = model.config.hidden_size
        x = place.draw(tokens, width, dtype=float_dtype(dtype), seed=1).to(float_dtype(kind))
        x.requires_grad_()
        chosen = torch.arange(2 * tokens, device=place.device).view(tokens, 2) * 7 % 4
        chosen[:, 1] = (chosen[:, 0] + 1) % 4
        weights = place.draw(tokens, 2, seed=2).softmax(-1).to(float_dtype(kind))
        out = block(x, chosen, weights)
        out.square().sum().backward()
        results.append((out, [x.grad, *(p.grad for p in block.parameters())]))
    (expected, wanted), (out, found) = results
    place.compare("output", out, expected, LIMITS[dtype])
    for i, (grad, want) in enumerate(zip(found, wanted, strict=True)):
        place.compare(f"gradient_{i}", grad, want, 2 * LIMITS[dtype])
    return place.outcome()


def rms_norm(place: Place, *, dtype: str) -> CheckOutcome:
    """torch's fused RMSNorm and its formula in fp64 (Zhang and Sennrich 2019)."""
    import torch.nn.functional as F

    rows, width = place.size((4096, 4096), (8, 32))
    x = place.draw(rows, width, dtype=float_dtype(dtype), seed=1, grad=True)
    weight = place.draw(width, dtype=float_dtype(dtype), seed=2, grad=True)
    out = F.rms_norm(x, (width,), weight, 1e-6)
    exact = x.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    _compare_backward(place, out, expected, {"input": x, "weight": weight}, LIMITS[dtype])
    return place.outcome()


def compare_fp8(place: Place) -> CheckOutcome:
    """A linear layer through torchao's float8, and in bf16. In a rehearsal emulated."""
    import torch

    from hocket.runtime import fp8 as ours

    x = place.draw(*place.size((2048, 2048), (32, 64)), dtype=torch.bfloat16, seed=1, grad=True)
    outer = place.size(4096, 32)
    weight = place.draw(outer, x.shape[1], dtype=torch.bfloat16, seed=2, grad=True)
    multiply = ours.fp8_matmul(emulate=not place.on_gpu)
    out = multiply(x, weight.t())
    expected = x.double() @ weight.double().t()
    _compare_backward(place, out, expected, {"input": x, "weight": weight}, 0.1)
    place.equal("whether the result differs from bf16", bool((out != x @ weight.t()).any()), True)
    return place.outcome()


def deferred(place: Place, *, dtype: str) -> CheckOutcome:
    """The input's gradient first, the weight's when it is asked for."""
    import torch

    from hocket.runtime.linear import WeightGradients, linear

    _exact(place, dtype)
    rows, width = place.size((1024, 2048), (8, 16))
    later = WeightGradients()
    x = place.draw(rows, width, seed=1, grad=True)
    weight = torch.nn.Parameter(place.draw(width, width, seed=2))
    with later.deferring():
        loss = linear(x, weight, weight_gradients=later).square().mean()
        torch.autograd.backward(loss)
    place.equal("the weight's gradient before it is asked for", weight.grad, None)
    later.run(later.take())
    assert x.grad is not None
    assert weight.grad is not None
    expected = torch.autograd.grad((x.double() @ weight.double().t()).square().mean(), [x, weight])
    place.compare("gradient_input", x.grad, expected[0], LIMITS[dtype])
    place.compare("gradient_weight", weight.grad, expected[1], LIMITS[dtype])
    return place.outcome()


def dropout(place: Place) -> CheckOutcome:
    """Masks of equal and of different keys."""
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.runtime.random import Streams

    streams = Streams(5, Mesh.single(place.device))
    x = torch.ones(place.size(1 << 22, 1 << 16), device=place.device)
    masks = []
    for step, layer in ((0, 1), (0, 1), (0, 2), (1, 1)):
        streams.step = step
        streams.enter_layer(layer)
        masks.append(torch.nn.functional.dropout(x, 0.1) > 0)
    place.equal("two masks of one key are equal", torch.equal(masks[0], masks[1]), True)
    for other in masks[2:]:
        place.equal("masks of two keys are equal", torch.equal(masks[0], other), False)
    kept = float(masks[0].float().mean())
    if abs(kept - 0.9) > 0.01:
        place.failures.append(f"{kept:.3f} of the entries are kept, expected 0.9")
    return place.outcome(kept_share=kept)


def compare_recompute(place: Place) -> CheckOutcome:
    """Losses and gradients of one step, with and without activation checkpointing."""
    from hocket.doctor.model import gradients_of

    plain_loss, plain = gradients_of(place, dropout=0.1)
    loss, found = gradients_of(place, "recompute=full", dropout=0.1)
    return _same_step(place, (loss, found), (plain_loss, plain), 1e-5)


def compare_compiled(place: Place) -> CheckOutcome:
    """Losses and gradients of one step, compiled and eager."""
    import torch._dynamo

    from hocket.doctor.model import gradients_of

    expected = gradients_of(place, layers=2)  # layers share one graph
    torch._dynamo.utils.counters.clear()
    found = gradients_of(place, layers=2, compile=True)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    place.equal("graph breaks", breaks, 0)
    return _same_step(place, found, expected, 1e-4)


def _same_step(place: Place, found: Any, expected: Any, limit: float) -> CheckOutcome:
    place.compare("loss", found[0].reshape(1), expected[0].reshape(1), limit)
    place.equal("names of gradients", sorted(found[1]), sorted(expected[1]))
    for i, name in enumerate(sorted(expected[1])):
        if name in found[1]:
            place.compare(f"gradient_{i}", found[1][name], expected[1][name], limit)
    return place.outcome()
