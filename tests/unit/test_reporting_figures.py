"""What the figures draw is what the tables print."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from selfspec.config import load
from selfspec.reporting import figures, frames, plots, tables, text
from selfspec.reporting.inputs import InputPaths
from selfspec.reporting.measures import Estimate
from selfspec.reporting.report import Report, load_report
from selfspec.reporting.theme import DARK, LIGHT
from tests.unit.reporting_synthetic import write_inputs


def make_report(folder: Path, **changes) -> Report:
    write_inputs(folder, **changes)
    return load_report(InputPaths.under(folder / "reports"), load(folder / "params.yaml"))


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    return make_report(tmp_path_factory.mktemp("report"))


def drawn(axis, label: str) -> np.ndarray:
    """The y values of the line that the legend calls ``label``."""
    containers = [found for found in axis.containers if found.get_label() == label]
    return np.asarray(containers[0].lines[0].get_ydata(), dtype=float)


def test_speedup_figure_shows_the_table(report):
    figure = plots.speedup(frames.speedup(report.measures), LIGHT)
    for axis, mode in zip(figure.axes, ("greedy", "t0.5"), strict=True):
        for row in tables.speedup(report.measures, "mtp", mode).rows:
            assert [f"{value:.2f}" for value in drawn(axis, row[0])] == [cell.split()[0] for cell in row[2:]]


def test_acceptance_figure_shows_the_table(report):
    figure = plots.acceptance(frames.acceptance(report.measures), LIGHT)
    for axis, mode in zip(figure.axes, ("greedy", "t0.5", "t1.0"), strict=True):
        for row in tables.acceptance(report.measures, "accept", mode).rows:
            assert [f"{100 * value:.1f}" for value in drawn(axis, row[0])] == [cell.split()[0] for cell in row[2:]]


def test_tokens_per_round_figure_shows_the_table_and_its_intervals(report):
    axis = plots.tokens_per_round(frames.tokens_per_round(report.measures), LIGHT).axes[0]
    rows = tables.tokens_per_round(report.measures).rows
    assert [label.get_text() for label in axis.get_yticklabels()] == [row[0] for row in rows]
    for column, container in enumerate(axis.containers, start=2):
        points, _, (bars,) = container.lines
        shown = [
            text.ratio(Estimate(value, *sorted(segment[:, 0])))
            for value, segment in zip(points.get_xdata(), bars.get_segments(), strict=True)
        ]
        assert shown == [row[column] for row in rows]


def test_time_split_figure_shows_the_table(report):
    axis = plots.time_split(frames.time_split(report.measures), LIGHT).axes[0]
    rows = tables.time_split(report.measures).rows
    for column, bars in enumerate(axis.containers, start=1):
        assert [f"{100 * bar.get_width():.1f} %" for bar in bars] == [row[column] for row in rows]


def test_loss_figure_marks_the_validation_table(report):
    figure = plots.losses(report.losses, LIGHT, report.loss_names)
    for axis, stage in zip(figure.axes, ("ce", "kl"), strict=True):
        rows = tables.losses(report.losses, stage).rows
        for depth in (1, 2, 3):
            line = next(line for line in axis.lines if line.get_label() == f"depth {depth}")
            assert [f"{value:.3f}" for value in line.get_ydata()] == [row[depth] for row in rows]
            assert [f"{step:,.0f}" for step in line.get_xdata()] == [row[0] for row in rows]


def test_headline_figure_is_the_recommended_setting(report):
    frame = frames.headline(report.measures)
    assert set(frame["mode"]) == {"greedy", "t0.5"}
    for row in frame.to_dict("records"):
        assert row["drafts"] == report.measures.best_k(row["mode"])
        assert row["value"] == report.measures.metrics[f"bench.{row['domain']}.{row['mode']}.speedup"]


def test_figures_are_saved_and_the_same_bytes_twice(report, tmp_path):
    figures.save_all(report, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.stem for file in files] == sorted(figures.FIGURES)
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert data == figures.png(report, file.stem)
        assert b"Software" not in data
        assert b"matplotlib" not in data


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_colours_stand_out_from_the_page(theme):
    """WCAG asks 3 : 1 of graphics and 4.5 : 1 of text."""

    def luminance(colour: str) -> float:
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot([0.2126, 0.7152, 0.0722], channels))

    def contrast(first: str, second: str) -> float:
        lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for colour in (*theme.series, *theme.modes, *theme.parts[:2]):
        assert contrast(colour, theme.background) >= 3, colour
    assert contrast(theme.ink, theme.background) >= 4.5
    for part, ink in zip(theme.parts, theme.part_ink, strict=True):
        assert contrast(part, ink) >= 3, part


SMALL = {
    "accept_domains": ("code", "poems"),
    "bench_domains": ("code",),
    "accept_modes": ("greedy",),
    "bench_modes": ("greedy",),
    "depths": 1,
    "draft_counts": (2,),
    "lookup_counts": (),
    "prompts": 2,
    "bench_prompts": 1,
}


def test_any_set_of_domains_modes_and_depths_draws(tmp_path):
    report = make_report(tmp_path, **SMALL)
    for name in figures.FIGURES:
        assert figures.png(report, name).startswith(b"\x89PNG")
    assert [row[0] for row in tables.tokens_per_round(report.measures).rows] == ["code", "poems", "all"]
    assert not any("look-up" in row[0] for row in tables.benchmark(report.measures).rows)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (text.ratio(Estimate(1.8349, 1.7351, 1.9249)), "1.83 [1.74, 1.92]"),
        (text.ratio(Estimate(1.8349)), "1.83"),
        (text.share(Estimate(0.7123, 0.6804, 0.7406)), "71.2 % [68.0, 74.1]"),
        (text.share(None), "–"),
        (text.speed(31.449), "31.4"),
        (text.speed(1234.5), "1,234"),
        (text.millions(12_903_221.0), "12.9 M"),
        (text.mebibytes(256.6), "257 MiB"),
    ],
)
def test_rounding(written, wanted):
    assert written == wanted
