"""The figures by name: what each is called, how it is drawn, and its PNG bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from selfspec.reporting import frames, plots
from selfspec.reporting.report import Report
from selfspec.reporting.theme import DARK, LIGHT, Theme


@dataclass(frozen=True)
class FigureSpec:
    """``alt`` says what is drawn, for readers who do not see it; the numbers are in the table nearby."""

    alt: str
    draw: Callable[[Report, Theme], Figure]


FIGURES: dict[str, FigureSpec] = {
    "headline": FigureSpec(
        "Speedup over plain decoding by domain at the recommended number of drafts, with 95 % intervals",
        lambda report, theme: plots.headline(frames.headline(report.measures), theme),
    ),
    "speedup_by_k": FigureSpec(
        "Speedup by drafts per round and domain, with the prompt look-up rival and 95 % intervals",
        lambda report, theme: plots.speedup(frames.speedup(report.measures), theme),
    ),
    "tokens_per_round": FigureSpec(
        "Tokens per round by domain and decoding mode, with 95 % intervals",
        lambda report, theme: plots.tokens_per_round(frames.tokens_per_round(report.measures), theme),
    ),
    "acceptance": FigureSpec(
        "Share of drafts accepted by depth and domain, given that all earlier drafts were, with 95 % intervals",
        lambda report, theme: plots.acceptance(frames.acceptance(report.measures), theme),
    ),
    "time_split": FigureSpec(
        "Shares of decoding time spent drafting, verifying and on the rest, by drafts per round",
        lambda report, theme: plots.time_split(frames.time_split(report.measures), theme),
    ),
    "loss": FigureSpec(
        "Training and validation loss by step and depth, for both training stages",
        lambda report, theme: plots.losses(report.losses, theme, report.loss_names),
    ),
}


def png(report: Report, name: str, theme: Theme = LIGHT) -> bytes:
    """The figure as PNG. The same inputs give the same bytes: no date, no version, pinned settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(theme.settings())
        buffer = io.BytesIO()
        FIGURES[name].draw(report, theme).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def save_all(report: Report, folder: Path) -> None:
    """Write every figure, in its light colours, to ``folder``/<name>.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        (folder / f"{name}.png").write_bytes(png(report, name))


@dataclass(frozen=True)
class Picture:
    """A figure for a page, in light and dark, of which the reader's setting picks one."""

    alt: str
    light: bytes
    dark: bytes

    def html(self) -> str:
        """A ``<picture>`` with both variants inside it."""
        light, dark = (base64.b64encode(data).decode("ascii") for data in (self.light, self.dark))
        source = f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        return f'<picture>{source}<img alt="{self.alt}" src="data:image/png;base64,{light}"></picture>'


def picture(report: Report, name: str) -> Picture:
    """The figure ``name`` for a notebook cell to show."""
    return Picture(FIGURES[name].alt, png(report, name, LIGHT), png(report, name, DARK))
