"""The colours of the page are told apart by eyes that see no red, no green or no blue.

Simulated by the matrices of Machado, Oliveira and Fernandes (2009) at full severity, in linear RGB;
told apart by CIE 1976 colour difference.
"""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest
from numpy.typing import NDArray

Colour = NDArray[np.float64]

SIGHT = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip

KINDS = ("forward", "backward", "weight", "optimizer", "send", "receive", "collective", "idle")
PARTS = ("compute", "communication", "bubble", "imbalance", "other")
MEMORY = ("parameters", "gradients", "state", "activations")


def palettes() -> dict[str, dict[str, Colour]]:
    """Linear RGB of each name, on light and on dark paper."""
    css = (resources.files("hocket.reporting") / "assets" / "page.css").read_text()
    light, dark = (
        {
            name: np.array([int(hex_[at : at + 2], 16) / 255 for at in (0, 2, 4)])
            for name, hex_ in re.findall(r"--([a-z-]+): #([0-9a-f]{6})", block)
        }
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    )
    linear = {}
    for scheme, colours in (("light", light), ("dark", {**light, **dark})):
        linear[scheme] = {
            name: np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
            for name, c in colours.items()
        }
    return linear


def lab(linear: Colour) -> Colour:
    """CIE L*a*b* under D65."""
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
         [0.0193339, 0.1191920, 0.9503041]]
    )  # fmt: skip
    ratio = to_xyz @ np.clip(linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: Colour, other: Colour) -> float:
    """WCAG 2 contrast of two colours."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted((float(weights @ one), float(weights @ other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", sorted(SIGHT))
@pytest.mark.parametrize("names", [KINDS, PARTS, MEMORY], ids=["kinds", "parts", "memory"])
def test_no_two_of_a_legend_look_identically(
    scheme: str, sight: str, names: tuple[str, ...]
) -> None:
    colours = palettes()[scheme]
    seen = {name: lab(SIGHT[sight] @ colours[name]) for name in names}
    apart = {
        (one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for one, other in itertools.combinations(names, 2)
    }
    assert min(apart.values()) > 12, sorted(apart.items(), key=lambda pair: pair[1])[:3]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(scheme: str) -> None:
    colours = palettes()[scheme]
    for ink, paper in [
        ("ink", "paper"), ("soft", "paper"), ("soft", "raised"), ("warn", "warn-paper"),
    ]:  # fmt: skip
        assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for kind in ("forward", "backward", "weight", "optimizer"):
        assert contrast(colours[f"on-{kind}"], colours[kind]) >= 3, kind
