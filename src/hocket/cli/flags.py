"""Flags: the groups of options that verbs share, and the one way they are read.

The names are those of `spec.run` and `spec.layout`; a test holds them together.
"""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import tyro

from hocket.cli.help import REGISTRY
from hocket.spec.errors import OptionError

Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
Paths = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH...")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
Folder = Annotated[str | None, tyro.conf.arg(metavar="DIR")]
Run = Annotated[str | None, tyro.conf.arg(metavar="DIR", aliases=("-o", "--output-dir"))]
"""A run folder. torchrun finds `--run` ambiguous with its own `--run-path`, not these aliases."""
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int | None, tyro.conf.arg(metavar="INT")]

Kind = TypeVar("Kind")

CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutFlags:
    """Degrees of parallelism and schedule. Flags fill in what the text of --layout omits.

    Attributes:
        layout: degrees of data (dp), pipeline (pp), context (cp), tensor (tp) and expert (ep,
            etp) parallelism, in any order, and after a colon any other field: dp2.pp2.tp2:zero=1
            (default: auto for train on several GPUs, dp2 for demo, required by check, else dp1).
        dp: data-parallel degree.
        pp: pipeline-parallel degree.
        cp: context-parallel degree.
        tp: tensor-parallel degree.
        ep: expert-parallel degree: ranks that together hold all experts.
        etp: ranks over which each expert is split: 1 or tp (default: tp).
        zero: ZeRO stage: shards the optimizer state (1), gradients (2) and parameters (3) over data
            ranks. One of: 0, 1, 2, 3.
        recompute: activations to recompute in backward: full (each layer from its input), modules
            of each layer, as in norm+activation (norm, activation, mla_up, mlp, core_attn), or
            selective, which is core_attn (default: none).
        sequence_parallel: compute norms and residuals on 1/tp of the sequence.
        schedule: pipeline schedule: sequential, gpipe, 1f1b, interleaved, zero-bubble, zb-v, or the
            path of a schedule file (default: 1f1b).
        microbatches: microbatches per data rank and step (default: without a pipeline the fewest of
            at most 8,192 tokens that fit the memory, else at most twice the pipeline ranks).
        pipeline_split: layers per pipeline stage: balanced (by cost), even, light-ends, or a list
            such as 3-5 (default: balanced).
        virtual_stages: stages per pipeline rank (default: 1; zb-v: 2).
        data_parallel: data-parallel replicas as processes (one rank each) or threads of one process
            (default: processes). One of: processes, threads.
        offload: keep in host memory: optimizer (state and update), params (parameter shards too;
            needs zero=3), activations (saved for backward; GPUs only), or two of them, as in
            optimizer+activations (default: nothing).
        order: mesh axes from the fastest-varying rank digit to the slowest (default: tp-cp-dp-pp).
    """

    layout: Text = None
    dp: Count = None
    pp: Count = None
    cp: Count = None
    tp: Count = None
    ep: Count = None
    etp: Count = None
    zero: Text = None
    recompute: Text = None
    sequence_parallel: bool = False
    schedule: Text = None
    microbatches: Count = None
    pipeline_split: Text = None
    virtual_stages: Count = None
    data_parallel: Text = None
    offload: Text = None
    order: Text = None


ALIASES = {"-o": "run", "--output-dir": "run", "--output_dir": "run"}
"""Other spellings of flags, and their names."""


def explicit(arguments: Sequence[str]) -> frozenset[str]:
    """Names of the flags that were written, whatever their values."""
    written = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    return frozenset(ALIASES.get(f, f.removeprefix("--").replace("-", "_")) for f in written)


def flag_values(group: Any, *, also: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The flags that differ from their defaults, and those named in `also`, by name.

    Groups inside the group are flattened.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            found.update(flag_values(value, also=also))
        elif value != field.default or field.name in also:
            found[field.name] = value
    return found


def with_defaults(kind: type[Kind], given: dict[str, Any]) -> Kind:
    """A group of flags whose defaults are `given` where it has the name."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def parse_flags(kind: type[Kind], verb: str, arguments: Sequence[str], default: Kind) -> Kind:
    """Read a verb's flags. A mistake of form ends the process with code 2.

    Raises:
        OptionError: an argument that no flag takes.

    Where a flag takes several values, what it is given at each place is taken together.
    """
    args = _together(arguments, _lists(kind))
    found, beyond = tyro.cli(
        kind, prog=f"hocket {verb}", args=args, default=default, config=CONFIG,
        registry=REGISTRY, return_unknown_args=True, add_help=False,
    )  # fmt: skip
    if beyond:
        raise OptionError(
            f"unexpected argument {beyond[0]!r} of hocket {verb}",
            hint=_meant(verb, arguments, beyond) or f"hocket {verb} --help",
        )
    return found


SECOND = {
    "train": "--data", "generate": "--prompt", "plan": "--cluster",
    "check": "--layout", "rehearse": "--layout", "export": "--to",
}  # fmt: skip
"""The flag of what is most often written after the model."""


def _meant(verb: str, arguments: Sequence[str], beyond: Sequence[str]) -> str | None:
    """The command with what no flag takes as the value of one; None where that one is given."""
    flag = SECOND.get(verb)
    if flag is None or flag[2:] in explicit(arguments) or any(b.startswith("-") for b in beyond):
        return None
    kept = list(arguments)
    for argument in beyond:
        kept.remove(argument)
    return shlex.join(["hocket", verb, *kept, flag, *beyond])


def _lists(kind: Any) -> frozenset[str]:
    """The flags of a group, and of groups in it, that take several values."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is tuple:
            found.add(f"--{name.replace('_', '-')}")
        elif dataclasses.is_dataclass(hint):
            found |= _lists(hint)
    return frozenset(found)


def _together(arguments: Sequence[str], lists: frozenset[str]) -> list[str]:
    """The arguments, those of a repeated list where it stands first: only its last place is read,
    and `--data a --data b` would lose a file without a word."""
    part: list[str] = []
    parts = [part]
    first: dict[str, list[str]] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            part.append(argument)
        elif flag in first:
            part = first[flag]
            part += [value] if equals else []
        else:
            part = [flag, value] if flag in lists and equals else [argument]
            parts.append(part)
            if flag in lists:
                first[flag] = part
    return [argument for part in parts for argument in part]
