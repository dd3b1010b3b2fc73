"""Causal types of transformers, rehearsed in training and serving: a part, chosen by the commit.

`python -m tests.rehearsal.types` is the whole: about 190 types, five jobs each.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hocket.cost.measured_memory import gpu_memory_rows, gpu_step
from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.jobs.rehearse import Rehearsed, prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.models import registry
from hocket.models.trace import trace
from hocket.spec.model_shape import ModelShape
from tests.rehearsal.types import OK, REJECTED, STEPS, rehearsed, tiny_model
from tests.rotation import part

JOBS = [(kind, *step) for kind in sorted(registry.causal_classes()) for step in STEPS]
SHARE = len(JOBS) // 3 + 1
"""One in so many jobs: three, of different steps."""
WIDTHS_BY_VALUE = ("qwen4_exp_text",)
"""Their forward reads values, so that theory does not know how much their ranks sum."""


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "step", "layout"), part(JOBS, SHARE))
def test_a_type_completes_or_is_rejected_with_a_reason(
    workers: RehearsalWorkers, tmp_path: Path, kind: str, step: str, layout: str
) -> None:
    """No crash and no hang, and what is rejected is rejected by a rule of ours."""
    row = rehearsed(kind, step, layout, workers, tmp_path)
    assert row["outcome"] in (OK, REJECTED), row
    assert row["outcome"] == OK or row["why"], row
    assert "Traceback" not in row["why"], row
    assert not re.search(r"(^|; )(collectives|memory): \w+(Error|Exception)\b", row["why"]), row
    assert "hocket_paged" not in row["why"], row
    if step == "train" and kind not in WIDTHS_BY_VALUE:
        assert not row.get("different"), row


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "layout", "tokens"),
    part(
        [
            ("falcon", "tp2", 64),  # one key/value head within a fused matrix, on every rank
            (
                "falcon",
                "dp2:zero=2",
                64,
            ),  # hands PyTorch a mask: keys and values of each query head
            ("rembert", "dp2:zero=2", 64),  # a head that is wider than the vocabulary before it
            ("openai-gpt", "tp2", 64),  # a layer that returns a list
            ("gpt_oss", "tp2", 64),  # experts that tensor parallelism does not split
            ("gpt_oss", "dp2", 512),  # sinks: flex attention saves no scores
            ("gpt_oss", "tp2:recompute=selective", 512),
            ("gemma2", "dp2", 512),  # soft caps, likewise
            ("granitemoe_swa", "tp2", 64),
            ("llama4_text", "tp2", 64),  # stacked experts as [experts, in, out]
            (
                "doge",
                "dp2",
                64,
            ),  # positions are selected in sequences that are longer than this one
            ("inkling_text", "dp2", 64),  # the widest tensor is an inner one of attention
            ("doge", "tp2", 64),  # the head's norm is written out: its backward is the peak
            ("hy_v4", "tp2", 64),  # that norm is as wide as four streams
            ("kimi_linear", "tp2", 64),  # a recurrence adds to gradients of whole sequences
            ("zamba2", "dp2", 64),  # the attention of one layer is that of later ones
            ("minimax", "tp2", 64),  # autograd holds buffers, as many elements as 4,096 tokens
            ("minimax", "tp2", 1024),  # tables of decays, [heads, 256, 256], which no rank splits
            ("bailing_hybrid", "cp2", 512),  # scans in blocks of 64 tokens, two a rank at least
            (
                "bailing_hybrid",
                "cp2",
                64,
            ),  # a rank's chunks, of 16 tokens, are padded to such blocks
        ],
        4,
    ),
)
def test_predicted_memory_is_within_5_percent(
    workers: RehearsalWorkers, tmp_path: Path, kind: str, layout: str, tokens: int
) -> None:
    row = rehearsed(kind, "train", layout, workers, tmp_path, tokens)
    assert row["outcome"] == OK, row
    assert abs(row["error"]) <= 0.05, row


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "layout"),
    part(
        [
            ("gemma4_text", "cp2"),  # heads of two sizes
            ("diffllama", "cp2"),  # asks for attention twice a layer
            ("hrm_text", "cp2"),  # runs its layers many times, some without gradients
            ("hrm_text", "tp2"),
            ("electra", "tp2"),  # an embedding that is narrower than the hidden state
            ("llama4_text", "tp2"),  # experts that get all tokens, weighted before
            ("zaya", "tp2"),  # sums of several widths
            ("rwkv", "tp2"),  # parameters of three dims that are no experts'
            ("qwen3_next", "tp2"),  # split layers of one block that read two tensors
            ("qwen3_5_text", "tp2:recompute=full"),
            ("rembert", "tp2"),  # an embedding and a head wider than the hidden state
        ],
        4,
    ),
)
def test_collectives_are_those_of_theory(
    workers: RehearsalWorkers, tmp_path: Path, kind: str, layout: str
) -> None:
    row = rehearsed(kind, "train", layout, workers, tmp_path)
    assert row["outcome"] == OK, row
    assert row["different"] == [], row
    assert "collectives" not in row["why"], row
    assert not any("modeling_utils" in read for read in row["host_reads"]), row


def _one_rank(
    kind: str, layout: str, workers: RehearsalWorkers, tmp_path: Path
) -> tuple[Rehearsed, ModelShape]:
    """A tiny model of a type rehearsed on CUDA, one sequence of 64 tokens a step, and its shape."""
    model = tiny_model(kind, workers, tmp_path)
    given = {"model": model, "layout": layout, "seq_len": 64, "dtype": "bf16", "device": "cuda"}
    found = rehearse_job(prepare_rehearsal(request(given), rows=1), workers=workers)
    return found, trace(dict(found.job.spec.config), name=kind)


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_buffers_of_modules_count_with_the_parameters_of_each_rank(
    workers: RehearsalWorkers, tmp_path: Path
) -> None:
    """Those of MiniMax's linear attention are no rank's shard, and larger than its parameters."""
    found, shape = _one_rank("minimax", "tp2", workers, tmp_path)
    job, (executed, *_) = found.job, found.executed.values()
    row = gpu_memory_rows(shape, job.spec, job.schedule)[0]
    held = executed.standing["parameters"] + executed.standing["other"]
    assert executed.standing["other"] > 2 * executed.standing["parameters"]
    assert row["parameters"] == pytest.approx(held, rel=0.01)


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["qwen3_next", "minimax_m2"])
def test_a_planned_step_gathers_what_ranks_gather(
    workers: RehearsalWorkers, tmp_path: Path, kind: str
) -> None:
    """Recurrent layers of Qwen3-Next and norms over all heads of MiniMax-M2 read whole outputs of
    split projections, in a forward run again too; the latter's output projection has a whole input.
    """
    found, shape = _one_rank(kind, "tp2:recompute=full", workers, tmp_path)
    share = gpu_step(shape, found.job.spec, found.job.schedule).share(0)
    widths = [*share.forward_gathers, *share.repeated_gathers, *share.backward_gathers]
    assert bool(share.backward_gathers) == (kind == "minimax_m2")
    tokens, ranks = 64, 2
    loss = tokens * ranks * 2 * 4  # two numbers in fp32 of each token and rank
    (row,) = (r for r in found.report.collectives if (r["name"], r["axis"]) == ("all-gather", "tp"))
    assert row["count"] == ranks * (len(widths) + 1)
    assert row["bytes"] == ranks * (2 * tokens * sum(widths) + loss)
