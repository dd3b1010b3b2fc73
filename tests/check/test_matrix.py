"""Every family at every layout computes what one process computes; and the check can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.check import CheckReport
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from tests.families import FAMILIES
from tests.ranks import RankPool
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

EVERY = ("dp2", "tp2", "pp2:microbatches=4", "tp2.pp2:microbatches=2", "dp2.pp2.tp2:microbatches=2")
MORE = {
    "dp2:data_parallel=threads": ("llama", "gpt2", "mixtral"),
    "dp2:microbatches=2": ("llama_tied",),
    "pp2:schedule=gpipe,microbatches=4": ("llama", "opt"),
    "pp2:schedule=sequential,microbatches=4": ("llama", "bloom"),
    "pp2:schedule=interleaved,microbatches=4,virtual_stages=2": ("llama_tied", "gemma3"),
    "pp2:schedule=zb-v,microbatches=4,virtual_stages=2": ("gpt2", "llama_tied"),
    "dp2.pp2.tp2:schedule=zb-v,microbatches=2,virtual_stages=2": ("llama_tied",),
    "tp4:microbatches=2": ("llama", "qwen3", "phi3", "gemma3"),  # key/value heads < tp
    "dp2.tp2:order=dp-tp-cp-pp": ("llama_tied",),
    "dp2.pp2:pipeline_split=1-3": ("gpt2",),
    "pp4.tp2:microbatches=4": ("llama_tied", "gpt_neox"),
    "dp2:zero=1": ("llama", "gpt2", "mixtral"),
    "dp2:zero=2,microbatches=2": ("llama_tied", "bloom"),
    "dp4:zero=1,shard=2": ("qwen3",),
    "dp2.tp4:zero=2": ("llama",),  # shared key/value heads, reduced last
    "dp2.pp2:zero=2,microbatches=4": ("llama_tied", "gemma3"),
    "dp2.pp2:zero=1,schedule=zb-v,microbatches=4,virtual_stages=2": ("llama_tied",),
    "dp2.pp2.tp2:zero=2,schedule=zero-bubble,microbatches=2": ("llama_tied", "gpt2"),
    "dp2:zero=3": ("llama", "gpt2", "mixtral", "opt", "bloom"),
    "dp2:zero=3,microbatches=2,recompute=full": ("llama_tied", "gemma3"),
    "dp4:zero=3,shard=2": ("qwen3",),
    "dp2.tp4:zero=3": ("llama",),  # shared key/value heads, reduced last
    "dp2.tp2:zero=3,microbatches=2": ("phi3", "mixtral"),
    "dp2.pp2:zero=3,microbatches=4": ("llama_tied", "gemma3"),
    "dp2.pp2:zero=3,schedule=gpipe,microbatches=4": ("bloom", "opt"),
    "dp2.pp2:zero=3,schedule=interleaved,microbatches=4,virtual_stages=2": ("gpt_neox",),
    "dp2.pp2:zero=3,schedule=zb-v,microbatches=4,virtual_stages=2": ("llama_tied", "gpt2"),
    "dp2.pp2:zero=3,schedule=zb-v,microbatches=4,virtual_stages=2,recompute=full": ("mixtral",),
    "dp2.pp2.tp2:zero=3,schedule=zero-bubble,microbatches=2": ("llama_tied", "qwen3"),
    "dp2.pp2.tp2:zero=3,schedule=zero-bubble,microbatches=2,recompute=selective": ("mistral",),
    "dp2:zero=3,offload=params": ("llama", "mixtral"),
    "dp1:zero=3,offload=params,microbatches=2": ("gpt2",),
    "dp2:zero=1,offload=optimizer": ("llama_tied",),
    "dp2.tp2:offload=optimizer,microbatches=2": ("qwen3",),
    "dp2.pp2:zero=3,offload=params,schedule=zb-v,microbatches=4,virtual_stages=2": ("bloom",),
    "dp1:recompute=full,microbatches=2": ("llama", "gemma3", "bloom"),
    "dp1:recompute=norm+activation": tuple(FAMILIES),
    "tp2:recompute=norm+activation,sequence_parallel=true": ("llama_tied", "gpt2", "mixtral"),
    "dp2:zero=3,microbatches=2,recompute=norm+activation": ("gemma3",),
    "dp2:zero=3,microbatches=2,recompute=norm+mlp": ("qwen3",),
    "pp2:schedule=zb-v,microbatches=4,virtual_stages=2,recompute=norm+activation": ("gpt2",),
    "dp1:recompute=selective": ("llama", "gpt2", "opt"),
    "tp2:recompute=full": ("llama_tied", "gpt2", "mixtral", "bloom"),
    "tp2:recompute=core_attn+mlp": ("qwen3", "gpt_neox", "gemma3"),
    "dp2:zero=2,microbatches=2,recompute=full": ("llama", "phi3"),
    "dp2.pp2:zero=1,schedule=zb-v,microbatches=4,virtual_stages=2,recompute=full": ("llama_tied",),
    "dp2.pp2.tp2:microbatches=2,recompute=full": ("llama_tied", "gpt2"),
    "dp2.pp2.tp2:zero=2,schedule=zero-bubble,microbatches=2,recompute=selective": ("mistral",),
    "pp2:schedule=zb-v,microbatches=4,virtual_stages=2,recompute=full": ("mixtral",),
    "pp2:schedule=zb-v,microbatches=4,virtual_stages=2,recompute=norm+mlp": ("gpt2",),
    "pp2:microbatches=4,recompute=full,recompute_layers=1": ("llama",),
}
MORE |= {
    "tp2:sequence_parallel=true": tuple(FAMILIES),
    "tp4:microbatches=2,sequence_parallel=true": ("llama", "qwen3", "gpt2", "mixtral"),
    "pp2.tp2:microbatches=2,sequence_parallel=true": ("gpt2", "opt", "bloom", "mixtral"),
    "pp2.tp2:schedule=zero-bubble,microbatches=4,sequence_parallel=true": ("llama_tied", "gemma3"),
    "pp2.tp2:schedule=zb-v,microbatches=4,virtual_stages=2,sequence_parallel=true": ("gpt_neox",),
    "dp2.pp2.tp2:microbatches=2,sequence_parallel=true": ("llama_tied", "phi3"),
    "dp2.tp2:zero=1,sequence_parallel=true": ("llama_tied", "mixtral"),
    "dp2.tp2:zero=2,microbatches=2,sequence_parallel=true": ("gpt2",),
    "dp2.pp2.tp2:zero=2,schedule=zero-bubble,microbatches=2,sequence_parallel=true": (
        "llama_tied",
        "gpt2",
    ),
    "tp2:recompute=full,sequence_parallel=true": ("llama_tied", "gpt2", "mixtral", "gemma3"),
    "tp2:recompute=selective,microbatches=2,sequence_parallel=true": ("qwen3", "opt"),
    "pp2.tp2:schedule=zero-bubble,microbatches=2,recompute=full,sequence_parallel=true": (
        "mistral",
    ),
}
ALL = [(family, layout) for layout in EVERY for family in FAMILIES]
ALL += [(family, layout) for layout, families in MORE.items() for family in families]
CASES = [("llama", layout) for layout in EVERY]
CASES += part([case for case in ALL if case not in CASES], 10)

FAULTS = [
    ("input gradient not summed over tp", "llama", "tp2", "gradient"),
    ("shared heads' gradient not summed", "qwen3", "tp2", "q_norm"),
    ("shared heads' gradient not summed", "llama", "tp4", "k_proj"),
    ("gradients not summed over dp", "llama", "dp2", "gradient"),
    ("shares of gradients not summed", "llama", "dp2:zero=1", "gradient"),
    ("stepped shares not gathered", "llama", "dp2:zero=2", "value"),
    ("slices' gradients not summed", "llama", "tp2:sequence_parallel=true", "layernorm"),
    ("slices' gradients not summed", "opt", "tp2:sequence_parallel=true", "fc2.bias"),
    ("gradient of what was gathered not summed", "gpt2", "tp2:sequence_parallel=true", "gradient"),
    ("input not gathered again", "llama", "tp2:sequence_parallel=true", "q_proj"),
    ("positions of a slice", "llama", "tp2:sequence_parallel=true", "loss"),
    ("shares of gradients not summed", "llama", "dp2:zero=3", "gradient"),
    ("blocks not gathered anew", "llama", "dp2:zero=3", "value"),
    ("a block reduced before its gradients are there", "llama", "dp2:zero=3", "gradient"),
    ("tie forgotten", "llama_tied", "pp2:microbatches=2", "embed_tokens"),
    ("one weight off by a little", "llama", "tp2", "before the first step"),
    ("loss divided by its own tokens", "llama", "dp2", "gradient"),
    ("a learning rate of its own", "llama", "dp2", "value"),
    ("norm counted once a rank", "llama", "tp2", "gradient norm"),
    ("a norm applied twice", "llama", "pp2:microbatches=2", "loss"),
]

FAULTS = part(FAULTS, 2)
SEEN = sorted({family for family, _ in CASES} | {family for _, family, *_ in FAULTS})


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The references of all families."""
    path = tmp_path_factory.mktemp("references")
    ranks.run("tests.check.cases:references", 2, backend=None, folder=str(path), families=SEEN)
    return path


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, folder: Path) -> dict[tuple[str, str], Any]:
    """Every case's report, or what went wrong; one world for all cases of a size."""
    found: dict[tuple[str, str], Any] = {}
    worlds: dict[int, list[tuple[str, str]]] = {}
    for case in CASES:
        worlds.setdefault(Layout.parse(case[1]).world_size, []).append(case)
    for size, cases in worlds.items():
        try:
            rows = ranks.run(
                "tests.check.cases:matrix", size, folder=str(folder), cases=cases, timeout=120.0
            )[0]
        except HocketError as error:
            found |= dict.fromkeys(cases, str(error))
            continue
        found |= {(family, layout): report for family, layout, report, _ in rows}
    return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_changes_nothing(
    outcomes: dict[tuple[str, str], Any], family: str, layout: str
) -> None:
    outcome = outcomes[family, layout]
    assert isinstance(outcome, dict), outcome
    report = CheckReport.from_json(json.dumps(outcome))
    assert report.ok, "\n".join(report.failures)
    assert len(report.steps) == 3
    assert report.world_size == Layout.parse(layout).world_size
    # every replica is compared, not only enough of them to cover the parameter
    whole = next(
        row for row in report.rows if row.name.endswith("norm.weight") or "ln_" in row.name
    )
    assert whole.ranks == report.world_size // Layout.parse(layout).pp


@pytest.mark.parametrize(("fault", "family", "layout", "seen"), FAULTS)
def test_a_fault_is_found(
    ranks: RankPool, folder: Path, fault: str, family: str, layout: str, seen: str
) -> None:
    size = Layout.parse(layout).world_size
    rows = ranks.run(
        "tests.check.cases:matrix", size, folder=str(folder), cases=[(family, layout)], fault=fault
    )[0]
    report = CheckReport.from_json(json.dumps(rows[0][2]))
    assert not report.ok
    assert any(seen in failure for failure in report.failures), report.failures[:5]
