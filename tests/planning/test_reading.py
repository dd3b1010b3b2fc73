"""Configurations of other tools, read as layouts: what is emitted, and files of strangers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from hocket.jobs.plan_from import plan_from, reading_text
from hocket.planning.layouts import layout_at
from hocket.planning.plan import plan_one
from hocket.planning.reading import file, sections, words
from hocket.planning.reading.configuration import LARGEST_FILE
from hocket.planning.reading.tools import READERS, megatron_layers
from hocket.planning.tools.emit import TOOLS, emit, job
from hocket.planning.tools.limits import division
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from tests.planning.test_tools import DENSE

READ = ("megatron", "torchtitan", "torchtitan-0.2.2", "deepspeed", "accelerate")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tool", READ)
def test_what_is_emitted_reads_back_and_edits_into_each_other(tool: str) -> None:
    limits = TOOLS[tool].limits
    bounded = dataclasses.replace(DENSE, limits=(limits,), division=division([limits]))
    rows = bounded.legal(32)
    known = plan_one(DENSE, Layout(dp=32)).best
    made = []
    for index in random.Random(2).sample(range(len(rows)), min(400, len(rows))):
        layout = layout_at(rows, index)
        if tool == "deepspeed" and layout.pp > 1:
            continue  # a pipeline is set in code
        if layout.recompute == "selective" or (tool != "megatron" and layout.ep > 1):
            continue
        if tool in ("deepspeed",) and layout.recompute != "none":
            continue  # set in code
        if not limits.any_split and layout.pp > 1:
            layout = dataclasses.replace(layout, pipeline_split="even")
        size = 64 // layout.dp // (layout.microbatches or 1)
        context = limits.context[-1] if layout.cp > 1 else ""
        found = dataclasses.replace(known, layout=layout, microbatch=size, context=context)
        made.append((job(bounded, found), emit(tool, bounded, found)))
        if len(made) == 12:
            break
    assert len(made) == 12
    for (one, text), (_, other) in zip(made, made[1:] + made[:1], strict=True):
        for written in (text, file.changed(other, READERS[tool](other), one)):
            read = READERS[tool](written)
            assert not read.unread, (read.unread, written)
            layout = read.layout(32, read.global_batch or 64)
            cut = (
                DENSE.cut(layout)
                if isinstance(layout.pipeline_split, str)
                else layout.pipeline_split
            )
            expected = dataclasses.replace(one.layout, offload="none")
            if expected.shard == expected.dp:
                expected = dataclasses.replace(expected, shard=None)
            if expected.zero == 0 or tool == "accelerate":
                expected = dataclasses.replace(expected, microbatches=layout.microbatches)
            if expected.dp * expected.cp == 1:  # a state that no other rank could share
                expected = dataclasses.replace(expected, zero=layout.zero)
            if tool == "accelerate" and expected.zero == 0:
                expected = dataclasses.replace(expected, recompute=layout.recompute)
            assert dataclasses.replace(layout, pipeline_split=cut) == expected, written
            if tool != "accelerate":
                assert read.microbatch == one.microbatch
                assert read.precision == "bf16"


@pytest.mark.parametrize(
    ("given", "value"),
    [("layernorm moe_act", "modules"), ("mla_up_proj layernorm moe_act", "modules"),
     ("core_attn", "selective"), ("mlp", None), ("layernorm", None)],
)  # fmt: skip
def test_modules_that_megatron_recomputes_are_read(given: str, value: str | None) -> None:
    text = f"--recompute-granularity selective --recompute-modules {given} --micro-batch-size 1"
    if value is None:
        with pytest.raises(OptionError, match=f"--recompute-modules {given}"):
            READERS["megatron"](text)
    else:
        assert READERS["megatron"](text).fields["recompute"] == value
        changed = words.edit(text, {"--recompute-modules": None})
        assert changed == "--recompute-granularity selective --micro-batch-size 1"


def test_a_launch_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/bash\n"
        "export TP=4\n"
        'touch "$(dirname $0)/executed"\n'
        "ARGS=(\n"
        "    --tensor-model-parallel-size $TP  # inside a node\n"
        "    --pipeline-model-parallel-size ${PP:-2}\n"
        "    --micro-batch-size 2\n"
        "    --global-batch-size 64\n"
        "    --seq-length 4096 --bf16\n"
        "    --use-distributed-optimizer\n"
        "    --tokenizer-type Llama2Tokenizer\n"
        ")\n"
        "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py ${ARGS[@]}\n"
    )
    with pytest.raises(OptionError, match="pipeline-model-parallel-size is"):
        file.read(str(script))  # a variable of the shell is not guessed
    script.write_text(script.read_text().replace("${PP:-2}", "2"))
    _, found = file.read(str(script))
    assert (found.tool, found.world, found.precision) == ("megatron", 32, "bf16")
    layout = found.layout(32, found.global_batch)
    assert str(layout) == "dp4.pp2.tp4:microbatches=8,pipeline_split=even,zero=1"
    assert any("--tokenizer-type" in item for item in found.unread)
    assert not (tmp_path / "executed").exists()


def test_a_python_configuration_is_parsed_and_not_run(tmp_path: Path) -> None:
    source = tmp_path / "recipe.py"
    source.write_text(
        "import os\n"
        f"open({str(tmp_path / 'executed')!r}, 'w')\n"
        "def mine():\n"
        "    c = llama3_8b()\n"
        "    c.training.num_tokens_per_microbatch_per_dp_rank = 2 * 4096\n"
        "    c.training.num_tokens_per_train_step = 64 * 4096\n"
        "    c.training.max_context_length = 4096\n"
        "    c.parallelism.data_parallel_shard_degree = 32\n"
        "    c.parallelism.tensor_parallel_degree = os.cpu_count()\n"
        "    return c\n"
    )
    with pytest.raises(OptionError, match="tensor_parallel_degree is"):
        file.read(str(source))
    source.write_text(source.read_text().replace("os.cpu_count()", "1"))
    text, found = file.read(str(source))
    assert str(found.layout(32, found.global_batch)) == "dp32:microbatches=1,zero=3"
    better = plan_one(DENSE, Layout.parse("dp8.tp4:zero=3,sequence_parallel=true")).best
    new = file.changed(text, found, job(DENSE, better))
    assert "c.parallelism.tensor_parallel_degree = 4\n" in new
    assert "c.parallelism.data_parallel_shard_degree = 8\n" in new
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b'{"zero_optimization": {"stage": "three"}}', "whole number"),
        ("a.json", b"[1]", "holds a list"),
        ("a.json", b'{"train_batch_size": 1e400}', "whole number"),
        ("a.yaml", b"a: &a [x, x]\nb: *a\n", "aliases"),
        ("a.yaml", b"!!python/object/apply:os.system ['true']", "not YAML"),
        ("a.toml", b"[parallelism]\ntensor_parallel_degree = 99999999999", "at most"),
        ("a.toml", b"= 3", "not TOML"),
        ("a.py", b"(" * 5000, "not Python"),
        ("a.sh", b"--tensor-model-parallel-size '8", "cannot be read"),
        ("a.txt", b"nothing of interest", "known tool"),
        ("a.json", b" " * (LARGEST_FILE + 1), "more than"),
        ("a.json", b"\xff\xfe", "UTF-8"),
        ("a.sh", b"--micro-batch-size 1 --pipeline-model-parallel-layout E(t*9999)*9999L",
         "not read|repeats"),
    ],
)  # fmt: skip
def test_files_of_strangers(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(OptionError, match=why):
        file.read(str(path))


def test_what_no_layout_has_is_rejected_by_name() -> None:
    for tool, text, why in (
        ("megatron", "--context-parallel-size 2 --cp-comm-type allgather", "allgather"),
        ("torchtitan-0.2.2", "[parallelism]\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_schedule = 'DualPipeV'", "dualpipev"),
        ("accelerate", "distributed_type: TPU\nnum_processes: 8", "TPU"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=why):
            READERS[tool](text)


def test_megatrons_layouts() -> None:
    assert megatron_layers("Et*9|t*9|t*8|t*6L") == (9, 9, 8, 6)
    assert megatron_layers("'Ettt|(tt|)*3tL'") == (3, 2, 2, 2, 1)
    with pytest.raises(OptionError, match="not read"):
        megatron_layers("Et|tmL")


def test_edits_keep_what_they_do_not_change() -> None:
    script = "run \\\n  --tp 2 \\\n  --keep x \\\n  --sp\n"
    assert words.edit(script, {"--tp": 4, "--sp": None}) == "run \\\n  --tp 4 \\\n  --keep x\n"
    toml = '# mine\n[a]\nx = 1  # why\n\n[b]\ny = [\n  1,\n]\nz = "s"\n'
    new = sections.edit(toml, "toml", {"a.x": 2, "b.y": None, "b.w": 3})
    assert new == '# mine\n[a]\nx = 2  # why\n\n[b]\nz = "s"\nw = 3\n'
    assert json.loads(sections.edit('{"a": {"b": 1, "c": 2}}', "json", {"a.b": None})) == {
        "a": {"c": 2}
    }
    assert sections.edit("a:\n  x: 1\nb: 2\n", "yaml", {"a.x": True}) == "a:\n  x: true\nb: 2\n"


def test_vllm_serve() -> None:
    found = READERS["vllm"]("vllm serve meta-llama/Meta-Llama-3-8B -tp 2 --x y")
    assert found.model == "meta-llama/Meta-Llama-3-8B"
    assert found.fields == {"tp": 2, "pp": 1}
    assert found.unread == ("--x = y",)


def test_an_improvement_is_a_diff_of_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \\\n"
        "  --tensor-model-parallel-size 8 \\\n"
        "  --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 \\\n"
        "  --lr 1e-4 --bf16\n"
    )
    found = plan_from(str(script), model="llama-3-8b", cluster="4x8xH100-SXM")
    assert str(found.predicted.best.layout) == "dp4.tp8:microbatches=16"
    assert found.better is not None
    assert found.better.step_seconds.median < found.predicted.best.step_seconds.median
    assert "-  --tensor-model-parallel-size 8 \\" in found.diff
    assert found.configuration.unread == ("--lr = 1e-4",)
    assert "+++ train.sh" in reading_text(found)
    # What the diff makes of the file is read as the better layout, which nothing beats.
    new = file.changed(script.read_text(), found.configuration, job(found.searched, found.better))
    script.write_text(new)
    again = plan_from(str(script), model="llama-3-8b", cluster="4x8xH100-SXM")
    assert again.predicted.best.layout == found.better.layout
    assert again.better is None
    with pytest.raises(OptionError, match="is for 32 GPUs"):
        plan_from(str(script), model="llama-3-8b", cluster="8xH100-SXM")


def test_whole_experts_of_megatron_are_read() -> None:
    text = "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    folded = READERS["megatron"](text + "--expert-tensor-parallel-size 1")
    assert folded.layout(8, None).expert_tp == 1
    assert READERS["megatron"](text).layout(8, None).expert_tp == 2
