"""Colours and type of the figures: safe for colour-blind readers, one set for light pages and one for dark.

Domains take Okabe and Ito's hues, modes a second set, depths steps of one ramp (cividis) because
they are ordered. Shape repeats what hue says, so a figure also reads in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import to_hex

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ALL_MARKER = "*"


@dataclass(frozen=True)
class Theme:
    """One page colour's set of colours, as hex strings."""

    name: str
    background: str
    ink: str
    muted: str
    grid: str
    series: Sequence[str]
    modes: Sequence[str]
    parts: Sequence[str]
    part_ink: Sequence[str]
    ramp: tuple[float, float]

    def depths(self, count: int) -> list[str]:
        """``count`` steps of the ramp, first depth first."""
        start, stop = self.ramp
        steps = [start + (stop - start) * index / max(count - 1, 1) for index in range(count)]
        return [to_hex(colormaps["cividis"](step)) for step in steps]

    def settings(self) -> dict[Any, Any]:
        """Settings for matplotlib; every value that a user's own matplotlibrc could change is pinned."""
        return {
            "figure.facecolor": self.background,
            "savefig.facecolor": self.background,
            "axes.facecolor": self.background,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.labelsize": 9.5,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "text.color": self.ink,
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "legend.frameon": False,
            "legend.fontsize": 9.5,
            "lines.linewidth": 1.8,
            "lines.markersize": 6,
            "font.family": ["DejaVu Sans"],
            "font.size": 9.5,
            "figure.dpi": 100,
            "savefig.dpi": 160,
            "figure.constrained_layout.use": True,
        }


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#1f2328",
    muted="#6e7781",
    grid="#e3e6ea",
    series=("#0072b2", "#d55e00", "#009e73", "#b8649b", "#8a6d00", "#3b3b3b"),
    modes=("#332288", "#117733", "#aa4466", "#997700"),
    parts=("#d55e00", "#0072b2", "#c4cad1"),
    part_ink=("#ffffff", "#ffffff", "#1f2328"),
    ramp=(0.0, 0.78),
)
DARK = Theme(
    name="dark",
    background="#16191d",
    ink="#e6e8eb",
    muted="#9aa3ad",
    grid="#2d333a",
    series=("#56b4e9", "#f08a4b", "#34c79a", "#e39ac6", "#e0c341", "#c8c8c8"),
    modes=("#a99cf0", "#6ecb7d", "#ee8fb0", "#e0c341"),
    parts=("#f08a4b", "#56b4e9", "#4a525b"),
    part_ink=("#16191d", "#16191d", "#e6e8eb"),
    ramp=(1.0, 0.3),
)
