"""Tables and panels of acceptance by domain, which the tools that compare several trainings share.

A *cell* is one figure with its interval: a mapping with ``domain``, ``metric``, ``depth`` (0: of none),
``value``, ``low``, ``high`` and ``prompts``, as text or numbers, in the terms of ``reports/accept.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.benchmark.heldout import ALL

Cell = Mapping[str, Any]

SHARES = ("match", "agreement")
"""Metrics between 0 and 1, which are shown with one digit more."""


def write_csv(path: Path, columns: Sequence[str], lines: Iterable[Cell]) -> None:
    """Write ``columns`` of ``lines``; what a line has beside them is left out, what it lacks stays empty."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def label(cell: Cell) -> str:
    """What tables call a figure: ``match 2``, ``tokens per round``."""
    metric, depth = str(cell["metric"]).replace("_", " "), int(cell["depth"])
    return f"{metric} {depth}" if depth else metric


def domains(cells: Iterable[Cell]) -> list[str]:
    """Each once, in their order; what is over all of them comes last."""
    return sorted(dict.fromkeys(cell["domain"] for cell in cells), key=lambda domain: domain == ALL)


def of_domain(cells: Iterable[Cell], domain: str) -> dict[str, Cell]:
    """The cells of one domain by their labels."""
    return {label(cell): cell for cell in cells if cell["domain"] == domain}


def interval(cell: Cell) -> str:
    """``value [low, high]``."""
    digits = 3 if cell["metric"] in SHARES else 2
    value, low, high = (f"{float(cell[key]):.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def by_domain(leading: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[Cell]]]) -> list[str]:
    """Lines of a Markdown table a domain; domains and columns are the first row's.

    Args:
        leading: names of the columns that stand before the figures.
        rows: what stands in those, and the cells. A figure that a row lacks is a dash.
    """
    lines: list[str] = []
    for domain in domains(rows[0][1]):
        first = of_domain(rows[0][1], domain)
        prompts = next(iter(first.values()))["prompts"]
        lines += ["", f"**{domain}** ({prompts} prompts)", "", f"| {' | '.join([*leading, *first])} |"]
        lines.append("| --- |" + " --- |" * (len(leading) - 1) + " ---: |" * len(first))
        for names, cells in rows:
            found = of_domain(cells, domain)
            shown = [interval(found[name]) if name in found else "–" for name in first]
            lines.append(f"| {' | '.join([*names, *shown])} |")
    return lines


def bars(cells: Sequence[Cell]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far their intervals reach below and above them, as matplotlib's ``errorbar`` takes both."""
    values = [float(cell["value"]) for cell in cells]
    below = [value - float(cell["low"]) for value, cell in zip(values, cells, strict=True)]
    above = [float(cell["high"]) - value for value, cell in zip(values, cells, strict=True)]
    return values, [below, above]
