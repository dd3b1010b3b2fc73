"""What ranks run for the tests of this folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def _llama(**more: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="sdpa", use_cache=False, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _rows(layout: Any, rank: int, count: int) -> slice:
    size = count // layout.dp
    first = layout.coordinate(rank)["dp"] * size
    return slice(first, first + size)


def public(context: Any, layouts: list[str]) -> list[dict[str, float]]:
    """`hocket.parallelize` with transformers' own batches, compared with transformers' own loss."""
    import torch

    import hocket

    whole = _llama()
    ids = torch.randint(0, 96, (8, 16))
    labels = ids.clone()
    labels[::3, 5:9] = -100  # data ranks and microbatches do not count equally many tokens
    positions = torch.arange(16).repeat(8, 1)
    positions[:, 7:] -= 7  # two documents in each row
    labels[:, 7] = -100
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    loss = whole(**batch).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    rows = []
    for text in layouts:
        layout = hocket.Layout.parse(text)
        parallel = hocket.parallelize(copy.deepcopy(whole), text, schedule="gpipe", microbatches=2)
        mine = {key: value[_rows(layout, context.rank, 8)] for key, value in batch.items()}
        chunks = {key: value.chunk(2) for key, value in mine.items()}
        microbatches = [{key: value[m] for key, value in chunks.items()} for m in range(2)]
        total, tokens = parallel.evaluate(microbatches)
        counted = parallel.count_tokens(microbatches)
        found = parallel.forward_backward(microbatches)
        rows.append(
            {
                "loss": abs(float(found) - float(loss)),
                "evaluated": abs(total / tokens - float(loss)),
                "tokens": abs(tokens - int((labels[:, 1:] != -100).sum())) + abs(tokens - counted),
                "norm": abs(float(parallel.clip_grad_norm(0)) - float(norm)) / float(norm),
            }
        )
    return rows


def smoothed(context: Any, layouts: list[str]) -> list[dict[str, Any]]:
    """A loss function of the caller's, with label smoothing and transformers' labels, through
    `hocket.parallelize` and through a loop over plain transformers, in fp64."""
    import torch
    from torch.nn import functional

    import hocket

    def loss_of(output: Any, microbatch: Any) -> Any:
        labels = functional.pad(microbatch["labels"][:, 1:], (0, 1), value=-100)
        logits = output.logits.flatten(0, 1)
        total = functional.cross_entropy(
            logits, labels.flatten(), reduction="sum", label_smoothing=0.2
        )
        return total, (labels != -100).sum()

    whole = _llama().double()
    ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::3, 5:9] = -100
    batch = {"input_ids": ids, "labels": labels}
    plain = copy.deepcopy(whole)
    total, tokens = loss_of(plain(input_ids=ids), batch)
    loss = total / tokens
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    rows = []
    for text in layouts:
        parallel = hocket.parallelize(
            copy.deepcopy(whole), text, loss_fn=loss_of, schedule="gpipe", microbatches=2
        )
        mine = {k: v[_rows(parallel.layout, context.rank, 8)] for k, v in batch.items()}
        chunks = {key: value.chunk(2) for key, value in mine.items()}
        microbatches = [{key: value[m] for key, value in chunks.items()} for m in range(2)]
        evaluated, counted = parallel.evaluate(microbatches)
        found = parallel.forward_backward(microbatches)
        worst = 0.0
        for name, gradient in parallel.gradients().items():
            placement = parallel.placements[name]
            local = gradient.reshape(placement.local_shape)
            for block in placement.blocks:
                gap = (local[block.in_local] - expected[name][block.in_global]).abs().max()
                worst = max(worst, float(gap / expected[name].abs().max()))
        length = float(parallel.clip_grad_norm(0))
        row = {"gradient": worst, "norm": abs(length - norm) / norm}
        row |= {"loss": abs(float(found - loss)), "evaluated": abs(evaluated / counted - loss)}
        rows.append({k: float(v) for k, v in row.items()} | {"tokens": counted == int(tokens)})
    return rows


def own_loop(context: Any, layouts: list[str], folder: str, steps: int) -> dict[str, Any]:
    """A loop over plain transformers and the same through `parallelize`, on next = P[token].

    The first layout trains half of the steps and saves; each of the others goes on from there.
    """
    import torch
    from transformers import LlamaForCausalLM

    import hocket

    follows = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    rows = [torch.randint(0, 96, (8,), generator=torch.Generator().manual_seed(4))]
    for _ in range(15):
        rows.append(follows[rows[-1]])
    ids = torch.stack(rows, 1)
    batch = {"input_ids": ids, "labels": ids}
    plain = _llama()
    fresh = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(float(loss))
    plain.eval()
    found: dict[str, Any] = {"expected": expected[-1]}
    for number, text in enumerate(layouts):
        layout = hocket.Layout.parse(text)
        parallel = hocket.parallelize(copy.deepcopy(fresh), layout).train()
        mine = {key: value[_rows(layout, context.rank, 8)] for key, value in batch.items()}
        parts = [mine]
        if parallel.schedule is not None:
            count = parallel.schedule.num_microbatches
            chunks = {key: value.chunk(count) for key, value in mine.items()}
            parts = [{key: value[m] for key, value in chunks.items()} for m in range(count)]
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        checkpoints = Path(folder) / "checkpoints"
        losses = []
        if number:
            assert parallel.load_checkpoint(checkpoints, optimizer) == {"epoch": 3}
            assert parallel.step == steps // 2
        while parallel.step < steps:
            losses.append(float(parallel.forward_backward(parts)))
            parallel.clip_grad_norm(1.0)
            optimizer.step()
            if not number and parallel.step == steps // 2:
                parallel.save_checkpoint(checkpoints, optimizer, extra={"epoch": 3})
        began = expected[steps // 2 :] if number else expected
        row = {"loss": max(abs(a - b) for a, b in zip(losses, began, strict=True))}
        state = parallel.eval().state_dict()
        assert all(not stage.module.training for stage in parallel.stages)
        exported = parallel.export(Path(folder) / f"model-{number}")
        prompts = [*ids[:2, :3].tolist(), ids[2, :5].tolist()]
        row["tokens"] = parallel.generate(prompts, max_new_tokens=5)
        if context.rank == 0:
            other = copy.deepcopy(fresh)
            other.load_state_dict(state)
            read = LlamaForCausalLM.from_pretrained(exported, attn_implementation="sdpa")
            with torch.no_grad():
                logits = plain(input_ids=ids).logits
                row["state"] = float((other.eval()(input_ids=ids).logits - logits).abs().max())
                row["export"] = float((read.eval()(input_ids=ids).logits - logits).abs().max())
                row["equal"] = all(torch.equal(state[n], p) for n, p in read.state_dict().items())
                best = other(input_ids=ids[:, :-1]).logits.argmax(-1)
            row["next"] = float((best == ids[:, 1:]).float().mean())
            row["copies"] = float((best == ids[:, :-1]).float().mean())
            row["follows"] = [
                torch.equal(torch.tensor(tokens), follows[torch.tensor([prompt[-1], *tokens[:-1]])])
                for prompt, tokens in zip(prompts, row["tokens"], strict=True)
            ]
        found[text] = row
    return found


def own_optimizers(context: Any, folder: str) -> dict[str, Any]:
    """An optimizer that divides by the norm of each tensor and counts its steps in a number, with
    a learning rate that decays from the last one: plain, and through `parallelize`, where half of
    the steps are of another layout; what a step of shards raises."""
    import torch

    import hocket

    class Normed(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
                    p -= group["lr"] / state["count"] * state["mean"] / state["mean"].norm()

    def train(model: Any, optimizer: Any, schedule: Any, steps: int) -> None:
        for _ in range(steps):
            if isinstance(model, torch.nn.Module):
                optimizer.zero_grad()
                model(**batch).loss.backward()
            else:
                rows = _rows(model.layout, context.rank, 4)
                parts = [{k: v[rows].chunk(2)[n] for k, v in batch.items()} for n in range(2)]
                model.forward_backward(parts)
            optimizer.step()
            schedule.step()

    def scheduled(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    ids = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    fresh = _llama().double()
    plain = copy.deepcopy(fresh)
    optimizer = Normed(plain.parameters())
    train(plain, optimizer, scheduled(optimizer), 6)
    found: dict[str, Any] = {}
    for text in ("pp2", "dp2"):
        parallel = hocket.parallelize(copy.deepcopy(fresh), text, schedule="gpipe", microbatches=2)
        optimizer = Normed(parallel.parameters())
        schedule = scheduled(optimizer)
        if text == "dp2":
            schedule.load_state_dict(parallel.load_checkpoint(folder, optimizer))
        train(parallel, optimizer, schedule, 3)
        parallel.save_checkpoint(folder, optimizer, extra=schedule.state_dict())
    values = parallel.state_dict(rank0_only=False)
    found["difference"] = max(
        float((values[n] - p).abs().max()) for n, p in plain.named_parameters()
    )
    for text in ("tp2", "dp2:zero=1"):
        parallel = hocket.parallelize(copy.deepcopy(fresh), text)
        for kind in (Normed, torch.optim.Adafactor, torch.optim.AdamW):
            optimizer = kind(parallel.parameters())
            try:
                train(parallel, optimizer, scheduled(optimizer), 1)
                found[f"{kind.__name__} {text}"] = ""
            except hocket.HocketError as error:
                found[f"{kind.__name__} {text}"] = str(error)
    optimizer.state[next(iter(optimizer.state))]["history"] = [1.0]
    try:
        parallel.save_checkpoint(folder, optimizer)
    except hocket.HocketError as error:
        found["list"] = str(error)
    return found


def buffers(context: Any, layouts: list[str], folder: str) -> dict[str, Any]:
    """A router's correction bias, which is a buffer, after its owner changed it: in a checkpoint
    that another layout reads, in `state_dict` and in what each layout exports."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import hocket
    from tests.families import EXPERTS

    bias = "e_score_correction_bias"
    found: dict[str, Any] = {}
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(2))
    for number, text in enumerate(layouts):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS["deepseek_v3"]))
        parallel = hocket.parallelize(model, text, schedule="gpipe", microbatches=2)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        if number:
            parallel.load_checkpoint(folder, optimizer)
        else:
            for stage in parallel.stages:
                for name, buffer in stage.module.named_buffers():
                    if bias in name:
                        buffer += torch.arange(len(buffer)) / 10
            rows = _rows(parallel.layout, context.rank, 4)
            parts = [{"input_ids": p, "labels": p} for p in ids[rows].chunk(2)]
            parallel.forward_backward(parts)
            optimizer.step()
            parallel.save_checkpoint(folder, optimizer)
        exported = parallel.export(Path(folder) / f"model-{number}")
        state = parallel.state_dict()
        if context.rank == 0:
            read = AutoModelForCausalLM.from_pretrained(exported).state_dict()
            found[text] = {
                "export": all(torch.equal(state[name], value) for name, value in read.items()),
                "bias": [value.tolist() for name, value in sorted(read.items()) if bias in name],
                "logits": read["lm_head.weight"].sum().item(),
            }
    return found


def no_buffers(context: Any, layouts: list[str], folder: str) -> dict[str, Any]:
    """A checkpoint as it was written before buffers were saved: what rank 0 of each layout warns of
    and the buffers then, and the error of an export."""
    import warnings

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import hocket
    from hocket.runtime import rank_state
    from hocket.training.export import ModelFiles, export_checkpoint
    from tests.families import EXPERTS

    found: dict[str, Any] = {}
    for number, text in enumerate(layouts):
        config = AutoConfig.for_model(**EXPERTS["deepseek_v3"])
        parallel = hocket.parallelize(AutoModelForCausalLM.from_config(config), text)
        mine = dict(rank_state.saved_buffers(parallel))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        if not number:
            saved = rank_state.saved_buffers
            rank_state.saved_buffers = lambda parallel: iter(())
            written = parallel.save_checkpoint(folder, optimizer)
            rank_state.saved_buffers = saved
        before = {name: buffer.fill_(7).clone() for name, buffer in mine.items()}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            parallel.load_checkpoint(folder, optimizer)
        kept = all(torch.equal(buffer, before[name]) for name, buffer in mine.items())
        found[text] = [str(one.message) for one in seen if "buffers" in str(one.message)], kept
    if context.rank:  # one process exports
        return found
    try:
        files = ModelFiles(config=config.to_dict())
        export_checkpoint(Path(written), Path(folder) / "model", files)
    except hocket.HocketError as error:
        found["export"] = str(error)
    return found


def router_loss(context: Any, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Mixtral with its router's auxiliary loss, compared with gradient accumulation over plain
    transformers: for each layout and number of microbatches."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    import hocket

    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.5, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = MixtralForCausalLM._from_config(config, experts_implementation="eager").double()
    ids = torch.randint(0, 96, (8, 16))
    labels = ids.clone()
    labels[:3, 4:12] = -100
    tokens = int((labels[:, 1:] != -100).sum())
    rows = []
    for text, count in cases:
        layout = hocket.Layout.parse(text)
        plain = copy.deepcopy(whole)
        losses = []
        for number in range(count):  # the same microbatch of all data ranks is one
            part, target = (
                torch.cat(rows.chunk(count * layout.dp)[number::count]) for rows in (ids, labels)
            )
            more = {} if count == 1 else {"num_items_in_batch": tokens / count}
            own = plain(input_ids=part, labels=target, **more).loss / count
            own.backward()
            losses.append(float(own.detach()))
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        parallel = hocket.parallelize(copy.deepcopy(whole), layout)
        mine = _rows(layout, context.rank, 8)
        parts = zip(ids[mine].chunk(count), labels[mine].chunk(count), strict=True)
        loss = parallel.forward_backward([{"input_ids": i, "labels": t} for i, t in parts])
        off = 0.0
        for name, gradient in parallel.gradients().items():
            for there, here in parallel.placements[name].pairs():
                wanted = gradients[name][there]
                largest = float(gradients[name].abs().max())
                off = max(off, float((gradient[here] - wanted).abs().max()) / largest)
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        ours = parallel.clip_grad_norm(0.1)
        rows.append(
            {
                "loss": abs(float(loss) - sum(losses)),
                "cross_entropy": float(
                    plain(input_ids=ids, labels=labels, output_router_logits=False).loss.detach()
                ),
                "expected": sum(losses),
                "gradient": off,
                "norm": abs(float(ours) - float(norm)) / float(norm),
                "dtype": str(ours.dtype),
            }
        )
    return rows


def rejected(context: Any) -> dict[str, str]:
    """Messages of what `parallelize` rejects; empty where it does not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import hocket

    small = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    cases = {
        "falcon alibi": ("falcon", {"alibi": True, "bias": True}, "tp2"),
        "gpt_neox_japanese": ("gpt_neox_japanese", {}, "tp2:sequence_parallel=true"),
        "mixtral pp2": ("mixtral", {"output_router_logits": True, "num_local_experts": 2}, "pp2"),
        "opt mlp": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "dp2:recompute=mlp"),
        "bamba z-loss": (
            "bamba",
            {
                "z_loss_coefficient": 0.1,
                "attn_layer_indices": [1],
                "num_key_value_heads": 2,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 16,
            },
            "dp2",
        ),
    }
    found = {}
    for name, (kind, values, layout) in cases.items():
        config = AutoConfig.for_model(kind, **{**small, **values})
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config)
        try:
            hocket.parallelize(module, layout)
            found[name] = ""
        except hocket.HocketError as error:
            found[name] = f"{error.message} | {error.hint}"
    return found


def padded(context: Any, cases: list[tuple[str, str]]) -> list[Any]:
    """Loss and norm of the gradient of left-padded rows, compared with plain transformers; the
    message where a layout is rejected."""
    import torch

    import hocket
    from hocket.models.proxy import proxy_of
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of
    from hocket.spec.errors import HocketError

    found: list[Any] = []
    for kind, text in cases:
        plain = (
            proxy_of(config_of(sample_config(kind), dropout=0.0)).build(attention="sdpa").train()
        )
        ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for row, padding in enumerate((5, 0, 3, 0)):
            mask[row, :padding] = 0
            ids[row, :padding] = plain.config.pad_token_id or 0
        batch = {
            "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100),
        }  # fmt: skip
        loss = plain(**batch).loss
        loss.backward()
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        plain.zero_grad()
        try:
            parallel = hocket.parallelize(plain, text, schedule="gpipe", microbatches=1)
        except HocketError as error:
            found.append(str(error))
            continue
        total = float(parallel.forward_backward([batch])) / loss.item()
        length = float(parallel.clip_grad_norm(0)) / norm
        found.append([abs(total - 1), abs(length - 1)])
    return found


def frozen(context: Any, cases: list[tuple[str, tuple[str, ...]]]) -> list[dict[str, float]]:
    """A step of a model of which some modules train alone, compared with plain PyTorch in fp64."""
    import torch
    from torch.nn import functional

    import hocket

    ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))
    rows = []
    for text, trained in cases:
        plain = _llama().double()
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
        split = copy.deepcopy(plain)
        logits = plain(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        norm = float(torch.nn.utils.get_total_norm(list(expected.values())))
        parallel = hocket.parallelize(split, text, microbatches=2)
        parts = ids[_rows(parallel.layout, context.rank, 8)].chunk(2)
        found = parallel.forward_backward([{"input_ids": part, "labels": part} for part in parts])
        row = {"loss": abs(float(found - loss.detach())), "gradient": 0.0}
        for name, gradient in parallel.gradients().items():
            placement = parallel.placements[name]
            local = gradient.reshape(placement.local_shape)
            for block in placement.blocks:
                gap = local[block.in_local] - expected[name][block.in_global]
                row["gradient"] = max(row["gradient"], float(gap.abs().max()))
        row["norm"] = abs(float(parallel.clip_grad_norm(0)) - norm) / norm
        rows.append(row)
    return rows


def _read(parallel: Any, batch: list[Any], plain: Any, loss_of: Any, row: dict[str, float]) -> None:
    """Add to `row` how far what readers of all kinds find is from the plain model's."""
    import torch

    total, tokens = parallel.evaluate(batch)
    with torch.no_grad():
        row["evaluated"] = max(row["evaluated"], abs(total / tokens - float(loss_of(plain))))
    state = parallel.state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        row["state"] = max(row["state"], float((state[name] - value).abs().max()))
    parallel.generate([[5, 6, 7]], max_new_tokens=2)


def read_between(context: Any, layouts: list[str]) -> list[dict[str, float]]:
    """Three steps with readers of all kinds before and after each optimizer step, whose tensors are
    also written by hand, compared with the same over plain PyTorch in fp64."""
    import torch
    from torch.nn import functional

    import hocket

    ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))

    def loss_of(module: Any) -> Any:
        logits = module(input_ids=ids).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def scaled(tensors: Any) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1.01)

    rows = []
    for text in layouts:
        plain = _llama().double()
        split = copy.deepcopy(plain)
        parallel = hocket.parallelize(split, text, microbatches=2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        parts = ids[_rows(parallel.layout, context.rank, 8)].chunk(2)
        batch = [{"input_ids": part, "labels": part} for part in parts]
        row = {"loss": 0.0, "evaluated": 0.0, "state": 0.0}
        for _ in range(3):
            scaled(plain.parameters())
            scaled(parallel.parameters())
            _read(parallel, batch, plain, loss_of, row)
            theirs.zero_grad()
            loss = loss_of(plain)
            loss.backward()
            found = parallel.forward_backward(batch)
            row["loss"] = max(row["loss"], abs(float(found - loss.detach())))
            _read(parallel, batch, plain, loss_of, row)
            theirs.step()
            optimizer.step()
            _read(parallel, batch, plain, loss_of, row)
        rows.append(row)
    return rows


def dropped(context: Any, layouts: list[str]) -> list[dict[str, int]]:
    """Warnings in loops that step, that do not, that clear gradients, and whose optimizer was made
    before the model was parallelized."""
    import warnings

    import torch

    import hocket

    ids = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    rows = []
    for text in layouts:
        row = {}
        for kind in ("stepped", "accumulated", "cleared", "before"):
            model = _llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            parallel = hocket.parallelize(model, text, microbatches=2)
            if kind != "before":
                optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.0)
            batch = [{"input_ids": part, "labels": part} for part in ids.chunk(2)]
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in range(3):
                    parallel.forward_backward(batch)
                    if kind in ("stepped", "before"):
                        optimizer.step()
                    elif kind == "cleared":
                        optimizer.zero_grad()
            row[kind] = sum("are dropped" in str(one.message) for one in found)
        rows.append(row)
    return rows
