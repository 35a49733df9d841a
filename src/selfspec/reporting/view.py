"""What the notebook's cells show, one function a section, so that the cells stay one line each."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

from selfspec.reporting import sources, summary, tables
from selfspec.reporting.figures import Picture, picture
from selfspec.reporting.measures import mode_name
from selfspec.reporting.report import Report
from selfspec.reporting.text import Table


@dataclass(frozen=True)
class Blocks:
    """Headings, sentences, tables and figures below each other, shown by one cell as one HTML output."""

    parts: tuple[Part, ...]

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """The parts as HTML, in order."""
        return "\n".join(_part_html(part) for part in self.parts)

    def __repr__(self) -> str:
        return "\n\n".join(part.alt if isinstance(part, Picture) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Columns:
    """Two blocks beside each other on a wide screen, below each other on a narrow one."""

    left: Blocks
    right: Blocks

    def html(self) -> str:
        """Both, in the grid that templates/page.html.j2 styles."""
        return f'<div class="first"><div>{self.left.html()}</div><div>{self.right.html()}</div></div>'

    def __repr__(self) -> str:
        return f"{self.left}\n\n{self.right}"


Part = str | Table | Picture | Columns


def first_screen(report: Report) -> Blocks:
    """The decision: verdicts, one figure, one table, the settings to use."""
    title = f"# {report.config.report.title}: {report.config.backbone.name}"
    checks = (summary.lossless(report.measures), summary.divergence(report))
    lines = [f"- {line}" for line in (*summary.verdicts(report.measures), *checks)]
    figure = Blocks((picture(report, "headline"), f"Timed in one run on: {summary.machine(report)}."))
    numbers = Blocks((summary.settings(report), tables.benchmark(report.measures)))
    return Blocks((title, "\n".join(lines), Columns(figure, numbers)))


def speedup(report: Report) -> Blocks:
    """Speedup by K, domain and mode, and the look-up rival."""
    measures = report.measures
    parts: list[Part] = [picture(report, "speedup_by_k")]
    for mode in measures.modes("bench"):
        parts += [f"### {_title(mode)}", tables.speedup(measures, "mtp", mode)]
        if measures.lookup_counts():
            parts += ["Prompt look-up, in stock transformers:", tables.speedup(measures, "prompt_lookup", mode)]
    return Blocks(tuple(parts))


def tokens_per_round(report: Report) -> Blocks:
    """Tokens per round by domain and mode."""
    return Blocks((picture(report, "tokens_per_round"), tables.tokens_per_round(report.measures)))


def acceptance(report: Report) -> Blocks:
    """Acceptance by depth and domain, then cumulative and by outcome."""
    measures = report.measures
    parts: list[Part] = [picture(report, "acceptance")]
    for mode in measures.modes("accept"):
        parts += [f"### {_title(mode)}", tables.acceptance(measures, "accept", mode)]
        parts += ["At least so many drafts accepted:", tables.acceptance(measures, "cumulative", mode)]
        parts += ["Exactly so many accepted:", tables.acceptance(measures, "outcome", mode)]
    return Blocks(tuple(parts))


def teacher_forced(report: Report) -> Blocks:
    """Argmax match, distribution overlap and chains on the backbone's own completions."""
    parts: list[Part] = []
    for metric, words in (("match", "Argmax match"), ("overlap", "Overlap of the distributions, sum of min(p, q)")):
        table = tables.teacher_forced(report.measures, metric)
        if table.rows:
            parts += [f"### {words}", table]
    chains = tables.forced_chains(report.measures)
    if chains.rows:
        parts += ["### Chains: share of positions with so many drafts right, one after the other", chains]
    return Blocks(tuple(parts))


def by_source(report: Report) -> Blocks:
    """Acceptance on each source of the held-out prompts."""
    return Blocks((tables.by_source(report.measures),))


def time_split(report: Report) -> Blocks:
    """Where a round's time goes."""
    return Blocks((picture(report, "time_split"), tables.time_split(report.measures)))


def training(report: Report) -> Blocks:
    """Loss curves, the validation points drawn in them, and the hyper-parameters."""
    losses = report.losses
    parts: list[Part] = [picture(report, "loss")]
    for stage, words in report.loss_names.items():
        parts += [f"Validation loss, {words}:", tables.losses(losses, stage)]
    parts += ["At the end of each stage:", tables.last_validation(report.measures), sources.training(report)]
    return Blocks(tuple(parts))


def data(report: Report) -> Blocks:
    """Sources, licences, completions, sizes."""
    return Blocks((sources.data(report), sources.completions(report), sources.sizes(report)))


def limits(report: Report) -> Blocks:
    """What the figures do not show."""
    return Blocks(("\n".join(f"- {line}" for line in summary.limits(report)),))


def _title(mode: str) -> str:
    return mode_name(mode).replace("greedy", "Greedy")


def _part_html(part: Part) -> str:
    if isinstance(part, Picture | Table | Columns):
        return part.html()
    for level in (3, 2, 1):
        mark = "#" * level + " "
        if part.startswith(mark):
            return f"<h{level}>{html.escape(part.removeprefix(mark))}</h{level}>"
    if part.startswith("- "):
        return _list(line.removeprefix("- ") for line in part.split("\n"))
    return f"<p>{_inline(part)}</p>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"


def _inline(line: str) -> str:
    """The two inline marks that the summary uses: ``**strong**`` and backquoted code, always in pairs."""
    escaped = html.escape(line)
    for mark, tag in (("**", "strong"), ("`", "code")):
        pieces = escaped.split(mark)
        escaped = "".join(piece if index % 2 == 0 else f"<{tag}>{piece}</{tag}>" for index, piece in enumerate(pieces))
    return escaped
