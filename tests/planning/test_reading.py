"""Configurations of other tools, read as layouts: what is emitted, and files of strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.jobs.plan_from import plan_from, reading_text
from hocket.planning.forecast import LayoutForecast
from hocket.planning.layouts import layout_at
from hocket.planning.plan import plan_one
from hocket.planning.problem import Problem
from hocket.planning.reading import file, sections, servers, words
from hocket.planning.reading.configuration import LARGEST_FILE, whole_number
from hocket.planning.reading.megatron import changed_environment, megatron_layers
from hocket.planning.reading.tools import READERS
from hocket.planning.reading.torchtitan import torchtitan_toml
from hocket.planning.service.emit import SERVERS, Deployment, server_command
from hocket.planning.tools.emit import TOOLS, emit, job, tool_reasons
from hocket.planning.tools.job import ToolJob
from hocket.planning.tools.limits import division
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.recompute import CHEAP
from tests.planning.test_service_emit import LLAMA
from tests.planning.test_tools import DENSE, EXPERTS
from tests.rotation import seed

MADE = 14
"""Layouts of each tool and problem."""


def runnable(tool: str, problem: Problem) -> Iterator[LayoutForecast]:
    """Random layouts that a tool can run and its file can hold, with rank orders and offload."""
    limits = TOOLS[tool].limits
    rows = problem.legal(32)
    known = plan_one(problem, Layout(dp=32)).best
    draw = random.Random(seed())
    for index in draw.sample(range(len(rows)), min(4000, len(rows))):
        layout = layout_at(rows, index)
        if not limits.any_split and layout.pp > 1:
            layout = dataclasses.replace(layout, pipeline_split="even")
        if problem.facts.experts and CHEAP in limits.recompute and draw.random() < 0.3:
            layout = dataclasses.replace(layout, recompute="norm+activation")
        size = 64 // layout.dp // (layout.microbatches or 1)
        context = draw.choice(limits.context) if layout.cp > 1 else ""
        plain = found = dataclasses.replace(known, layout=layout, microbatch=size, context=context)
        for changes in (
            {"order": draw.choice([("tp", "cp", "pp", "dp"), layout.order])},
            {"offload": draw.choice(limits.offload)},
        ):
            try:
                changed = dataclasses.replace(found.layout, **changes)  # type: ignore[arg-type]
            except LayoutError:
                continue
            other = dataclasses.replace(found, layout=changed)
            found = found if tool_reasons(limits, problem, other) else other
        if tool_reasons(limits, problem, plain):
            continue
        if "torchtitan" in tool and layout.recompute == "selective":
            continue  # of operations, which is estimated as none
        yield found


def expected(tool: str, one: ToolJob, read: Layout) -> Layout:
    """The layout of a job as its file has it: `read` where the file cannot have a field, or where
    all its values mean the same."""
    layout = one.layout
    if layout.shard == layout.dp or not layout.zero:
        layout = dataclasses.replace(layout, shard=None)
    if tool == "accelerate":  # batches are set in the script
        layout = dataclasses.replace(layout, microbatches=read.microbatches)
        if layout.zero == 0:
            layout = dataclasses.replace(layout, recompute=read.recompute)
    if layout.dp * layout.cp == 1:  # a state that no other rank could share
        layout = dataclasses.replace(layout, zero=read.zero, shard=read.shard, offload=read.offload)
    # Axes of degree 1 are anywhere in an order.
    split = [axis for axis in layout.order if layout.degree(axis) > 1]
    if split == [axis for axis in read.order if axis in split]:
        layout = dataclasses.replace(layout, order=read.order)
    return layout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("problem", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_emitted_reads_back_and_edits_into_each_other(tool: str, problem: Problem) -> None:
    limits = TOOLS[tool].limits
    bounded = dataclasses.replace(problem, limits=(limits,), division=division([limits]))
    made = []
    drawn = runnable(tool, bounded)
    chosen = list(itertools.islice(drawn, MADE))
    if problem is EXPERTS and "ep" in limits.axes and all(one.layout.ep == 1 for one in chosen):
        chosen[-1] = next(one for one in drawn if one.layout.ep > 1)
    for found in chosen:
        precisions = [p for p in limits.precisions if p not in ("fp4", "fp32")]
        precision = precisions[len(made) % len(precisions)]
        asked = dataclasses.replace(bounded, precision=precision)
        made.append((job(asked, found), emit(tool, asked, found)))
    assert len(made) == MADE
    for (one, text), (_, other) in zip(made, made[1:] + made[:1], strict=True):
        for written in (text, file.changed(other, READERS[tool](other), one)):
            read = READERS[tool](written)
            assert not read.unread, (read.unread, written)
            layout = read.layout(32, read.global_batch or 64, problem.facts.layers)
            given = dataclasses.replace(problem, division=layout.pipeline_split)
            layout = dataclasses.replace(layout, pipeline_split=given.cut(layout))
            assert layout == expected(tool, one, layout), written
            assert read.precision == one.facts.precision, written
            if tool != "accelerate":
                assert read.microbatch == one.microbatch


@pytest.mark.parametrize("server", SERVERS)
def test_a_servers_command_reads_back_and_edits_into_others(server: str) -> None:
    draw = random.Random(seed())
    made: list[tuple[Deployment, str]] = []
    while len(made) < 60:
        one = dataclasses.replace(
            LLAMA,
            tp=draw.choice([1, 2, 4, 8, 16]),
            pp=draw.choice([1, 1, 2, 3, 4]),
            replicas=draw.choice([1, 2, 4]),
            max_num_batched_tokens=draw.choice([512, 2048, 8192]),
            max_sequences=draw.choice([3, 256, 2000]),
            usable=draw.choice([0.5, 0.9]),
            cache_precision=draw.choice(["bf16", "fp8"]),
            precision=draw.choice(["bf16", "fp16", "fp8"]),
            experts=draw.choice([0, 128]),
        )
        one = dataclasses.replace(one, ep=draw.choice([1, 2, 8]) if one.experts else 1)
        with contextlib.suppress(OptionError):
            made.append((one, server_command(server, one)))
    for (one, text), (_, other) in zip(made, made[1:] + made[:1], strict=True):
        for written in (text, servers.changed_command(other, server, text)):
            read = READERS[server](written)
            assert not read.unread, (read.unread, written)
            assert not read.notes, (read.notes, written)
            assert read.model == LLAMA.model
            data = read.data_ranks or 1
            assert (read.fields["tp"], read.fields["pp"]) == (one.tp, one.pp), written
            assert read.fields.get("ep", 1) == one.ep, written
            # Replicas that the server does not start itself are in a comment.
            assert data in (one.ep, one.ep * one.replicas), written
            assert (data == one.ep) == (one.replicas == 1 or f"start {one.replicas} of" in text)
            assert read.microbatch == one.max_num_batched_tokens
            assert read.server == {
                "gpu_memory_utilization": one.usable, "cache_precision": one.cache_precision,
                "max_num_seqs": min(one.max_sequences, one.max_num_batched_tokens)
                if server == "vllm" else one.max_sequences,
            }, written  # fmt: skip
            assert read.seq_len == one.tokens
            assert read.precision == one.precision
            assert ("_PARTITION" in written) == (one.pp > 1 and one.layers % one.pp > 0), written


@pytest.mark.parametrize(
    ("tool", "text", "why"),
    [
        ("vllm", "vllm serve M -tp 8 -dcp 2", "--decode-context-parallel-size 2"),
        ("vllm", "vllm serve M -pcp 4", "--prefill-context-parallel-size 4"),
        ("sglang", "python -m sglang.launch_server --tp 8 --dcp-size 2", "--dcp-size 2"),
        ("sglang", "python -m sglang.launch_server --tp 8 --attn-dp-size 3", "--attn-dp-size 3"),
        ("sglang", "python -m sglang.launch_server --tp 8 --attn-dp-size 8 --ep 4", "--ep-size 4"),
        ("automodel", "distributed:\n  ep_size: 8", "ep_size 8"),
        ("automodel", "distributed:\n  strategy: other", "strategy other"),
        ("torchtitan-0.2.2", "[parallelism]\nexpert_parallel_degree = 8\n"
         "tensor_parallel_degree = 4\nexpert_tensor_parallel_degree = 2", "degree 2 with tp 4"),
        ("megatron-bridge", "c.model.cp_comm_type = 'a2a+p2p'", "a2a"),
    ],
)  # fmt: skip
def test_what_has_no_layout_is_rejected_by_name(tool: str, text: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        READERS[tool](text)


def test_kinds_of_files_that_share_an_ending() -> None:
    assert file.file_kind("a.py", "cfg.model.tensor_model_parallel_size = 2") == "megatron-bridge"
    assert file.file_kind("a.py", "c.parallelism.tensor_parallel_degree = 2") == "torchtitan-python"
    assert file.file_kind("a.yaml", "distributed:\n  tp_size: 2") == "automodel"
    assert file.file_kind("a.yaml", "distributed_type: FSDP") == "accelerate"
    assert file.file_kind("a.sh", "python -m sglang.launch_server --tp 2") == "sglang"
    again = READERS["sglang"](
        "python -m sglang.launch_server --model m/x --tp 8 --dp 4 --enable-dp-attention --ep 8"
    )
    assert again.fields == {"tp": 2, "pp": 1, "ep": 4}
    assert (again.data_ranks, again.world) == (4, 8)
    looped = READERS["automodel"](
        "distributed:\n  pp_size: 2\n  pipeline:\n    layers_per_stage: 4\n"
    )
    assert looped.layout(2, None, 32).virtual_stages == 4
    with pytest.raises(OptionError, match="30 layers do not divide"):
        looped.layout(2, None, 30)


@pytest.mark.parametrize(
    ("given", "value"),
    [("layernorm moe_act", "norm+activation"), ("mla_up_proj layernorm moe_act", CHEAP),
     ("core_attn", "selective"), ("layernorm", "norm"), ("layernorm mlp", "norm+mlp"),
     ("layernorm moe", None)],
)  # fmt: skip
def test_modules_that_megatron_recomputes_are_read(given: str, value: str | None) -> None:
    text = f"--recompute-granularity selective --recompute-modules {given} --micro-batch-size 1"
    if value is None:
        with pytest.raises(OptionError, match=f"--recompute-modules {given}"):
            READERS["megatron"](text)
    else:
        assert READERS["megatron"](text).fields["recompute"] == value
        changed = words.edit_flags(text, {"--recompute-modules": None})
        assert changed == "--recompute-granularity selective --micro-batch-size 1"


@pytest.mark.parametrize(
    ("more", "cut", "virtual"),
    [
        ("", (8, 9, 8, 7), 1),
        ("pipeline_parallel_first_stage_less_layers = 0\n", (9, 8, 8, 7), 1),
        ("pipeline_parallel_layers_per_stage = 9\n", (8, 9, 8, 7), 1),
        ("pipeline_parallel_layers_per_stage = 8\n"
         "pipeline_parallel_first_stage_less_layers = 0\n"
         "pipeline_parallel_last_stage_less_layers = 0\n", (8, 8, 8, 8), 1),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\n', (4, 5, 4, 4, 4, 4, 4, 3), 2),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\n'
         "pipeline_parallel_layers_per_stage = 3\n", (2, *[3] * 9, 2, 1), 3),
        ('module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1"], '
         '["layers.2", "layers.3"], ["norm", "output"]]\n', (1, 1, 2, 0), 1),
    ],
)  # fmt: skip
def test_torchtitans_stages_are_those_of_its_rule(
    more: str, cut: tuple[int, ...], virtual: int
) -> None:
    """Layers and what embedding and head count as, dealt evenly, the first stages one more."""
    text = "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 4\n"
    read = torchtitan_toml(text + more)
    layout = read.layout(4, 8, 32)
    assert (layout.pipeline_split, layout.virtual_stages) == (cut, virtual)
    assert not read.unread


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("layers_per_stage = 5\n", "makes 7 stages over pp 4; 1f1b needs one stage a rank"),
        ("layers_per_stage = 4\n", "makes 9 stages over pp 4"),
        ('schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 9\n',
         "makes 4 stages over pp 4; interleaved needs two stages a rank or more"),
        ("last_stage_less_layers = 20\n", r"leave one below zero: \[13, 13, 13, -7\]"),
        ("first_stage_less_layers = -2\n", "must be a whole number"),
    ],
)  # fmt: skip
def test_stages_that_torchtitan_rejects_are_rejected(more: str, why: str) -> None:
    text = f"[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_{more}"
    with pytest.raises(OptionError, match=why):
        torchtitan_toml(text).layout(4, 8, 32)


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
        file.read_tool_file(str(script))  # a variable of the shell is not guessed
    script.write_text(script.read_text().replace("${PP:-2}", "2"))
    _, found = file.read_tool_file(str(script))
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
        file.read_tool_file(str(source))
    source.write_text(source.read_text().replace("os.cpu_count()", "1"))
    text, found = file.read_tool_file(str(source))
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
        file.read_tool_file(str(path))


def test_what_no_layout_has_is_rejected_by_name() -> None:
    for tool, text, why in (
        ("megatron", "--context-parallel-size 2 --cp-comm-type allgather", "allgather"),
        ("torchtitan-0.2.2", "[parallelism]\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_schedule = 'DualPipeV'", "dualpipev"),
        ("accelerate", "distributed_type: TPU\nnum_processes: 8", "TPU"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=why):
            READERS[tool](text)


@pytest.mark.parametrize(
    "value", ["\x1d096", "²", "--5", "5\n", "٣", "", " ", "1" * 30, "0", True, 2.0]
)
def test_what_is_no_whole_number_is_rejected(value: object) -> None:
    """Python's `isdigit` and `int` differ on superscripts and separators."""
    with pytest.raises(OptionError, match="must be a whole number"):
        whole_number(value, "key")
    assert whole_number(" 096 ", "key") == 96
    assert whole_number("-1", "key", least=-1) == -1


def test_megatrons_layouts() -> None:
    assert megatron_layers("Et*9|t*9|t*8|t*6L") == (9, 9, 8, 6)
    assert megatron_layers("Et*2|tmL") == (2, 1)
    assert megatron_layers("'Ettt|(tt|)*3tL'") == (3, 2, 2, 2, 1)
    with pytest.raises(OptionError, match="not read"):
        megatron_layers("Etm|tL")


@pytest.mark.parametrize("switch", ["--enable-expert-parallel", "--trust-remote-code", "--no-x"])
def test_a_word_behind_a_switch_is_not_its_value(switch: str) -> None:
    text = f"vllm serve {switch} qwen3-30b-a3b --tensor-parallel-size 2"
    others, flags = words.words_and_flags(text)
    assert others == ["vllm", "serve", "qwen3-30b-a3b"]
    assert flags == {switch: None, "--tensor-parallel-size": "2"}
    assert words.edit_flags(text, {switch: None}) == text.replace(f" {switch}", "")
    assert words.edit_flags(text, {switch: True}) == text
    valued = text.replace(switch, f"{switch} True")
    assert words.words_and_flags(valued)[1][switch] == "True"
    assert words.edit_flags(valued, {switch: None}) == text.replace(f" {switch}", "")


def test_edits_keep_what_they_do_not_change() -> None:
    script = "run \\\n  --tp 2 \\\n  --keep x \\\n  --sp\n"
    assert (
        words.edit_flags(script, {"--tp": 4, "--sp": None}) == "run \\\n  --tp 4 \\\n  --keep x\n"
    )
    note = "# --tp 8: too many\nrun --tp 2  # was --sp\n"
    assert words.edit_flags(note, {"--tp": 4, "--sp": None}) == note.replace("--tp 2", "--tp 4")
    toml = '# mine\n[a]\nx = 1  # why\n\n[b]\ny = [\n  1,\n]\nz = "s"\n'
    new = sections.edit_sections(toml, "toml", {"a.x": 2, "b.y": None, "b.w": 3})
    assert new == '# mine\n[a]\nx = 2  # why\n\n[b]\nz = "s"\nw = 3\n'
    spelled = sections.edit_sections("[a]\nx=1\ny='s'\n", "toml", {"a.x": 1, "a.y": "t"})
    assert spelled == '[a]\nx=1\ny = "t"\n'
    assert json.loads(sections.edit_sections('{"a": {"b": 1, "c": 2}}', "json", {"a.b": None})) == {
        "a": {"c": 2}
    }
    assert (
        sections.edit_sections("a:\n  x: 1\nb: 2\n", "yaml", {"a.x": True})
        == "a:\n  x: true\nb: 2\n"
    )


MEGATRON = "--micro-batch-size 1 --global-batch-size 64 --seq-length 2048 --bf16 --num-layers 32"
ACCELERATE = "num_processes: 32\nnum_machines: 4\nmixed_precision: bf16\ndistributed_type: "


@pytest.mark.parametrize(
    ("tool", "text", "more"),
    [
        *(("megatron", MEGATRON, f" --pipeline-model-parallel-size 4 {flag}") for flag in (
            "--recompute-activations", "--num-layers-per-virtual-pipeline-stage 4",
            "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 5",
            "--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        )),
        ("megatron-bridge", "def f(c):\n    c.model.num_layers = 32\n    return c\n",
         "    c.model.num_layers_in_first_pipeline_stage = 5\n"
         "    c.model.account_for_loss_in_pipeline_split = True\n    return c\n"),
        ("torchtitan-0.2.2", "[parallelism]\n", "pipeline_parallel_layers_per_stage = 2\n"
         "pipeline_parallel_first_stage_less_layers = 0\n"),
        ("torchtitan", "--module llama3 --parallelism.tensor_parallel_degree 2",
         " --parallelism.pipeline_parallel_layers_per_stage 2"),
        ("accelerate", f"{ACCELERATE}FSDP\n",
         "fsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: HYBRID_SHARD\n"),
        ("accelerate", f"{ACCELERATE}DEEPSPEED\n",
         "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"),
        ("accelerate", f"{ACCELERATE}MEGATRON_LM\n",
         "megatron_lm_config:\n  megatron_lm_tp_degree: 4\n  megatron_lm_pp_degree: 2\n"),
    ],
)  # fmt: skip
def test_other_spellings_of_a_choice_do_not_outlive_it(tool: str, text: str, more: str) -> None:
    """What is read and never printed is taken out: else the changed file is another layout."""
    limits = TOOLS[tool].limits
    problem = dataclasses.replace(DENSE, limits=(limits,), division=division([limits]))
    for found in itertools.islice(runnable(tool, problem), 3):
        one = job(problem, found)
        plain, new = (file.changed(t, READERS[tool](t), one) for t in (text, text + more))
        known = [r.layout(32, 64, 32) for r in (READERS[tool](plain), READERS[tool](new))]
        assert known[0] == known[1], new
        assert "--recompute-activations" not in new
        assert not READERS[tool](new).unread, new


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("unset", "export NAME=1\ntorchrun x\n"), ("unset", "  export NAME=1  # why\nrun\n"),
        ("unset", "NAME=1 torchrun x\n"), ("unset", "A=2 NAME=32 torchrun x\n"),
        ("export", "unset NAME\nrun\n"), ("export", "export NAME=32; run\n"),
        ("export", "NAME=8 run\n"),
    ],
)  # fmt: skip
def test_the_environment_of_a_script_is_that_of_its_layout(
    line: str, script: str, tmp_path: Path
) -> None:
    """Megatron rejects its FSDP with the variable at 1, and tp or cp before Blackwell without."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    wanted = f"unset {name}" if line == "unset" else f"export {name}=1"
    new = changed_environment(script.replace("NAME", name), wanted)
    shell = re.sub(r"(torchrun|run)( x)?\n", f"printenv {name} || true\n", new)
    ran = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, check=True, env={"PATH": os.defpath}
    )
    assert ran.stdout == ("" if line == "unset" else "1\n"), new
    assert changed_environment(script, None) == script


def test_vllm_serve() -> None:
    found = READERS["vllm"]("vllm serve meta-llama/Meta-Llama-3-8B -tp 2 --x y")
    assert found.model == "meta-llama/Meta-Llama-3-8B"
    assert found.fields == {"tp": 2, "pp": 1}
    assert found.unread == ("--x = y",)


def test_what_a_command_leaves_to_sglang_is_named() -> None:
    line = "python -m sglang.launch_server --model-path a/b --mem-fraction-static 0.8"
    said = READERS["sglang"](f"{line} --max-running-requests 64").notes
    assert [note.rpartition(": ")[2] for note in said] == ["--chunked-prefill-size"]
    assert not READERS["sglang"](
        f"{line} --max-running-requests 64 --chunked-prefill-size 4096"
    ).notes


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


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n", 64),
        ('{"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 2}}', 72),
    ],
)
def test_a_file_without_a_batch_is_planned_with_that_of_a_plan(
    tmp_path: Path, text: str, batch: int
) -> None:
    """accelerate leaves the batch to the script."""
    path = tmp_path / ("ds.json" if text[0] == "{" else "accelerate.yaml")
    path.write_text(text)
    found = plan_from(str(path), model="llama-3-8b", cluster="8xH100-SXM")
    assert found.predicted.global_batch == batch
    assert f"no global batch; {batch} sequences are assumed" in reading_text(found)
    given = plan_from(str(path), model="llama-3-8b", cluster="8xH100-SXM", global_batch=24)
    assert given.predicted.global_batch == 24
    assert "no global batch" not in reading_text(given)


def test_whole_experts_of_megatron_are_read() -> None:
    text = "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    folded = READERS["megatron"](text + "--expert-tensor-parallel-size 1")
    assert folded.layout(8, None).expert_tp == 1
    assert READERS["megatron"](text).layout(8, None).expert_tp == 2
