"""Latent attention is cached as latent vectors, and attended to as keys and values are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.jobs.serving import check  # noqa: E402
from hocket.models import skeleton  # noqa: E402
from hocket.models.latent import LatentHeads, latent_heads  # noqa: E402
from hocket.models.samples import sample_config  # noqa: E402
from hocket.models.source import resolve_model  # noqa: E402
from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.runtime.pipeline.stage import Stage  # noqa: E402
from hocket.serving.engine import attention, attention_latent  # noqa: E402
from hocket.serving.engine.attention import Options  # noqa: E402
from hocket.serving.engine.attention_cpu import CpuAttention  # noqa: E402
from hocket.serving.engine.attention_kernels import Choice, Chosen  # noqa: E402
from hocket.serving.engine.attention_step import indices  # noqa: E402
from hocket.serving.engine.cache import BlockTables, LayerShape, PagedCache  # noqa: E402
from hocket.serving.engine.device_step import DeviceTables  # noqa: E402
from hocket.serving.engine.families import self_check  # noqa: E402
from hocket.serving.engine.runner import StageRunner  # noqa: E402
from hocket.serving.scheduling.step import LAST, BatchRow, StepPlan  # noqa: E402
from tests.families import EXPERTS  # noqa: E402
from tests.ranks import RankPool  # noqa: E402
from tests.serving.paged import ToyScheduler, compare_pages  # noqa: E402
from tests.serving.recorded_graph import Recorder  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

A, P, R, L, E = 4, 6, 4, 10, 5


def heads_of(seed: int = 0) -> LatentHeads:
    torch.manual_seed(seed)
    return LatentHeads(torch.randn(A, P + E, L), P, R)


def definition(heads: LatentHeads, query: Any, cached: Any, options: Options) -> Any:
    """Query [A, S, P + R] over a whole sequence's latent vectors [S, L + R], in fp64, by keys and
    values: [S, A, E]."""
    latent, rotary = cached.double().split([L, R], -1)
    keys = torch.cat([torch.einsum("apl,sl->asp", heads.keys.double(), latent),
                      rotary.expand(A, -1, -1)], -1)  # fmt: skip
    values = torch.einsum("ael,sl->ase", heads.values.double(), latent)
    scores = torch.einsum("asd,atd->ast", query.double(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    at = torch.arange(query.shape[1])
    hidden = at > at.unsqueeze(1)
    if options.window is not None:
        hidden |= at <= at.unsqueeze(1) - options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double().view(-1, 1, 1).expand(-1, query.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("ast,ate->sae", scores.softmax(-1)[..., : query.shape[1]], values)


OPTIONS = [
    Options(0.3),
    Options(0.3, window=7),
    Options(0.3, softcap=2.0),
    Options(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_both_forms_equal_the_definition(
    case: int, device_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_latent, "_PIECE", 8)
    options, heads, block = OPTIONS[case], heads_of(), 4
    lengths = (23, 14)
    query = [torch.randn(A, n, P + R) for n in lengths]
    cached = [torch.randn(n, L + R) for n in lengths]
    expected = [definition(heads, q, c, options) for q, c in zip(query, cached, strict=True)]
    shape = LayerShape(A, 1, L + R, L, torch.float32, latent=True)
    cpu = torch.device("cpu")
    cache = PagedCache([shape], 16, block, cpu, heads_first=not device_path)
    tables = BlockTables(2, 8)
    device = DeviceTables(2, 8, 64, block_size=block, spare_block=15, device=cpu)
    free = [13, 2, 7, 5, 11, 0, 9, 3, 1, 6, 4]
    done = [0, 0]
    for counts in ((9, 1), (5, 6), (1, 6), (8, 1)):
        rows, order = [], sorted((0, 1), key=lambda slot: counts[slot] != 1)
        for slot in order:
            need = -(-(done[slot] + counts[slot]) // block) - -(-done[slot] // block)
            new = [free.pop() for _ in range(need)]
            rows.append(BatchRow(slot, done[slot], counts[slot], LAST, new))
        plan = StepPlan(0, rows, [0] * sum(counts))
        where = [slice(done[slot], done[slot] + counts[slot]) for slot in order]
        q = torch.cat([query[slot][:, at] for slot, at in zip(order, where, strict=True)], 1)
        latent = torch.cat([cached[slot][at] for slot, at in zip(order, where, strict=True)])
        heads(latent[None, None, :, :L], latent[None, None, :, L:])
        if device_path:
            step = _sent(device, plan)
            pool = cache.keys[0]
            pool.view(-1, L + R).index_copy_(0, step.places, heads.taken())
            found = attention_latent.attend_heads(heads, q, pool, step, options)
            mixed = attention_latent.attend_absorbed(heads.absorb(q), pool, step, options, L)
            read = heads.read(mixed.transpose(0, 1)).transpose(0, 1)
            assert torch.allclose(read, found, atol=1e-5)
        else:
            tables.apply(plan)
            attending = CpuAttention(cache, indices(plan, tables, block))
            found = attending.attend_latent(heads, q[None], options)[0]
        want = torch.cat([expected[s][at] for s, at in zip(order, where, strict=True)])
        assert float((found - want).abs().max()) < 2e-5, counts
        for slot in (0, 1):
            done[slot] += counts[slot]
    assert tuple(done) == lengths


def _sent(tables: DeviceTables, plan: StepPlan) -> Any:
    changes = tables.apply(plan)
    return tables.send(tables.host(plan), changes)


def test_a_layer_that_expands_otherwise_keeps_keys_and_values() -> None:
    module: Any = skeleton.build_skeleton(EXPERTS["deepseek_v3"], device="cpu")
    layer = module.model.layers[0].self_attn
    with torch.no_grad():
        layer.kv_b_proj.weight.normal_()
    assert latent_heads(layer) is not None
    own = layer.expand_kv
    layer.expand_kv = lambda latent, rotary: tuple(2 * x for x in own(latent, rotary))
    assert latent_heads(layer) is None


def paged(config: dict[str, Any], **options: Any) -> tuple[Any, StageRunner]:
    plain: Any = skeleton.build_skeleton(config, device="cpu").eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    module: Any = skeleton.build_skeleton(config, device="cpu", attention=attention.NAME)
    module.load_state_dict(plain.state_dict())
    runner = StageRunner(
        Stage(module), Mesh.single(), module.config, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=64, **options,
    )  # fmt: skip
    return plain, runner


def test_pages_hold_the_latent_vector_and_the_rotary_key_alone() -> None:
    config = EXPERTS["deepseek_v3"]
    _, runner = paged(config)
    runner.allocate(8)
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert runner.bytes_per_block == 4 * width * 4 * config["num_hidden_layers"]
    assert runner.cache is not None
    assert {pool.shape for pool in runner.cache.keys} == {(8, 1, 4, width)}
    assert self_check(config) < 1e-4


def test_a_decode_step_is_captured_and_replayed() -> None:
    """As on a GPU, by torch's operations: captured, nothing may read a value."""
    config = {**EXPERTS["deepseek_v3"], "first_k_dense_replace": 4}  # experts read on the host

    def chooser(kinds: Any, block: Any) -> Choice:
        return Choice(tuple(Chosen(kind, 1, "latent", {}) for kind in dict.fromkeys(kinds)), 4)

    plain, runner = paged(config, chooser=chooser, graphs=Recorder())
    graphs = runner.capture(96)
    assert graphs.reason == ""
    sequences = [list(range(3, 30)), [9, 8, 7, 21]]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens])).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(sequences, block_size=4, num_blocks=96, every_logit=True)
    scale = max(float(e.abs().max()) for e in expected)
    assert compare_pages(scheduler, runner.run, expected) < 1e-5 * scale
    assert graphs.replays > 0


@pytest.mark.ranks
@pytest.mark.train
@pytest.mark.parametrize("kind", ["deepseek_v2", "minicpm3"])
def test_heads_divide_over_tensor_ranks_and_latent_vectors_do_not(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    file, folder = tmp_path / f"{kind}.json", tmp_path / "model"
    file.write_text(json.dumps(sample_config(kind)))
    check.prepare_checked_model(ranks.launcher, resolve_model(file), folder, proxy=True, seed=0)
    answers = check.answers_of(ranks.launcher, folder, "tp2", check.CheckedSizes())
    (report,) = check.layout_reports(ranks.launcher, folder, {"tp2": answers}, tmp_path).values()
    assert report.ok, report.failures
