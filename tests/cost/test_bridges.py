"""Bridged pairs: NVLink between two cards, PCIe beyond."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hocket.catalogue.hardware import cluster
from hocket.cost.collectives import ALL_REDUCE, inside
from hocket.cost.machine import machine
from hocket.spec.errors import OptionError

BRIDGED, SWITCHED = machine(cluster("8xA100-PCIe")), machine(cluster("8xA100-SXM"))
GIB = np.array([2.0**30])


def seconds(ranks: int, stride: int = 1) -> float:
    return float(inside(ALL_REDUCE, GIB, np.array([float(ranks)]), BRIDGED, float(stride))[0])


def test_a_pair_talks_over_its_bridge_and_anything_wider_over_pcie() -> None:
    assert cluster("8xA100-PCIe").node.link.kind == "nvlink-pairs"
    link, pcie = BRIDGED.link[0], BRIDGED.beyond[0]
    assert link > 5 * pcie
    assert seconds(2) == pytest.approx(seconds(2, stride=2) * pcie / link, rel=0.02)
    # Per rank a ring of four carries 3/2 of a message, one of two a whole one.
    assert seconds(4) == pytest.approx(1.5 * seconds(2, stride=4), rel=0.02)


def test_a_switch_joins_all() -> None:
    assert SWITCHED.bridge[0] == 8
    assert SWITCHED.beyond[0] == SWITCHED.link[0]


def test_gpus_without_a_link_talk_over_pcie() -> None:
    whole = cluster("8xA100-PCIe")
    link = dataclasses.replace(whole.node.link, kind="none", bandwidth=0.0)
    node = dataclasses.replace(whole.node, link=link)
    found = machine(dataclasses.replace(whole, node=node))
    assert float(found.link[0]) == float(found.beyond[0]) == whole.node.pcie


def test_a_precision_that_the_gpu_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(OptionError, match="T4-16: unknown precision 'bf16'; known: fp16, fp32"):
        machine(cluster("8xT4"), "bf16")
