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
import shlex
import sys
import tempfile
import traceback
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


PARSERS = {
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
