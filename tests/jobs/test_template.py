"""Printed job files pass their own tools: shellcheck, hadolint, Kubernetes' schemas; boards read
metrics that a server has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket.cli.main import main
from hocket.jobs import monitoring
from hocket.jobs.template import KINDS
from hocket.spec.errors import HocketError

BIN = Path(sys.executable).parent
CASES = [
    (kind, verb, gpus)
    for kind in ("slurm", "kubernetes", "skypilot")
    for verb in ("train", "serve")
    for gpus in (8, 0)
]


def printed(capsys: pytest.CaptureFixture[str], kind: str, verb: str, gpus: int) -> str:
    layout = "dp2.tp8" if gpus else "tp2"
    what = ["--serve"] if verb == "serve" else ["--data", "text.txt"]
    arguments = ["template", kind, "llama-3-8b", "--layout", layout, *what]
    assert main([*arguments, "--gpus-per-node", str(gpus)]) == 0
    return capsys.readouterr().out


def tool(name: str) -> str:
    found = BIN / name
    if not found.exists():
        pytest.skip(f"{name} is not installed (pip install 'hocket[dev]')")
    return str(found)


def passes(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "verb", "gpus"), CASES)
def test_a_job_file_passes_its_tool(
    kind: str, verb: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job"
    text = printed(capsys, kind, verb, gpus)
    assert "{{" not in text
    file.write_text(text)
    if kind == "kubernetes":
        passes(tool("kubernetes-validate"), "--strict", str(file))
        for document in yaml.safe_load_all(text):
            for script in scripts(document):
                file.write_text(f"#!/bin/sh\n{script}")
                # A container's environment has HOSTNAME, the pod's name.
                passes(tool("shellcheck"), "--exclude", "SC3028", str(file))
        return
    if kind == "skypilot":
        task = yaml.safe_load(text)
        text = f"#!/bin/bash\n{task['setup']}\n{task['run']}"
        file.write_text(text)
    passes(tool("shellcheck"), str(file))


def scripts(value: Any) -> list[str]:
    """The shell scripts of a manifest: of `sh -c`, what follows."""
    if isinstance(value, list):
        if value[:2] == ["/bin/sh", "-c"] and len(value) > 2:
            return [value[2]]
        return [script for one in value for script in scripts(one)]
    if not isinstance(value, dict):
        return []
    own = value["args"][:1] if value.get("command") == ["/bin/sh", "-c"] else []
    return [*own, *(script for one in value.values() for script in scripts(one))]


@pytest.mark.parametrize("gpus", [8, 0])
def test_a_dockerfile_passes_hadolint(
    gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Dockerfile"
    assert main(["template", "docker", "--gpus-per-node", str(gpus)]) == 0
    file.write_text(capsys.readouterr().out)
    passes(tool("hadolint"), str(file))


@pytest.mark.parametrize("gpus", [8, 0])
def test_an_image_keeps_what_it_writes_where_any_user_may_write(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster may choose a user id of group root, and a read-only root file system."""
    assert main(["template", "docker", "--gpus-per-node", str(gpus)]) == 0
    text = capsys.readouterr().out.replace("\\\n", "")
    (made,) = re.findall(r"install --directory .*--group root --mode 775 (.*)", text)
    shared = made.split()
    (workdir,) = re.findall(r"^WORKDIR (\S+)", text, re.MULTILINE)
    assert workdir in shared
    words = " ".join(re.findall(r"^ENV (.*)", text, re.MULTILINE)).split()
    variables = dict(word.split("=", 1) for word in words)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TRITON_CACHE_DIR"):
        assert any(Path(variables[name]).is_relative_to(folder) for folder in shared), name
    (packages,) = re.findall(r"apt-get install --no-install-recommends --yes ([^&]*)", text)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)
    assert json.loads(entry)[0] in packages.split()  # reaps what process 1 inherits
    assert "g++" in packages.split()  # rehearsals, as of --dry-run, compile C++
    for line in re.findall(r"pip install (.*)", text):  # each package has one version
        assert "--constraint" in line or "--no-deps" in line


def test_nodes_and_tasks_follow_from_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "slurm", "train", 8)
    assert "#SBATCH --nodes=2" in text
    assert "--layout dp2.tp8" in text
    assert "srun --kill-on-bad-exit=1 --wait=300 --overlap hocket train" in text
    for option in ("--elastic", "--upload"):  # their ranks end minutes before rank 0
        words = ["slurm", "tiny-llama", "--layout", "dp2", "--gpus-per-node", "0", "--data", "x"]
        assert main(["template", *words, "--", option, *["to"][: option == "--upload"]]) == 0
        assert "--wait" not in capsys.readouterr().out.split("for attempt")[1]
    for layout, gpus, nodes in (("dp4", 2, "1-2"), ("dp2.tp8", 8, "1-2"), ("dp2.tp4", 2, "2-4")):
        words = ["slurm", "org/model", "--layout", layout, "--gpus-per-node", str(gpus)]
        assert main(["template", *words, "--data", "x", "--", "--elastic"]) == 0
        assert f"#SBATCH --nodes={nodes}\n" in (text := capsys.readouterr().out)
        assert "WORLD_SIZE=1" not in text
    manifests = list(yaml.safe_load_all(printed(capsys, "kubernetes", "train", 8)))
    (job,) = (one for one in manifests if one["kind"] == "Job")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2


def test_what_cannot_be_printed_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "nomad", "llama-3-8b"]) == HocketError.exit_code
    assert f"known: {', '.join(sorted(KINDS))}" in capsys.readouterr().err
    assert main(["template", "slurm", "org/model", "--serve", "--layout", "tp3.pp5"]) == 2
    assert "do not fill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("llama-3-8b", "tp3", "32 heads do not divide over tp 3"),
        ("llama-3-8b", "pp33", "32 layers cannot be cut into 33 stages"),
        ("llama-3-8b", "dp2.ep2", "no experts to divide over ranks"),
        ("llama-3-8b", "dp4:zero=3,shard=2", ""),
        ("llama-3-8b", "dp2.cp2.tp2:microbatches=4,zero=1", ""),
        ("qwen3-30b-a3b", "dp8.tp4.ep8.etp2", ""),
        ("org/of-the-hub", "tp3", ""),
    ],
)
def test_a_layout_that_the_model_cannot_be_split_by(
    capsys: pytest.CaptureFixture[str], model: str, layout: str, words: str
) -> None:
    code = main(
        ["template", "slurm", model, "--layout", layout, "--gpus-per-node", "0", "--data", "x"]
    )
    said = capsys.readouterr()
    assert code == (2 if words else 0), said.err
    assert words in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seqlen", "4"], "unknown option --seqlen of hocket train; the nearest is --seq-len"),
        (["--seq-len", "many"], "--seq-len is 'many'; it must be a whole number"),
        (["elsewhere.txt"], "'elsewhere.txt' is not one"),
    ],
)
def test_options_after_the_dashes_are_those_of_the_verb(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    kind = ["template", "slurm", "tiny-llama", "--layout", "dp2", "--gpus-per-node", "0"]
    assert main([*kind, "--data", "x", "--", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


def test_a_name_of_another_tool_is_printed_as_the_own_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind = ["template", "slurm", "tiny-llama", "--layout", "dp2", "--gpus-per-node", "0"]
    assert main([*kind, "--data", "x", "--", "--learning-rate", "1e-4"]) == 0
    assert "--lr 1e-4" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_a_server_of_a_catalogue_name_reads_its_weights_from_the_hub(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["template", kind, "llama-3-70b", "--layout", "tp8", "--serve"]) == 0
    text = capsys.readouterr().out
    assert "hocket serve meta-llama/Meta-Llama-3-70B in tp8" in text
    assert "llama-3-70b" not in text.replace("Meta-Llama-3-70B", "")


def test_the_board_and_the_alerts_read_metrics_that_a_server_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("prometheus_client")
    from hocket.serving.http.metrics import COUNTERS, GAUGES, ServerMetrics

    class Counts:
        prompt_tokens = completion_tokens = cached_tokens = 0

    figures: dict[str, Any] = dict.fromkeys((*GAUGES, *COUNTERS), 1)
    figures["expert_imbalance"] = {"before": 1.75, "after": 1.25}
    text = ServerMetrics(Counts(), lambda: {"replicas": {"0": figures}}).text().decode()  # type: ignore[arg-type]
    assert 'hocket_expert_imbalance{placement="after",replica="0"} 1.25' in text
    known = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    known |= {f"{name}_bucket" for name in known}
    assert main(["template", "grafana"]) == 0
    board = json.loads(capsys.readouterr().out)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert main(["template", "prometheus"]) == 0
    alerts = yaml.safe_load(capsys.readouterr().out)["groups"][0]["rules"]
    used = re.findall(r"\bhocket_\w+", json.dumps(board) + json.dumps(alerts))
    assert len(set(used)) > 12
    assert set(used) <= known, set(used) - known
    assert len(alerts) == len(monitoring.RULES)
