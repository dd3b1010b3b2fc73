"""What the ranks run in the runtime's tests."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.doctor.families import spread_model
from hocket.models.plans import plan_for
from hocket.runtime.collectives import all_gather, all_reduce
from hocket.runtime.mesh import Mesh
from hocket.runtime.parallelize import Parallel, parallelize
from hocket.runtime.tensor_parallel import vocab_parallel_cross_entropy
from hocket.schedules.registry import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.plan import ParallelPlan, Split, TensorPlan, WeightSegment
from tests import families
from tests.runtime import models


def reference(module: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    """Loss and gradients of one process over the whole batch, by torch's own means."""
    total = sum(int((b["labels"] != -100).sum()) for b in batches)
    loss = 0.0
    for batch in batches:
        logits = module(input_ids=batch["input_ids"])
        logits = getattr(logits, "logits", logits)
        part = F.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum"
        )
        (part / total).backward()
        loss += float(part.detach()) / total
    return loss


def compare(parallel: Parallel, whole: nn.Module) -> dict[str, float]:
    """The largest difference of a gradient from the whole one, relative as `check` does it."""
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.abs().max()) for p in wanted.values())
    worst, worst_name, seen = 0.0, "", 0
    for name, parameter in parallel.named_parameters():
        reference_grad = wanted[name].grad
        scale = max(float(reference_grad.abs().max()), 1e-3 * largest)
        for there, here in parallel.placements[name].pairs():
            if parameter.grad[here].numel():
                gap = float((reference_grad[there] - parameter.grad[here]).abs().max()) / scale
                worst, worst_name = max((worst, worst_name), (gap, name))
        seen += 1
    assert seen > 0
    return {"gap": worst, "name": worst_name}


def step(
    context: Any,
    layout: str,
    options: dict[str, Any] | None = None,
    microbatches: int = 2,
    dtype: str = "float32",
    max_norm: float = 0.5,
) -> dict[str, Any]:
    """One step of the small model in a layout, beside one process."""
    options = options or {}
    where = Layout.parse(layout)
    kind = getattr(torch, dtype)
    whole = models.small(**options).to(kind)
    every = [models.tokens(batch=2, seed=10 + i) for i in range(where.dp * microbatches)]
    loss = reference(whole, every)
    plan = models.small_plan(**{k: v for k, v in options.items() if k != "bias"})
    mesh = Mesh(where, context.rank)
    schedule = build_schedule(where, microbatches) if where.pp > 1 else None
    parallel = parallelize(
        models.small(**options).to(kind), where, plan, mesh=mesh, schedule=schedule,
        bucket_mb=0.01, labels_shifted=True,
    )  # fmt: skip
    first = mesh.axis("dp").index * microbatches
    mine = every[first : first + microbatches]
    found = [float(parallel.forward_backward(mine)) for _ in range(2)]
    assert found[0] == found[1], found
    gap = compare(parallel, whole)
    norm = float(parallel.clip_grad_norm(max_norm))
    wanted = float(nn.utils.clip_grad_norm_(whole.parameters(), max_norm))
    clipped = compare(parallel, whole)
    total, tokens = parallel.evaluate(mine)
    return {
        "loss": found[0],
        "wanted_loss": loss,
        "gap": gap,
        "norm": norm,
        "wanted_norm": wanted,
        "clipped": clipped,
        "evaluated": total / tokens,
        "collectives": mesh.recorder.collectives(),
    }


def steps(context: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several cases of `step` in one world."""
    return [step(context, **case) for case in cases]


def counts(context: Any, model: str, microbatches: int) -> list[dict[str, Any]]:
    """Every collective of one step over tp."""
    layout = Layout(tp=context.world_size)
    if model == "llama":
        module, plan, _ = llama()
    else:
        module, plan = models.small(), models.small_plan()
    mesh = Mesh(layout, context.rank)
    parallel = parallelize(module, layout, plan, mesh=mesh)
    mesh.recorder.clear()
    parallel.forward_backward(
        [models.tokens(batch=2, seed=i) for i in range(microbatches)], num_tokens=30
    )
    parallel.clip_grad_norm(1.0)
    return mesh.recorder.collectives()


def llama(kind: str = "llama") -> tuple[nn.Module, ParallelPlan, int]:
    """A tiny Hugging Face model and its plan, written by hand but for `families.HYBRIDS`."""
    import transformers

    if kind in families.HYBRIDS:
        config = {**families.HYBRIDS[kind], "vocab_size": models.VOCABULARY}
        module = spread_model(config, 0.1)
        return module.train(), plan_for(module), 0
    size = {
        "vocab_size": models.VOCABULARY, "hidden_size": models.HIDDEN, "head_dim": 4,
        "intermediate_size": models.INNER, "num_hidden_layers": models.LAYERS,
        "num_attention_heads": models.HEADS, "num_key_value_heads": models.KV_HEADS,
        "max_position_embeddings": 32, "use_cache": False, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(3)
    plan = models.llama_plan(qk_norm=kind in ("qwen3", "gemma3_text"))
    if kind == "mixtral":
        config = transformers.MixtralConfig(**size, num_local_experts=4)
        wide = WeightSegment(units=models.INNER, what="expert rows")
        experts = Split(
            style="experts",
            segments=(wide, wide),
            dims={"gate_up_proj": 1, "down_proj": 2},
            parameter_segments={"down_proj": (wide,)},
        )
        splits = {k: v for k, v in plan.splits.items() if ".mlp." not in k}
        splits["model.layers.*.mlp.experts"] = experts
        plan = TensorPlan(splits=splits, patches=plan.patches)
    else:
        config = transformers.AutoConfig.for_model(kind, **size)
    config.tie_word_embeddings = kind == "gemma3_text"
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    return module.train(), ParallelPlan(tensor=plan, hidden_size=models.HIDDEN, ties=ties), 0


def hugging_face(context: Any, kinds: list[str]) -> list[dict[str, Any]]:
    """One step of tiny Hugging Face models over tp, beside one process."""
    rows = []
    for kind in kinds:
        layout = Layout(tp=context.world_size)
        whole, _, _ = llama(kind)
        batches = [models.tokens(batch=2, seed=i) for i in range(2)]
        loss = reference(whole, batches)
        module, plan, _ = llama(kind)
        parallel = parallelize(
            module, layout, plan, mesh=Mesh(layout, context.rank), labels_shifted=True
        )
        found = float(parallel.forward_backward(batches))
        held = [n for n, m in module.named_modules()
                if getattr(getattr(m, "entry", None), "_source", None) is not None]  # fmt: skip
        row = {"kind": kind, "loss": found, "wanted": loss, "held": held}
        rows.append({**row, **compare(parallel, whole)})
    return rows


def cross_entropy(context: Any, vocabulary: int, dtype: str) -> list[float]:
    """Differences of loss and gradient from torch's cross-entropy, over split logits."""
    mesh = Mesh(Layout(tp=context.world_size), context.rank)
    axis = mesh.axis("tp")
    torch.manual_seed(0)
    logits = torch.randn(37, vocabulary) * 20
    labels = torch.randint(0, vocabulary, (37,))
    labels[5:9] = -100
    weights = torch.rand(37)
    whole = logits.to(getattr(torch, dtype)).float().clone().requires_grad_()
    wanted = F.cross_entropy(whole, labels, reduction="none")
    (wanted * weights).sum().backward()
    start, rows, _ = WeightSegment(units=vocabulary, uneven=True).slice(axis.index, axis.size)
    weight = torch.eye(vocabulary)[start : start + rows].to(getattr(torch, dtype))
    x = logits.to(getattr(torch, dtype)).clone().requires_grad_()
    found = vocab_parallel_cross_entropy(
        F.linear(x, weight), labels, axis, start, recorder=mesh.recorder
    )
    (found * weights).sum().backward()
    grad = x.grad.clone().float()
    all_reduce(grad, axis, mesh.recorder)
    with torch.no_grad():
        silent = vocab_parallel_cross_entropy(
            F.linear(x, weight), labels, axis, start, recorder=mesh.recorder
        )
    found, wanted = found.detach(), wanted.detach()
    return [
        float((found - wanted).abs().max()),
        float((silent - found).abs().max()),
        float((grad - whole.grad).abs().max()),
    ]


def dropout(context: Any, layout: str, microbatches: int) -> dict[str, Any]:
    """What dropout left of the activations: whole ones, and the split attention output."""
    where = Layout.parse(layout)
    options = {"dropout": 0.5}
    mesh = Mesh(where, context.rank)
    parallel = parallelize(
        models.small(**options), where, models.small_plan(), mesh=mesh, seed=7,
        schedule=build_schedule(where, microbatches) if where.pp > 1 else None,
    )  # fmt: skip
    masks: dict[str, Any] = {"whole": [], "split": []}
    for stage in parallel.stages:
        for layer in stage.module.get_submodule("model.layers").children():
            if not hasattr(layer, "self_attn"):
                continue
            attention = layer.self_attn
            attention.resid_dropout.register_forward_hook(
                lambda m, args, out: masks["whole"].append((out == 0).flatten()[:64].int().tolist())
            )
            attention.o_proj.register_forward_pre_hook(
                lambda m, args: masks["split"].append((args[0] == 0).flatten()[:64].int().tolist())
            )
    first = mesh.axis("dp").index * microbatches
    batches = [models.tokens(seed=i) for i in range(first, first + microbatches)]
    losses = [float(parallel.forward_backward(batches)) for _ in range(2)]
    return {"masks": masks, "losses": losses, "tp": mesh.axis("tp").index}


def collectives(context: Any) -> dict[str, Any]:
    """Each collective once, on a world of four ranks as dp2.tp2."""
    from hocket.runtime import collectives as c

    mesh = Mesh(Layout(dp=2, tp=2), context.rank)
    mesh.prepare(copies={2})
    tp, world, recorder = mesh.axis("tp"), mesh.axis("world"), mesh.recorder
    rank = float(context.rank)
    found: dict[str, Any] = {}
    half = torch.full((3,), 1 + 2**-8 * rank, dtype=torch.bfloat16)
    all_reduce(half, world, recorder)
    found["bf16"] = half.float().tolist()
    largest = torch.tensor([rank])
    work = all_reduce(largest, tp, recorder, op="max", async_op=True)
    work.wait()
    found["max"] = largest.tolist()
    found["uneven"] = all_gather(
        torch.full((1, tp.index + 1), rank), tp, recorder, dim=1, sizes=[1, 2]
    ).tolist()
    spread = torch.tensor([rank])
    c.broadcast(spread, tp, recorder, source=1)
    found["broadcast"] = spread.tolist()
    found["reduce-scatter"] = c.reduce_scatter(torch.arange(4.0) + rank, world, recorder).tolist()
    whole = torch.arange(4.0) if tp.index == 0 else None
    found["scatter"] = c.scatter(whole, torch.empty(2), tp, recorder).tolist()
    pieces = c.gather(torch.tensor([rank]), tp, recorder, target=1)
    found["gather"] = None if pieces is None else [p.tolist() for p in pieces]
    total = torch.tensor([rank], dtype=torch.bfloat16)
    c.reduce(total, tp, recorder)
    found["reduce"] = total.tolist() if tp.index == 0 else None
    received = torch.empty(1)
    works = [
        c.isend(torch.tensor([rank]), tp, 1 - tp.index, recorder),
        c.irecv(received, tp, 1 - tp.index, recorder),
    ]
    for each in works:
        each.wait()
    found["receive"] = received.tolist()
    c.barrier(world, recorder)
    found["recorded"] = recorder.collectives()
    found["copies"] = list(mesh.copies(2).ranks)
    return json.loads(json.dumps(found))


def meshes(context: Any, layouts: list[str]) -> list[dict[str, int]]:
    """Meshes of many shapes in one world: the sum of the ranks along each axis."""
    found = []
    for text in layouts:
        layout = Layout.parse(text)
        mesh = Mesh(layout, context.rank)
        mesh.prepare(tie=layout.pp > 1)
        names = ["dp", "pp", "tp", "shard", *(["embedding"] if layout.pp > 1 else [])]
        sums = {}
        for name in names:
            total = torch.tensor([context.rank])
            all_reduce(total, mesh.axis(name), mesh.recorder)
            sums[name] = int(total)
        found.append(sums)
    return found


def unequal(context: Any) -> None:
    """A module that differs between ranks."""
    torch.manual_seed(context.rank)
    parallelize(nn.Linear(2, 2), Layout(dp=2))


def generic(context: Any) -> list[float]:
    """Any module, its own loss, data parallel alone."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    whole = torch.nn.functional.mse_loss(module(x), y)
    wanted = torch.autograd.grad(whole, list(module.parameters()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def loss_fn(output: Any, microbatch: Any) -> tuple[torch.Tensor, int]:
        return ((output - microbatch["labels"]) ** 2).sum(), len(output)

    parallel = parallelize(Model(), Layout(dp=2), loss_fn=loss_fn)
    rows = slice(4 * context.rank, 4 * context.rank + 4)

    loss = parallel.forward_backward([{"x": x[rows], "labels": y[rows]}], num_tokens=8)
    gaps = [
        float((p.grad - w).abs().max()) for p, w in zip(parallel.parameters(), wanted, strict=True)
    ]
    return [float(loss) - float(whole), *gaps]


def split_mesh(context: Any, layout: str, tie: bool) -> dict[str, Any]:
    """A mesh on a world that is bound to a device, as a GPU's is; the splits that it takes.

    Gloo's own split loses connections at random, so its groups are made one by one here, after
    the demands of `split_group` on its callers have been checked.
    """
    import inspect

    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cpu", 0)
    assert world._get_backend(world.bound_device_id).supports_splitting
    splits: list[str] = []
    timeouts: list[float] = []
    original = dist.split_group

    def split_group(**given: Any) -> Any:
        arguments = inspect.signature(original).bind(**given).arguments
        rows, name = arguments["split_ranks"], arguments["group_desc"]
        flat = [rank for row in rows for rank in row]
        assert rows
        assert len(flat) == len(set(flat)), "splits overlap"
        # Every rank of the parent takes part, with the same splits, in the same order.
        key = f"split {len(splits)}"
        context.store().set(f"{key} {context.rank}", json.dumps([name, rows]))
        for rank in range(context.world_size):
            assert json.loads(context.store().get(f"{key} {rank}")) == [name, rows]
        splits.append(name)
        timeouts.append(arguments["timeout"].total_seconds())
        bound, world.bound_device_id = (
            world.bound_device_id,
            None,
        )  # no accelerator: Gloo rejects it
        groups = [dist.new_group(row, use_local_synchronization=True) for row in rows]
        world.bound_device_id = bound
        return next((g for g, row in zip(groups, rows, strict=True) if context.rank in row), None)

    dist.split_group = split_group
    mesh = Mesh(Layout.parse(layout), context.rank)
    mesh.prepare(tie=tie)
    sums = {}
    for members, names in mesh.process_groups().items():
        total = torch.tensor([context.rank])
        all_reduce(total, mesh.axis(names[0]), mesh.recorder)
        sums[" ".join(map(str, members))] = int(total)
    return {
        "splits": splits,
        "timeouts": timeouts,
        "members": [list(members) for members in mesh.process_groups()],
        "sums": sums,
    }


def overlapped(context: Any, sequence: bool, model: str = "llama") -> dict[str, Any]:
    """A step of a model over tp as torch orders its backward, and with weight gradients computed
    during collectives: losses, gradients that differ, and the order of what backward did."""
    import gc

    from hocket.models.masks import of_whole_sequences
    from hocket.models.plans import plan_for
    from hocket.runtime.tensor_parallel import overlap

    of_whole_sequences()
    layout = Layout(tp=context.world_size, sequence_parallel=sequence)
    losses, gradients, counted, kept = [], [], [], 0
    ordinary = overlap.overlaps
    order: list[str] = []

    def noted(name: str, label: str) -> None:
        inner = getattr(overlap, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(label)
            return inner(*args, **kwargs)

        setattr(overlap, name, call)

    for name, label in (
        ("all_reduce", "begin"), ("reduce_scatter_flat", "begin"), ("weight_gradient", "dW"),
        ("_note", "wait"),
    ):  # fmt: skip
        noted(name, label)
    for asked in (False, True):
        overlap.overlaps = lambda x, asked=asked: asked
        try:
            module, _, _ = llama(model)
            plan = plan_for(module, sequence=sequence)
            mesh = Mesh(layout, context.rank)
            parallel = parallelize(module, layout, plan, mesh=mesh)
        finally:
            overlap.overlaps = ordinary
        mesh.recorder.clear()
        batches = [models.tokens(batch=2, seed=i) for i in range(2)]
        for batch in batches:
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(2, -1)
        losses.append(float(parallel.forward_backward(batches, num_tokens=30)))
        gradients.append({name: p.grad.clone() for name, p in parallel.named_parameters()})
        counted.append(mesh.recorder.collectives())
        gc.collect()
        kept = sum(isinstance(each, overlap.Overlap) for each in gc.get_objects())
    differ = [n for n, g in gradients[0].items() if not torch.equal(g, gradients[1][n])]
    found = {"losses": losses, "differ": differ, "counted": counted, "kept": kept}
    return {**found, "order": " ".join(order)}
