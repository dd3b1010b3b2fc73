"""`hocket template`: print a job file for a cluster, filled in for a layout."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import Paths, Run, Text, parse_flags
from hocket.spec.errors import OptionError

Kind = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="KIND")]
Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Print a job file for a cluster: nodes, ranks, arguments and probes follow from the layout.

    Options of `hocket train` or `hocket serve` follow after `--`.

    Attributes:
        kind: slurm, kubernetes, docker, skypilot; grafana (a board as JSON) or prometheus (alerts).
        model: the model, as for `hocket train` and `hocket serve`.
        layout: degrees of parallelism, as in dp2.tp8.
        data: training data, as for `hocket train`.
        serve: print a server instead of a training job.
        name: name of the job and of its parts.
        run: run folder on a file system that all nodes share (default: runs/NAME).
        gpus_per_node: GPUs of a node; 0 for ranks on CPUs.
        ranks_per_node: ranks of a node without GPUs.
        gpu: name of the GPU, for SkyPilot.
        time: time limit, for Slurm.
        image: container image, for Kubernetes (default: hocket:VERSION).
        storage: size of the volume of runs or models, for Kubernetes.
        interface: network interface of NCCL and Gloo, as in ib0 or eth0 (default: their choice).
        port: port of the API; metrics have the next one.
        launch: command between srun and hocket, as in "apptainer exec --nv hocket.sif".
    """

    kind: Kind = ""
    model: Model = ""
    layout: Text = None
    data: Paths = ()
    serve: bool = False
    name: str = "hocket"
    run: Run = None
    gpus_per_node: int = 8
    ranks_per_node: int = 1
    gpu: str = "H100"
    time: str = "24:00:00"
    image: Text = None
    storage: str = "1Ti"
    interface: Text = None
    port: int = 8000
    launch: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    mine, options = list(arguments), []
    if "--" in mine:
        at = mine.index("--")
        mine, options = mine[:at], mine[at + 1 :]
    flags = parse_flags(TemplateFlags, "template", mine, TemplateFlags())
    _checked(flags, options)
    from hocket.jobs.template import Template, template

    given = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    sys.stdout.write(template(Template(**given, options=tuple(options))))
    return 0


def _checked(flags: TemplateFlags, options: list[str]) -> None:
    """Read the further options with the verb's own parser: a mistake ends the process here, not on
    the cluster."""
    from hocket.cli import serve, spelling, train

    verb, module = ("serve", serve) if flags.serve else ("train", train)
    known = spelling.flags_of(module)
    options[:] = spelling.checked_arguments(verb, spelling.current(verb, options, known), known)
    kind = spelling.flags_class(module)
    found = parse_flags(kind, verb, options, kind())
    if found.model:
        raise OptionError(
            f"options of hocket {verb} follow --, and {found.model!r} is not one",
            hint=f"hocket {verb} --help all lists every option",
        )
