"""Measured collectives: read, interpolated between sizes, flagged outside them."""

import pytest

from hocket.catalogue import curves, hardware
from hocket.spec.cluster import LINKS
from hocket.spec.errors import OptionError


def test_every_curve_is_of_a_known_gpu_and_rises():
    found = curves.curves()
    assert len(found) > 90
    for curve in found:
        assert curve.gpu in hardware.gpu_names()
        assert curve.topology in (*LINKS, "network")
        assert curve.source
        assert curve.sizes == tuple(sorted(set(curve.sizes)))
        assert curve(curve.sizes[-1]).seconds > curve(curve.sizes[0]).seconds


@pytest.mark.parametrize(
    ("gpu", "topology", "gigabytes"),
    [
        ("A100-SXM-80", "nvswitch", 222),
        ("H100-SXM-80", "nvswitch", 445),
        ("B200-SXM-180", "nvswitch", 695),
        ("RTXPRO6000-96", "pcie-switch", 25),
        ("L40S-48", "pcie", 1.45),
    ],
)
def test_bus_bandwidth_of_eight_gpus_at_512_mib(gpu, topology, gigabytes):
    curve = curves.curve("all-reduce", gpu=gpu, topology=topology, num_gpus=8)
    assert curve is not None
    assert curve.bus_bandwidth(2**29) / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_interpolation_and_extrapolation():
    curve = curves.curve("all-reduce", gpu="H100-SXM-80", topology="nvswitch", num_gpus=8)
    assert curve is not None
    low, high = curve.sizes[3], curve.sizes[4]
    assert curve(low).seconds == pytest.approx(curve.seconds[3])
    middle = curve((low * high) ** 0.5)
    assert middle.seconds == pytest.approx((curve.seconds[3] * curve.seconds[4]) ** 0.5)
    assert not middle.extrapolated
    assert curve(1).extrapolated
    assert curve(1).seconds == curve.seconds[0]
    far = curve(4 * curve.sizes[-1])
    assert far.extrapolated
    assert far.seconds == pytest.approx(4 * curve.seconds[-1], rel=0.1)


def test_what_nobody_measured():
    assert curves.curve("all-reduce", gpu="A10-24", topology="pcie", num_gpus=8) is None
    with pytest.raises(OptionError, match="all_reduce"):
        curves.curve("all_reduce", gpu="A10-24", topology="pcie", num_gpus=8)
