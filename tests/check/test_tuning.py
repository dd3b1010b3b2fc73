"""Adapters and packed documents, in every layout: what one process with peft, or without packing,
computes. And the check of it can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

LORA = {"lora_rank": 4}
SOME = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": "q_proj-v_proj"}
PACKED = {"packing": "documents"}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dp1:recompute=full,microbatches=2", LORA),
    ("llama", "dp2:data_parallel=threads", LORA),
    ("gpt2", "dp1", LORA),
    ("mixtral", "dp1", LORA),
    ("gemma3", "dp1", PACKED),
    ("llama", "dp2", LORA),
    ("llama", "tp2", LORA),
    ("llama", "tp2:recompute=full", SOME),
    ("llama", "pp2:schedule=zb-v,microbatches=4,virtual_stages=2", LORA),
    ("llama_tied", "dp2:zero=2,microbatches=2", LORA),
    ("llama", "dp2:zero=3,recompute=full", LORA),
    ("gpt2", "tp2:sequence_parallel=true", LORA),
    ("gpt2", "tp2", LORA),
    ("phi3", "tp2", LORA),
    ("gemma3", "pp2:microbatches=4", PACKED),
    ("mixtral", "tp2", LORA),
    ("llama", "tp4", LORA),  # copied key/value heads
    ("llama_tied", "pp2.tp2:schedule=zero-bubble,microbatches=2", LORA),
    ("gpt2", "dp2.tp2:zero=1", LORA),
    ("gemma3", "dp2.tp2:zero=2,microbatches=2", PACKED),
    ("llama_tied", "dp2.tp2:zero=3,sequence_parallel=true", LORA),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> str:
    where = str(tmp_path_factory.mktemp("references"))
    wanted: list[list[Any]] = []
    for family, _, options in CASES:
        if [family, options] not in wanted:
            wanted.append([family, options])
    ranks.run("tests.check.tuning_cases:references", 1, folder=where, wanted=wanted, timeout=200)
    return where


def world_of(layout: str) -> int:
    from hocket.spec.layout import Layout

    return Layout.parse(layout).world_size


@pytest.mark.parametrize("world", [1, 2, 4])
def test_it_computes_what_one_process_computes(ranks: RankPool, folder: str, world: int) -> None:
    todo = [list(case) for case in CASES if world_of(case[1]) == world]
    found = ranks.run(
        "tests.check.tuning_cases:checks", world, folder=folder, todo=todo, timeout=200
    )[0]
    assert [row[:3] for row in found] == [[*case[:2], []] for case in todo]
    assert all(row[3] > 20 for row in found)


FAULTS = [
    ("thin gradients not summed over tp", "tp2", LORA, "lora_A"),
    ("a product scaled otherwise", "dp2", LORA, "lora_"),
    ("documents see each other", "pp2:microbatches=4", PACKED, ""),
]


@pytest.mark.parametrize(("fault", "layout", "options", "says"), FAULTS, ids=lambda x: str(x)[:20])
def test_a_fault_is_seen(
    ranks: RankPool, folder: str, fault: str, layout: str, options: dict[str, Any], says: str
) -> None:
    family = "gemma3" if options is PACKED else "llama"
    (row,) = ranks.run(
        "tests.check.tuning_cases:checks", 2, folder=folder,
        todo=[[family, layout, options]], fault=fault,
    )[0]  # fmt: skip
    assert row[2], row
    assert says in " ".join(row[2])


def test_dropout_comes_again_in_backward(ranks: RankPool) -> None:
    loss, gradient, again, same, without = ranks.run("tests.check.tuning_cases:dropout", 1)[0]
    assert loss == pytest.approx(again, rel=1e-6)
    assert gradient == pytest.approx(same, rel=1e-5)
    assert abs(without - loss) > 1e-4


def test_the_folder_names_its_options(tmp_path: Path) -> None:
    from tests.check.tuning_cases import folder_of

    assert folder_of(str(tmp_path), "x", LORA) != folder_of(str(tmp_path), "x", SOME)
