"""The files that the report reads, checked for the columns and keys of docs/metrics.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from selfspec.reporting.errors import ReportError

TRAIN_COLUMNS = ("step", "epoch", "split", "depth", "loss", "match", "alpha")
ACCEPT_COLUMNS = ("domain", "source", "mode", "metric", "depth", "value", "low", "high", "prompts", "count")
BENCH_SHARES = ("first_accepted", "all_accepted", "none_accepted")
BENCH_TIME_SHARES = ("draft_share", "verify_share", "rest_share")
BENCH_ESTIMATES = ("speedup", "tokens_per_round")
BENCH_COLUMNS = (
    *("domain", "mode", "engine", "method", "num_drafts", "prompts", "tokens", "seconds", "tokens_per_second"),
    *(f"{name}{end}" for name in BENCH_ESTIMATES for end in ("", "_low", "_high")),
    *BENCH_SHARES,
    *BENCH_TIME_SHARES,
    "first_token_ms",
)


@dataclass(frozen=True)
class InputPaths:
    """Where the inputs lie. The field names are the parameters of reports/report.ipynb."""

    train_ce: Path
    train_kl: Path
    accept: Path
    accept_facts: Path
    bench: Path
    bench_facts: Path
    ledger: Path
    distill: Path
    draft_vocab: Path

    @classmethod
    def under(cls, folder: Path) -> InputPaths:
        """The paths that dvc.yaml gives these files, ``folder`` being its ``reports/``."""
        return cls(
            train_ce=folder / "train_ce.csv",
            train_kl=folder / "train_kl.csv",
            accept=folder / "accept.csv",
            accept_facts=folder / "accept.json",
            bench=folder / "bench.csv",
            bench_facts=folder / "bench.json",
            ledger=folder / "ledger.json",
            distill=folder / "distill.json",
            draft_vocab=folder / "draft_vocab.json",
        )


@dataclass(frozen=True)
class Inputs:
    """The inputs, read. Tables keep their long form; ``train`` is keyed by stage, ``ce`` and ``kl``."""

    train: Mapping[str, pd.DataFrame]
    accept: pd.DataFrame
    accept_facts: Mapping[str, Any]
    bench: pd.DataFrame
    bench_facts: Mapping[str, Any]
    ledger: Mapping[str, Any]
    distill: Mapping[str, Any]
    draft_vocab: Mapping[str, Any]


def read(paths: InputPaths) -> Inputs:
    """Read every input.

    Raises:
        ReportError: a file is missing or unreadable, or lacks a column or key of docs/metrics.md.
    """
    return Inputs(
        train={"ce": _table(paths.train_ce, TRAIN_COLUMNS), "kl": _table(paths.train_kl, TRAIN_COLUMNS)},
        accept=_table(paths.accept, ACCEPT_COLUMNS),
        accept_facts=_object(paths.accept_facts, ("num_drafts", "lossless", "heldout_coverage")),
        bench=_table(paths.bench, BENCH_COLUMNS),
        bench_facts=_object(
            paths.bench_facts,
            (
                "machine",
                "dtype",
                "divergence",
                "peak_memory_mib",
                "head_mib",
                "head_parameters",
                "backbone_mib",
                "backbone_parameters",
            ),
        ),
        ledger=_object(paths.ledger, ("records", "tokens", "licenses", "revisions", "heldout_in_training")),
        distill=_object(paths.distill, ("domains", "tokens")),
        draft_vocab=_object(paths.draft_vocab, ("size", "vocab_size", "coverage")),
    )


def _table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file; run `dvc repro` so that the stage that makes it runs") from None
    except (ValueError, OSError) as error:
        raise ReportError(f"{path}: not a readable CSV table: {' '.join(str(error).split())}") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ReportError(f"{path}: lacks the columns {', '.join(missing)}; docs/metrics.md has the schema")
    if table.empty:
        raise ReportError(f"{path}: has no rows; the stage that makes it measured nothing")
    return table


def _object(path: Path, keys: Iterable[str]) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file; run `dvc repro` so that the stage that makes it runs") from None
    except (ValueError, OSError) as error:
        raise ReportError(f"{path}: not readable JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{path}: holds a {type(value).__name__}, not an object; docs/metrics.md has the schema")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ReportError(f"{path}: lacks the keys {', '.join(missing)}; docs/metrics.md has the schema")
    return value
