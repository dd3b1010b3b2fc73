"""`hocket plan --serve` from the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hocket
from hocket.cli.main import main
from hocket.spec import renamed
from hocket.spec.layout import Layout

ASKED = ["llama-3-8b", "--serve", "--requests-per-second", "4", "--tpot-ms", "40"]


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_one_kind_of_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, *ASKED, "--cluster", "A100-40", "--top", "3")
    rows = [line for line in said.splitlines() if re.match(r"(dp|pp|tp)\d+\S*  \d+ GPUs", line)]
    assert len(rows) == 3
    assert "4 requests/s of 1,536 tokens, answers of 512" in said
    assert "Memory: 16.1 GB of weights" in said
    assert "A100-SXM-40 needed, by requests/s and TPOT" in said
    assert "on-demand quotes read" in " ".join(said.split())
    table = [line for line in said.splitlines() if not line.startswith("next: ")]
    assert max(map(len, table)) <= 125


def test_several_kinds_are_compared_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, *ASKED, "--cluster", "H100,A100-40,A100-80", "--json")
    data = json.loads(said)
    kinds = data["kinds"]
    assert {kind["gpu"] for kind in kinds} == {"H100-SXM-80", "A100-SXM-40", "A100-SXM-80"}
    dollars = [kind["deployments"][0]["dollars_per_hour"] for kind in kinds]
    assert dollars == sorted(dollars)
    assert data["best"]["gpu"] == kinds[0]["gpu"]
    assert Layout.parse(data["best"]["layout"]).world_size == kinds[0]["deployments"][0]["num_gpus"]
    # Without --cluster the usual kinds are compared.
    usual = json.loads(plan(capsys, *ASKED, "--json"))["kinds"]
    assert len(usual) > 3


def test_gpt_4_is_answered_by_hypotheses(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "gpt-4", "--serve")
    assert "not public: each hypothesis about it has its own plan below." in said
    assert said.count("HYPOTHESIS") == 4
    assert said.count("source: ") == 4
    assert "not public" in said
    for gpu in ("A100-SXM-40", "A100-SXM-80", "H100-SXM-80", "H100-SXM-96"):
        assert said.count(f"\n{gpu}: ") == 4
    dense = said[said.index("as 175B dense") :]
    # By their memory alone 10 A100-40 and 5 A100-80 hold one request, 12 of 40 GB hold 8.
    lines = dense.splitlines()
    forty = next(i for i, line in enumerate(lines) if line.startswith("A100-SXM-40"))
    assert re.search(r"\(10\) +\d+ \(12\)", lines[forty + 1])
    eighty = next(i for i, line in enumerate(lines) if line.startswith("A100-SXM-80"))
    assert "(5)" in lines[eighty + 1]


def test_a_model_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--serve", "--weights", "180GB", "--cluster", "H100")
    assert "180GB of weights" in said
    assert "Assumed: 180 GB of weights in bf16, dense" in said


def test_one_layout_is_estimated_and_its_misses_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--cluster", "A100-80", "--layout", "tp2"]
    said = plan(capsys, *ASKED, *flags)
    assert re.search(r"^tp2 ", said, re.MULTILINE)
    said = plan(capsys, *ASKED, *flags, "--requests-per-second", "400")
    assert "! tp2: it cannot keep up" in said


def test_emit_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, *ASKED, "--cluster", "H100", "--pin", "tp=2", "dp=3", "--emit", "vllm")
    assert "vllm serve meta-llama/Meta-Llama-3-8B" in said
    assert "--tensor-parallel-size 2" in said
    assert "--data-parallel-size 3" in said
    assert "--max-num-batched-tokens" in said


def test_emit_vllm_names_the_caches_precision(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3-8b", "--serve", "--cluster", "H100", "--emit", "vllm"]
    for precision, cache, said in (("fp8", "bf16", False), ("bf16", "fp8", True)):
        flags = ["--dtype", precision, "--cache-precision", cache]
        assert main([*asked, *flags]) == 0
        assert ("--kv-cache-dtype fp8" in capsys.readouterr().out) is said
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["emitted"].startswith("# ")


def test_what_runs_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--serve", "--cluster", "H100,H100"]) == 0
    said = capsys.readouterr().out
    assert "--emit hocket, vllm or sglang prints the command" in said
    assert "serve meta-llama/Meta-Llama-3-8B --layout dp1 --dtype bf16" in said
    assert said.count("Memory: ") == 1  # the same kind twice is one kind


def test_a_saturated_layout_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3-70b", "--serve", "--cluster", "H100", "--layout", "tp4"]
    assert main([*asked, "--requests-per-second", "50", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "tp4 saturates at" in said
    replicas = int(re.search(r"dp(\d+)\.tp4 meets the goals", said)[1])  # type: ignore[index]
    assert replicas > 50 / float(re.search(r"saturates at ([\d.]+) requests", said)[1])  # type: ignore[index]


def test_the_library_answers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3-8b", "--serve", "--cluster", "H100", "--tpot-ms", "50", "--json"]
    assert main(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.pop("schema") == 1
    (found,) = hocket.plan("llama-3-8b", serve=True, cluster="H100", tpot_ms=50)
    assert json.loads(json.dumps(renamed.with_old_keys(found.to_json()))) == said
    assert len(hocket.plan("gpt-4", serve=True, cluster="H100")) == 4


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, *ASKED, "--cluster", "H100,A100-80", "--explain")
    assert "PCIe instead of NVLink" in said
    assert re.search(r"^(H100-SXM-80|A100-SXM-80): \d+ GPUs? as", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (["llama-3-8b", "--tpot-ms", "5", "--cluster", "H100"], "about serving", "--serve"),
        (["llama-3-8b", "--serve", "--seq-len", "9"], "about training", "--prompt-len"),
        (
            ["llama-3-8b", "--serve", "--global-batch", "9"],
            "about training",
            "hocket plan llama-3-8b --serve\n",
        ),
        (["llama-3-8b", "--serve", "--ttft-ms", "0"], "ttft_ms is 0", "--ttft-ms"),
        (["llama-3-8b", "--serve", "--requests-per-second", "-2"], "is -2", "--requests"),
        (["llama-3-8b", "--serve", "--cluster", "h10o"], "unknown GPU", "H100-SXM-80"),
        (["lama-3-8b", "--serve"], "unknown model", "llama-3-8b"),
        (["gpt4", "--serve"], "unknown model", "gpt-4"),
        (["gpt-4", "--cluster", "H100", "--global-batch", "8"], "not public", "--serve"),
        (["--serve"], "which model", "--serve"),
        (["llama-3-8b", "--serve", "--weights", "9 apples"], "size in bytes", "GB"),
        (["gpt3-175b", "--serve", "--prompt-len", "4000"], "2,048 positions", "--prompt-len 1536"),
        (["llama-3-8b", "--serve", "--cluster", "H100", "--tpot-ms", "1"], "at least", "--tpot-ms"),
        (["gpt3-175b", "--serve", "--cluster", "4xA100-40"], "there are 4", "--cluster"),
        (["gpt3-175b", "--serve", "--cluster", "L40S", "--tpot-ms", "28"], "at least", "H"),
        (["llama-3-8b", "--serve", "--cluster", "H100", "--pin", "sp=2"], "unknown axis", "tp"),
        (["llama-3-8b", "--serve", "--cluster", "H100", "--layout", "tp3"], "not divide", "tp=2"),
        (["llama-3-8b", "--serve", "--cluster", "H100,A100", "--layout", "tp2"], "one kind", "H"),
        (["llama-3-8b", "--serve", "--cluster", "H100", "--emit", "vlm"], "unknown tool", "vllm"),
        (["gpt-4", "--serve", "--emit", "vllm"], "several hypotheses", "--weights"),
        (["llama-3-8b", "--serve", "--top", "0"], "top is 0", None),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str, hint: str | None
) -> None:
    said = refused(capsys, *flags)
    assert message in said.partition("\n  hint:")[0]
    if hint is not None:
        assert hint in said.partition("\n  hint:")[2]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from hocket.cli.main import main\n"
        "main(['plan', 'llama-3-70b', '--serve', '--cluster', 'H100'])\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_experts_over_data_ranks_are_served_here() -> None:
    """A deployment with ep is printed as the `hocket serve` command that runs it."""
    from hocket.jobs.serving import deployment
    from hocket.jobs.serving.plan import serve_plan
    from hocket.spec.capabilities import absent
    from hocket.spec.layout import Layout

    plans = serve_plan("qwen3-30b-a3b", cluster="H100-SXM", pin=("ep=2", "tp=1", "pp=1", "dp=2"))
    words = deployment.serve_command(plans)
    assert words is not None
    layout = words[words.index("--layout") + 1]
    assert layout == "dp2.ep2"
    assert not absent(Layout.parse(layout), serving=True)
