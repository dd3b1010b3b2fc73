"""Caches that are larger than the machine: refused with the numbers, before memory is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hocket.jobs.serving import forecast as serve_forecast
from hocket.serving.engine import memory
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.serving import ServeOptions, replica_layout

ROW = {"weights": 1_000_000, "step": 1_000_000, "cache": 64_000_000, "total": 66_000_000}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"cache_memory": "64MB"}, "--cache-memory 30MB"),
        ({"num_blocks": 4000}, "--num-blocks 1875"),
        (
            {"cache_memory": "64MB", "max_model_len": 40_000},
            "--cache-memory 30MB --max-model-len 30000",
        ),
    ],
)
def test_what_a_rank_may_take_is_known_before_ranks_start(
    options: dict[str, Any], hint: str
) -> None:
    given = ServeOptions(**{"max_model_len": 512, "block_size": 16, **options})
    server: Any = SimpleNamespace(options=given, layout=Layout(dp=2))
    predicted: Any = SimpleNamespace(capacity=32_000_000, memory=(ROW,), cache_tokens=64_000)
    with pytest.raises(OptionError, match=r"66 MB: .* each of 2 ranks may use 32 MB") as found:
        serve_forecast._require_room(server, predicted)
    assert found.value.hint == hint
    predicted.capacity = ROW["total"]
    serve_forecast._require_room(server, predicted)


@pytest.mark.parametrize(
    ("dtype", "layout", "sizes", "hint"),
    [
        ("fp32", "tp2", (48, 1), "--dtype bf16"),
        ("bf16", "dp2.tp2", (48, 1), "--layout tp2"),
        ("bf16", "tp2", (24, 16), "--max-num-batched-tokens 128"),
        ("bf16", "tp2", (48, 1), "hocket plan model --serve --cluster H100"),
    ],
)
def test_weights_without_room_have_a_fix_that_makes_some(
    dtype: str, layout: str, sizes: tuple[int, int], hint: str
) -> None:
    """The hint was once a list of three, none of which had to help."""
    weights, step = (size * 1_000_000 for size in sizes)
    row = {"weights": weights, "step": step, "cache": 0, "total": weights + step}
    whole = Layout.parse(layout)
    server: Any = SimpleNamespace(
        options=ServeOptions(max_model_len=512, block_size=16, max_num_batched_tokens=512),
        layout=whole,
        replica=replica_layout(whole),
        request=SimpleNamespace(workload=SimpleNamespace(dtype=dtype)),
        source=SimpleNamespace(name="model"),
    )
    predicted: Any = SimpleNamespace(capacity=32_000_000, memory=(row,), cache_tokens=0)
    with pytest.raises(OptionError) as found:
        serve_forecast._require_room(server, predicted)
    assert found.value.hint == hint


def test_a_rank_asks_for_no_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_host_memory", lambda: 10_000_000_000)
    memory.require_room(5_000_000_000, 2)
    with pytest.raises(
        OptionError, match=r"5 GB on each of 3 ranks .* 10 GB .* 3.33 GB a"
    ) as found:
        memory.require_room(5_000_000_000, 3)
    assert found.value.hint == "--cache-memory 1666MB"
