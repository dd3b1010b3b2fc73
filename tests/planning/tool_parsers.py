"""Other tools' own argument checks, one process for each: texts on standard input, verdicts out.

    python -m tests.planning.tool_parsers TOOL < cases.json

A case is `{"text": ..., "gpus": ..., "layers": ..., ...}`; a verdict is an empty string or the
tool's own error. A tool that cannot be imported ends the process with status 3 and says why.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import traceback
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.planning.absent import leave_out
from tests.planning.tool_rules import flags

Case = dict[str, Any]


def megatron() -> Callable[[Case], None]:
    if not hasattr(typing, "override"):  # Megatron-LM asks for Python 3.12
        typing.override = lambda function: function  # type: ignore[attr-defined]
    import torch
    from megatron.training.arguments import parse_args, validate_args

    def check(case: Case) -> None:
        major, minor = case["capability"]
        device = types.SimpleNamespace(major=major, minor=minor, name="", total_memory=2**36)
        torch.cuda.get_device_capability = lambda *_: (major, minor)
        torch.cuda.get_device_properties = lambda *_: device
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        found = flags(case["text"])
        if found.pop("environment").startswith("export"):
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        os.environ.update(RANK="0", WORLD_SIZE=str(case["gpus"]), LOCAL_RANK="0")
        words = [word for name, value in found.items() for word in (name, *shlex.split(value))]
        model = {
            "--num-layers": case["layers"], "--hidden-size": 128 * case["heads"],
            "--num-attention-heads": case["heads"], "--max-position-embeddings": case["seq_len"],
            "--train-iters": 1, "--lr": 1e-4, "--vocab-size": 1000,
        }  # fmt: skip
        if case["experts"]:
            model |= {"--num-experts": case["experts"], "--moe-router-topk": 2}
        sys.argv = ["pretrain", *words, *(str(w) for pair in model.items() for w in pair)]
        sys.argv += ["--untie-embeddings-and-output-weights", "--no-save-optim"]
        validate_args(parse_args(), {})

    return check


def torchtitan() -> Callable[[Case], None]:
    import tyro
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.config.manager import ConfigManager, custom_registry

    ConfigManager.register_tyro_rules(custom_registry)

    def check(case: Case) -> None:
        found = flags(case["text"])
        for section, kind in (("parallelism", ParallelismConfig), ("training", TrainingConfig)):
            words = []
            for name, value in found.items():
                if name.startswith(f"--{section}."):
                    words += ["--" + name.partition(".")[2], *value.split()]
            tyro.cli(kind, args=words, registry=custom_registry)

    return check


def torchtitan_old() -> Callable[[Case], None]:
    from torchtitan.config import ConfigManager

    try:
        from torchtitan.distributed import ParallelDims
    except ImportError:  # needs a newer torch
        ParallelDims = None

    def check(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "job.toml"
            file.write_text(case["text"])
            config = ConfigManager().parse_args(["--job.config_file", str(file)])
        if ParallelDims is not None:
            p = config.parallelism
            ParallelDims(
                dp_shard=p.data_parallel_shard_degree,
                dp_replicate=p.data_parallel_replicate_degree,
                cp=p.context_parallel_degree, tp=p.tensor_parallel_degree,
                pp=p.pipeline_parallel_degree, ep=p.expert_parallel_degree,
                etp=p.expert_tensor_parallel_degree, world_size=case["gpus"],
            )  # fmt: skip

    return check


def deepspeed() -> Callable[[Case], None]:
    from deepspeed.runtime import config as module

    module.dist.get_rank = lambda *_: 0

    def check(case: Case) -> None:
        found = json.loads(case["text"])
        stages = next((w for w in found["comment"] if "num_stages=" in w), "num_stages=1,")
        ranks = case["gpus"] // int(stages.partition("num_stages=")[2].partition(",")[0])
        if found.get("sequence_parallel_size", 1) > 1:
            ranks = found["data_parallel_size"]

        class Mesh:
            def get_data_parallel_world_size(self) -> int:
                return ranks

        module.DeepSpeedConfig(found, mpu=Mesh())

    return check


def accelerate() -> Callable[[Case], None]:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    def check(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "accelerate.yaml"
            file.write_text(case["text"])
            found = load_config_from_file(str(file))
            parser = launch_command_parser()
            _validate_launch_command(parser.parse_args(["--config_file", str(file), "train.py"]))
        sizes = getattr(found, "parallelism_config", None) or {}
        ParallelismConfig(**{k.removeprefix("parallelism_config_"): v for k, v in sizes.items()})

    return check


_BRIDGE_ABSENT = ("transformer_engine", "omegaconf", "einops", "megatron.energon")


def megatron_bridge() -> Callable[[Case], None]:
    leave_out(_BRIDGE_ABSENT)
    if not hasattr(typing, "override"):  # as Megatron-LM
        typing.override = lambda function: function  # type: ignore[attr-defined]
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.training import config as module

    def check(case: Case) -> None:
        line = next((w for w in case["text"].splitlines() if "environment: " in w), "")
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        if "export" in line:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        os.environ.update(RANK="0", WORLD_SIZE=str(case["gpus"]), LOCAL_RANK="0")
        mixture = {
            "num_moe_experts": case["experts"], "moe_router_topk": 2, "moe_grouped_gemm": True,
        }  # fmt: skip
        cfg = module.ConfigContainer(
            train=module.TrainingConfig(train_iters=1),
            model=GPTModelProvider(
                num_layers=case["layers"], hidden_size=128 * case["heads"], vocab_size=1000,
                num_attention_heads=case["heads"], seq_length=case["seq_len"],
                ffn_hidden_size=1024, add_bias_linear=False, **(mixture if case["experts"] else {}),
            ),
            optimizer=module.OptimizerConfig(lr=1e-4),
            scheduler=module.SchedulerConfig(lr_decay_iters=1),
            dataset=module.MockGPTDatasetConfig(
                random_seed=1, seq_length=case["seq_len"], reset_attention_mask=False,
                reset_position_ids=False, eod_mask_loss=False, num_dataset_builder_threads=1,
            ),
            logger=module.LoggerConfig(),
            tokenizer=module.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000),
            checkpoint=module.CheckpointConfig(save="a folder"),
        )  # fmt: skip
        for assignment in re.findall(r"^    cfg\.(\S+) =", case["text"], re.MULTILINE):
            owner: Any = cfg
            for name in assignment.split("."):
                assert hasattr(owner, name), f"cfg has no {assignment}"
                owner = getattr(owner, name)
        space: dict[str, Any] = {}
        exec(case["text"], space)
        module.runtime_config_update(space["apply_layout"](cfg))
        assert cfg.data_parallel_size == case["dp"]

    return check


def automodel() -> Callable[[Case], None]:
    import torch.distributed as dist
    import yaml
    from nemo_automodel.components.distributed.config import DistributedSetup
    from nemo_automodel.components.distributed.pipelining.functional import (
        calculate_virtual_stages,
    )
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def check(case: Case) -> None:
        found = yaml.safe_load(case["text"])
        parsed = parse_distributed_section(found["distributed"])
        dist.init_process_group("fake", rank=0, world_size=case["gpus"], store=FakeStore())
        try:
            setup = DistributedSetup.build(
                strategy=parsed["strategy_config"],
                parallelism_sizes=parsed["parallelism_sizes"],
                pipeline_config=parsed["pipeline_config"],
                moe_parallel_config=parsed["moe_parallel_config"],
                activation_checkpointing=parsed["activation_checkpointing"],
                world_size=case["gpus"],
            )
        finally:
            dist.destroy_process_group()
        assert setup is not None
        if parsed["pipeline_config"] is not None:
            get_schedule_class(parsed["pipeline_config"].pp_schedule)
            calculate_virtual_stages(
                case["layers"], parsed["pipeline_config"].layers_per_stage, parsed["pp_size"],
                "interleaved" not in parsed["pipeline_config"].pp_schedule,
            )  # fmt: skip
        StepScheduler(
            **found["step_scheduler"], dp_size=case["dp"], max_steps=1,
            dataloader=[None] * 64, ckpt_every_steps=1,
        )  # fmt: skip

    return check


def _model_folder(case: Case) -> str:
    """A directory with a configuration of the case's heads, layers and experts."""
    folder = tempfile.mkdtemp()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384,
        "intermediate_size": 53248, "num_hidden_layers": case["layers"],
        "num_attention_heads": case["heads"], "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "dtype": "bfloat16",
    }  # fmt: skip
    if case["experts"]:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
            "num_experts": case["experts"], "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def _words(text: str) -> list[str]:
    """The words of a command after its comments, with the first node's values."""
    text = text.replace("$NODE_RANK", "0").replace("$HEAD", "127.0.0.1")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [w for w in shlex.split(" ".join(lines).replace("\\ ", " ")) if "_PARTITION=" not in w]


def vllm() -> Callable[[Case], None]:
    leave_out(("aiohttp", "openai_harmony", "uvloop", "xgrammar"))
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())

    def check(case: Case) -> None:
        words = _words(case["text"])
        assert words[:2] == ["vllm", "serve"]
        engine = AsyncEngineArgs.from_cli_args(parser.parse_args(words[2:]))
        names = [
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes",
            "data_parallel_size_local", "data_parallel_rpc_port", "enable_expert_parallel",
            "node_rank", "master_addr",
        ]  # fmt: skip
        given = {name: getattr(engine, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        parallel = ParallelConfig(**given, distributed_executor_backend="mp")
        assert parallel.world_size == case["tp"] * case["pp"]
        SchedulerConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len, is_encoder_decoder=False,
            enable_chunked_prefill=engine.enable_chunked_prefill,
        )  # fmt: skip
        CacheConfig(
            gpu_memory_utilization=engine.gpu_memory_utilization,
            cache_dtype=engine.kv_cache_dtype,
        )

    return check


_SGLANG_ABSENT = (
    "IPython", "aiohttp", "torchvision", "tvm_ffi", "sentencepiece", "compressed_tensors",
)  # fmt: skip


def sglang() -> Callable[[Case], None]:
    leave_out(_SGLANG_ABSENT)
    from sglang.srt.server_args import prepare_server_args

    def check(case: Case) -> None:
        words = _words(case["text"])
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        words[words.index("--model-path") + 1] = _model_folder(case)
        prepare_server_args([*words[3:], "--device", "cpu"]).resolve_once()

    return check


PARSERS = {
    "megatron-bridge": megatron_bridge,
    "automodel": automodel,
    "vllm": vllm,
    "sglang": sglang,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torchtitan-0.2.2": torchtitan_old,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}


def main() -> int:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check = PARSERS[sys.argv[1]]()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 3
    verdicts = []
    for case in json.load(sys.stdin):
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                check(case)
            verdicts.append("")
        except (Exception, SystemExit):
            verdicts.append(traceback.format_exc(limit=-2))
    print(json.dumps(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
