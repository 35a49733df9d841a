"""Everything the notebook, the figures and the card draw on, read and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from selfspec.config import Config, load
from selfspec.reporting import frames, metrics
from selfspec.reporting.inputs import InputPaths, Inputs, read
from selfspec.reporting.measures import Measures

LOSS_NAMES = {
    "ce": "cross-entropy",
    "kl": "forward KL",
    "reverse_kl": "reverse KL",
    "js": "Jensen-Shannon",
    "tv": "total variation",
    "lk_hybrid": "LK hybrid",
    "lk_nll": "LK log-acceptance",
    "chain": "chain acceptance",
}


@dataclass(frozen=True)
class Report:
    """A run's parameters, its raw inputs and its merged metrics."""

    config: Config
    inputs: Inputs
    measures: Measures

    @property
    def losses(self) -> pd.DataFrame:
        """The frame of the loss curves."""
        return frames.losses(self.inputs.train)

    @property
    def loss_names(self) -> dict[str, str]:
        """What each training stage minimises, in words."""
        return {"ce": LOSS_NAMES["ce"], "kl": LOSS_NAMES[self.config.loss.name]}


def load_report(paths: InputPaths, config: Config) -> Report:
    """Read and merge the inputs.

    Raises:
        ReportError: see ``inputs.read`` and ``metrics.merge``.
    """
    inputs = read(paths)
    return Report(config, inputs, Measures(metrics.merge(inputs)))


def from_notebook(params: str, **paths: str) -> Report:
    """``load_report`` for reports/report.ipynb, whose parameters are paths as text.

    Raises:
        ConfigError: ``params`` breaks the schema. ReportError: as ``load_report``.
    """
    return load_report(InputPaths(**{name: Path(path) for name, path in paths.items()}), load(params))
