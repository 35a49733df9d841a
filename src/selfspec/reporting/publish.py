"""Everything the report stage writes, in order."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from selfspec.config import Config
from selfspec.reporting import card, figures, metrics, notebook, page
from selfspec.reporting.inputs import InputPaths
from selfspec.reporting.report import load_report


def publish(config: Config, folder: Path, params: Path) -> None:
    """Read the stages' outputs in ``folder`` and write the report there.

    ``folder`` also holds report.ipynb. Written: metrics.json, figures/*.png, MODEL_CARD.md,
    executed.ipynb, report.html. The same inputs give the same bytes.

    Raises:
        ReportError: an input is missing or contradicts itself, or a cell of the notebook failed.
    """
    paths = InputPaths.under(folder)
    report = load_report(paths, config)
    metrics.write(report.measures.metrics, folder / "metrics.json")
    figures.save_all(report, folder / "figures")
    (folder / "MODEL_CARD.md").write_text(card.render(report), encoding="utf-8")
    parameters = {name: _relative(path, folder) for name, path in {"params": params, **asdict(paths)}.items()}
    notebook.execute(folder / "report.ipynb", parameters, folder / "executed.ipynb")
    title = f"{config.report.title}: {config.backbone.name}"
    (folder / "report.html").write_text(page.render(folder / "executed.ipynb", title), encoding="utf-8")


def _relative(path: Path, folder: Path) -> str:
    """``path`` as seen from the notebook's folder, so that no absolute path lands in executed.ipynb."""
    return Path(os.path.relpath(path, folder)).as_posix()
