"""A part of the matrix, chosen by the commit; and what happens to a world that ends early."""

from __future__ import annotations

import pytest

from hocket.jobs import matrix as jobs
from hocket.jobs.matrix import check_matrix
from hocket.models import registry
from hocket.models.samples import switches
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.matrix import SWITCHED
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.train, pytest.mark.timeout(300)]

EVERY = ("llama", "roberta")
"""A family with a plan, and one whose plan is inferred, that ties a bias and nests its layers."""
NUMBER = 3
LAYOUTS = ("tp2", "dp2.pp2:microbatches=2,zero=2")


def some_types() -> list[str]:
    known = registry.causal_classes()
    every = sorted([*known, *(f"{kind}{SWITCHED}" for kind in known if switches(kind))])
    return sorted({*EVERY, *part(every, len(every) // NUMBER)})


@pytest.mark.usefixtures("warm")
def test_some_types_are_equal_or_refused() -> None:
    kinds = some_types()
    found = check_matrix(kinds, LAYOUTS)
    assert [row.kind for row in found.rows] == kinds
    bad = [
        f"{row.kind} {cell.layout}: {cell.outcome}: {cell.reason}"
        for row in found.rows
        for cell in row.cells
        if cell.outcome in ("different", "crashed")
        or (cell.outcome == "rejected") != bool(cell.reason not in ("", jobs.ROUNDING))
    ]
    assert not bad, "\n".join(bad)
    for row in found.rows:
        assert [cell.layout for cell in row.cells] == list(found.layouts)
        if row.kind in EVERY:
            assert [cell.outcome for cell in row.cells] == ["equal", "equal"]


@pytest.mark.usefixtures("warm")
def test_a_routers_loss_is_over_all_data_ranks_in_the_matrix_too() -> None:
    found = check_matrix(["mixtral+"], ["dp2:zero=3", "dp2:microbatches=2"])
    assert [cell.outcome for cell in found.rows[0].cells] == ["equal", "equal"]


@pytest.mark.usefixtures("warm")
def test_chunks_of_the_matrix_are_long_enough_for_convolutions() -> None:
    """Of 3 and of 6 earlier inputs, at the most context ranks of the matrix."""
    found = check_matrix(["lfm3", "mamba2"], ["cp4"])
    assert {row.kind: row.cells[0].outcome for row in found.rows} == dict.fromkeys(
        ("lfm3", "mamba2"), "equal"
    )


@pytest.mark.usefixtures("warm")
def test_a_case_that_ends_its_world_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RANKS", "tests.check.faulty_ranks")
    found = check_matrix(["gemma", "gpt2", "llama", "opt"], ["dp2", "tp2"])
    outcomes = {row.kind: [cell.outcome for cell in row.cells] for row in found.rows}
    assert outcomes == {
        "gemma": ["crashed", "crashed"],  # killed while it was prepared
        "gpt2": ["equal", "crashed"],  # killed at tp2
        "llama": ["different", "equal"],  # its gradients are off at dp2, and once at tp2
        "opt": ["crashed", "equal"],  # raises at dp2
    }
    cells = {row.kind: row.cells for row in found.rows}
    assert "SIGKILL" in cells["gemma"][0].reason
    assert "SIGKILL" in cells["gpt2"][1].reason
    assert "gradient differs by" in cells["llama"][0].reason
    assert cells["opt"][0].reason == "RuntimeError: out of luck"
    assert not found.ok


@pytest.mark.usefixtures("warm")
def test_whole_sequences_are_masked_and_what_no_module_reads_is_gathered() -> None:
    found = check_matrix(
        ["mpt", "prophetnet"], ["dp2:zero=3", "dp2.tp2:sequence_parallel=true,zero=3"]
    )
    outcomes = {row.kind: [cell.outcome for cell in row.cells] for row in found.rows}
    assert outcomes["mpt"] == ["equal", "equal"]  # its alibi is added to the mask
    # It trains on the mean over several predicted tokens, not on next-token cross-entropy.
    assert outcomes["prophetnet"] == ["rejected", "rejected"]
    assert "transformers' own loss" in found.rows[1].cells[0].reason


@pytest.mark.usefixtures("warm")
def test_a_layout_of_any_size_is_tried_on_two_ranks_first() -> None:
    """As `hocket train` does: with a router's loss, sequence shards of four ranks are rejected for
    the reason that two give, not started; without it they are equal."""
    layout = "dp2.tp2.ep2:sequence_parallel=true"
    found = {row.kind: row.cells[0] for row in check_matrix(["mixtral", "mixtral+"], [layout]).rows}
    assert found["mixtral"].outcome == "equal"
    assert found["mixtral+"].outcome == "rejected"
    assert "auxiliary loss" in found["mixtral+"].reason


@pytest.mark.usefixtures("warm")
def test_layers_that_run_without_gradients_are_whole_when_backward_reads_them() -> None:
    """HRM runs its early cycles so, and the same layers with gradients later; Reformer runs all of
    its layers so, and computes their backward itself."""
    found = check_matrix(["hrm_text", "reformer"], ["dp2:zero=3,microbatches=2"])
    assert [cell.outcome for row in found.rows for cell in row.cells] == ["equal", "equal"]


@pytest.mark.usefixtures("warm")
def test_what_later_stages_lack_is_given_to_them_and_the_rest_is_said_in_words() -> None:
    """CTRL writes into its embedded input, layers of DeepSeek V4 read token ids, those of RoFormer
    a frozen table; the attention of CodeGen and TrOCR can only be replicated."""
    kinds = ["codegen", "ctrl", "deepseek_v4", "roformer", "trocr", "xmod"]
    found = check_matrix(kinds, ["tp2", "pp2:microbatches=2"])
    outcomes = {row.kind: [cell.outcome for cell in row.cells] for row in found.rows}
    assert outcomes.pop("xmod") == ["equal", "rejected"]
    assert all(each == ["equal", "equal"] for each in outcomes.values()), outcomes
    reason = found.rows[-1].cells[1].reason
    assert reason == "its own code reads 'output' of a layer that is on another stage"
    assert "four parts" in found.rows[0].note


@pytest.mark.usefixtures("warm")
def test_rounding_is_separated_from_what_a_layout_does_in_fp64() -> None:
    """One unit in the last place of xLSTM's weights moves its gradients over the bound in fp32."""
    found = check_matrix(["xlstm"], ["dp2"])
    (cell,) = found.rows[0].cells
    assert cell.outcome == "equal"
    assert cell.ratio is not None
    assert cell.ratio < 1
    assert cell.reason in ("", jobs.ROUNDING)


def test_what_cannot_be_is_refused_before_ranks_start() -> None:
    with pytest.raises(OptionError, match="unknown model type 'lama'") as error:
        check_matrix(["lama"])
    assert error.value.hint == "did you mean 'llama'?"
    with pytest.raises(LayoutError, match="not an axis"):
        check_matrix(["llama"], ["tp-2"])
