"""Merge the metrics, draw the figures, run the notebook and write the model card.

Reads the outputs of the other stages in reports/ and writes metrics.json, figures/, executed.ipynb,
report.html and MODEL_CARD.md there.
"""

from pathlib import Path

from selfspec.config import Config
from selfspec.reporting.publish import publish
from stages._run import run


def report(config: Config) -> None:
    """Publish the report of the run in reports/."""
    publish(config, Path("reports"), Path("params.yaml"))


if __name__ == "__main__":
    run(report)
