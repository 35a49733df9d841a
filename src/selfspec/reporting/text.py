"""Numbers and tables as text: one rounding rule for the card, the notebook and the page."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.reporting.measures import Estimate

MISSING = "–"
Writer = Callable[[float], str]


def ratio(estimate: Estimate | None) -> str:
    """A ratio, a count a round or milliseconds: ``1.83 [1.74, 1.92]``; the interval only where there is one."""
    return _with_interval(estimate, lambda value: f"{value:.2f}")


def share(estimate: Estimate | None) -> str:
    """A share of 1 in per cent, one decimal: ``71.2 % [68.0, 74.1]``."""
    if estimate is None:
        return MISSING
    interval = _interval(estimate, lambda value: f"{100 * value:.1f}")
    return f"{100 * estimate.value:.1f} %{interval}"


def speed(value: float | None) -> str:
    """Tokens per second: one decimal below 100, none above."""
    if value is None:
        return MISSING
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """A loss or a rate without an interval: three decimals."""
    return MISSING if value is None else f"{value:.3f}"


def millions(value: float | None) -> str:
    """A parameter count in millions, one decimal."""
    return MISSING if value is None else f"{value / 1e6:.1f} M"


def mebibytes(value: float | None) -> str:
    """A size given in MiB: one decimal below 100, none above."""
    return MISSING if value is None else f"{speed(value)} MiB"


def _with_interval(estimate: Estimate | None, write: Writer) -> str:
    return MISSING if estimate is None else write(estimate.value) + _interval(estimate, write)


def _interval(estimate: Estimate, write: Writer) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{write(estimate.low)}, {write(estimate.high)}]"


@dataclass(frozen=True)
class Table:
    """A table of finished strings. The first column holds row names; ``prose`` if the others are words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    prose: bool = False

    def markdown(self) -> str:
        """GitHub-flavoured Markdown, with ``note`` as a paragraph below."""
        lines = [self.columns, ["---"] + ["---" if self.prose else "---:"] * (len(self.columns) - 1), *self.rows]
        body = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
        return f"{body}\n\n{self.note}" if self.note else body

    def html(self) -> str:
        """An HTML table in a box that scrolls sideways, so that a narrow screen stays readable."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        css = "table prose" if self.prose else "table"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="{css}" tabindex="0">{table}</div>{note}'

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        return self.markdown()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
