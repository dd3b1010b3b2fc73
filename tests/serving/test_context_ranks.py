"""Served over context ranks: each has its tokens of every block, and answers are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.serving import check, request
from hocket.jobs.serving.context import require_divided_blocks
from hocket.models.samples import sample_config
from hocket.models.source import resolve_model
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.serving import ServeOptions
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.train, pytest.mark.timeout(200)]

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 256,
}  # fmt: skip
LONG, HALF = check.CheckedSizes(longest=128), check.CheckedSizes(longest=64)
"""Chunks of 64 and 32 tokens, which are split over ranks; of the usual size every rank computes all
of them."""


@pytest.mark.parametrize(
    ("config", "layout", "size"),
    [
        (LLAMA, "cp2", LONG),
        (LLAMA, "cp2", check.CheckedSizes()),
        (LLAMA, "tp2.cp2", LONG),
        (LLAMA, "pp2.cp2", LONG),
        (GPT_OSS, "cp4", LONG),
        ("deepseek_v2", "cp2", HALF),
        ("gemma2", "cp2", HALF),
        ("bamba", "tp2.cp2", HALF),
        ("lfm3", "cp2", HALF),  # whose convolutions read 6 earlier inputs
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_equal_plain_transformers(
    ranks: RankPool, tmp_path: Path, config: Any, layout: str, size: check.CheckedSizes
) -> None:
    """Grouped heads, tensor ranks, stages, windows and sinks, latent vectors, soft caps, recurrent
    layers."""
    file, folder = tmp_path / "model.json", tmp_path / "model"
    proxy = isinstance(config, str)
    file.write_text(json.dumps(sample_config(config) if proxy else config))
    request.legal_server_layout(resolve_model(file), Layout.parse(layout), "cpu")
    check.prepare_checked_model(ranks.launcher, resolve_model(file), folder, proxy=proxy, seed=0)
    answers = check.answers_of(ranks.launcher, folder, layout, size)
    (report,) = check.layout_reports(ranks.launcher, folder, {layout: answers}, tmp_path).values()
    assert report.ok, report.failures
    assert {one.name for one in report.comparisons} >= {"chunked prefill", "preemption"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "bamba", "deepseek_v3"])
def test_a_proxy_model_has_positions_for_prompts_that_are_split(kind: str) -> None:
    """Of fewer, every rank would compute all, and `hocket serve` would have checked no split."""
    from hocket.models.proxy import proxy_of
    from hocket.models.skeleton import config_of
    from hocket.serving.engine.refusal import longest_sequence

    config = proxy_of(config_of(sample_config(kind))).config
    needed = check.longest_of(Layout(cp=check.BLOCK["cpu"]))
    assert (longest_sequence(config) or needed) >= needed


def test_what_does_not_divide_is_rejected_before_ranks_start(
    ranks: RankPool, tmp_path: Path
) -> None:
    file, folder = tmp_path / "llama.json", tmp_path / "model"
    file.write_text(json.dumps(LLAMA))
    check.prepare_checked_model(ranks.launcher, resolve_model(file), folder, proxy=False, seed=0)
    given = {"model": str(folder), "tokenizer": "bytes", "layout": "cp3", "block_size": 16}
    with pytest.raises(OptionError, match="do not divide over cp 3") as caught:
        request.server(given)
    assert caught.value.hint == "--block-size 18"
    assert request.server({**given, "block_size": 18}).layout.cp == 3
    # On a GPU a rank's part of a block is one that kernels read, in the first hint already.
    gpu = Layout.parse("cp3")
    with pytest.raises(OptionError, match="do not divide over cp 3 in multiples of 16") as caught:
        require_divided_blocks(18, gpu, "cuda")
    assert (caught.value.hint or "").startswith("--block-size 48,")
    require_divided_blocks(48, gpu, "cuda")
    with pytest.raises(OptionError, match="block_size is 40; on a GPU it is a multiple of 16"):
        require_divided_blocks(40, Layout(), "cuda")
    with pytest.raises(OptionError, match="num_blocks is 8, of blocks whose size") as caught:
        request._blocks(ServeOptions(num_blocks=8), "cuda", gpu)
    assert "--block-size 48," in (caught.value.hint or "")
    file.write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 4}))
    with pytest.raises(LayoutError, match="cp and with experts over ranks"):
        request.legal_server_layout(resolve_model(file), Layout.parse("dp2.ep2.cp2"), "cpu")
