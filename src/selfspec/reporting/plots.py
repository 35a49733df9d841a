"""The figures. Each takes a frame of ``frames`` and a theme, and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from selfspec.reporting.frames import STAGES
from selfspec.reporting.measures import mode_name, order_domains, order_modes
from selfspec.reporting.theme import ALL_MARKER, MARKERS, Theme

WIDTH_IN = 5.6  # narrow on purpose: at a phone's width the lettering stays readable


def losses(frame: pd.DataFrame, theme: Theme, loss_names: dict[str, str]) -> Figure:
    """Loss by step, a panel a stage, a colour a depth: training thin, validation marked."""
    stages = [stage for stage in STAGES if stage in set(frame["stage"])]
    figure, axes = _panels(len(stages), 2.3, share_x=False)
    depths = sorted(set(frame["depth"]))
    colours = dict(zip(depths, theme.depths(len(depths)), strict=True))
    for axis, stage in zip(axes, stages, strict=True):
        for depth in depths:
            rows = frame[(frame["stage"] == stage) & (frame["depth"] == depth)]
            train, validation = (rows[rows["split"] == split] for split in ("train", "validation"))
            axis.plot(train["step"], train["loss"], color=colours[depth], linewidth=0.8, alpha=0.45)
            axis.plot(
                validation["step"],
                validation["loss"],
                color=colours[depth],
                marker=MARKERS[depths.index(depth) % len(MARKERS)],
                markersize=5,
                label=f"depth {depth}",
            )
        axis.set_title(f"{STAGES[stage]}: {loss_names[stage]}")
        axis.set_ylabel("loss")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[-1].set_xlabel("optimiser step (marked: validation; thin: training)")
    _legend(figure, axes[0])
    return figure


def acceptance(frame: pd.DataFrame, theme: Theme) -> Figure:
    """Share of drafts accepted by depth, given all earlier ones were; a panel a mode, a colour a domain."""
    modes = order_modes(set(frame["mode"]))
    figure, axes = _panels(len(modes), 2.2)
    depths = sorted(set(frame["depth"]))
    for axis, mode in zip(axes, modes, strict=True):
        _domain_lines(axis, frame[frame["mode"] == mode], "depth", order_domains(set(frame["domain"])), theme)
        axis.set_title(mode_name(mode))
        axis.set_ylim(0, 1)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_xticks(depths, [str(depth) for depth in depths])
        axis.set_xlim(min(depths) - 0.4, max(depths) + 0.4)
    axes[-1].set_xlabel("depth of the draft")
    _legend(figure, axes[0])
    return figure


def speedup(frame: pd.DataFrame, theme: Theme) -> Figure:
    """Speedup by K, a panel a mode, a colour a domain; the prompt look-up rival stands to the right."""
    modes = order_modes(set(frame["mode"]))
    figure, axes = _panels(len(modes), 2.5)
    slots = sorted({(row["method"], int(row["drafts"])) for row in frame.to_dict("records")})
    labels = [f"K = {drafts}" if method == "mtp" else f"look-up\n{drafts}" for method, drafts in slots]
    place = {slot: position for position, slot in enumerate(slots)}
    frame = frame.assign(slot=[place[m, int(d)] for m, d in zip(frame["method"], frame["drafts"], strict=True)])
    domains = order_domains(set(frame["domain"]))
    for axis, mode in zip(axes, modes, strict=True):
        rows = frame[frame["mode"] == mode]
        _domain_lines(axis, rows[rows["method"] == "mtp"], "slot", domains, theme)
        _domain_lines(axis, rows[rows["method"] != "mtp"], "slot", domains, theme, line="none", labelled=False)
        axis.axhline(1.0, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.set_title(mode_name(mode))
        axis.set_ylabel("speedup")
        axis.set_xticks(range(len(slots)), labels)
        axis.set_xlim(-0.5, len(slots) - 0.5)
    axes[-1].set_xlabel("dashed: plain decoding of the same engine")
    _legend(figure, axes[0])
    return figure


def headline(frame: pd.DataFrame, theme: Theme) -> Figure:
    """Speedup at the recommended K by domain, a colour a mode, values written beside the points."""
    names = {row["mode"]: f"{mode_name(row['mode'])}, K = {row['drafts']}" for row in frame.to_dict("records")}
    figure = _mode_dots(frame, theme, lambda mode: names[mode], "speedup over plain decoding (dashed: none)")
    figure.axes[0].axvline(1.0, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    return figure


def tokens_per_round(frame: pd.DataFrame, theme: Theme) -> Figure:
    """Committed tokens per backbone verification by domain, a colour a mode."""
    return _mode_dots(frame, theme, mode_name, "tokens per round (1 = no draft accepted)")


def time_split(frame: pd.DataFrame, theme: Theme) -> Figure:
    """Shares of decoding time, a bar for each mode and K."""
    figure, (axis,) = _panels(1, 0.9 + 0.32 * max(len(frame), 1))
    position = np.arange(len(frame))
    left = np.zeros(len(frame))
    parts = (("draft", "drafting"), ("verify", "verifying"), ("rest", "the rest"))
    for (part, name), colour, ink in zip(parts, theme.parts, theme.part_ink, strict=True):
        share = frame[part].to_numpy(dtype=float)
        axis.barh(position, share, left=left, height=0.72, color=colour, edgecolor=theme.background, label=name)
        for row, (start, width) in enumerate(zip(left, share, strict=True)):
            if width >= 0.06:  # narrower segments have no room for their number; the table has it
                axis.text(start + width / 2, row, f"{100 * width:.0f}", color=ink, ha="center", va="center")
        left = left + share
    labels = [f"{mode_name(row['mode'])}, K = {row['drafts']}" for row in frame.to_dict("records")]
    axis.set_yticks(position, labels)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xlabel("share of decoding time, all domains")
    _legend(figure, axis)
    return figure


def _panels(count: int, height_in: float, share_x: bool = True) -> tuple[Figure, list[Axes]]:
    """``count`` axes above each other; a figure outside pyplot, so that nothing global is touched."""
    figure = Figure(figsize=(WIDTH_IN, height_in * count + 0.5))
    grid = figure.subplots(max(count, 1), 1, sharex=share_x, squeeze=False)
    return figure, list(grid[:, 0])


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 5), columnspacing=1.2)


def _domain_lines(
    axis: Axes,
    frame: pd.DataFrame,
    column: str,
    domains: Sequence[str],
    theme: Theme,
    line: str = "-",
    labelled: bool = True,
) -> None:
    """A line with intervals for each domain, nudged sideways so that intervals do not hide each other."""
    for position, domain in enumerate(domains):
        rows = frame[frame["domain"] == domain].sort_values(column)
        nudge = 0.09 * (position - (len(domains) - 1) / 2)
        whole = domain == "all"
        axis.errorbar(
            rows[column].to_numpy(dtype=float) + nudge,
            rows["value"],
            yerr=_reach(rows),
            color=theme.ink if whole else theme.series[position % len(theme.series)],
            marker=ALL_MARKER if whole else MARKERS[position % len(MARKERS)],
            markersize=9 if whole else 5.5,
            linestyle=line,
            linewidth=2.2 if whole else 1.4,
            elinewidth=1.2,
            label=domain if labelled else None,
        )


def _mode_dots(frame: pd.DataFrame, theme: Theme, name: Callable[[Any], str], label: str) -> Figure:
    """Domains from top to bottom, a dot with its interval and value for each mode."""
    domains = order_domains(set(frame["domain"]))
    modes = order_modes(set(frame["mode"]))
    figure, (axis,) = _panels(1, 0.7 + 0.21 * len(domains) * (len(modes) + 0.6))
    step = 0.76 / max(len(modes), 1)
    for index, mode in enumerate(modes):
        rows = frame[frame["mode"] == mode]
        heights = [domains.index(domain) + step * (index - (len(modes) - 1) / 2) for domain in rows["domain"]]
        axis.errorbar(
            rows["value"],
            heights,
            xerr=_reach(rows),
            color=theme.modes[index % len(theme.modes)],
            marker=MARKERS[index % len(MARKERS)],
            linestyle="none",
            elinewidth=2,
            label=name(mode),
        )
        ends = rows["high"].fillna(rows["value"])
        for value, end, height in zip(rows["value"], ends, heights, strict=True):
            axis.annotate(f"{value:.2f}", (end, height), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axis.set_yticks(range(len(domains)), domains)
    axis.set_ylim(len(domains) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.12)
    axis.set_xlabel(label)
    _legend(figure, axis)
    return figure


def _reach(rows: pd.DataFrame) -> np.ndarray:
    """Distances from the value to the interval's ends, ``[2, rows]``; 0 where there is no interval."""
    value = rows["value"].to_numpy(dtype=float)
    low = rows["low"].astype(float).fillna(rows["value"]).to_numpy()
    high = rows["high"].astype(float).fillna(rows["value"]).to_numpy()
    return np.clip(np.stack([value - low, high - value]), 0.0, None)
