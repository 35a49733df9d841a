"""Which head, loss and initialisation is best: one experiment a row, everything else as params.yaml has it.

``make ablations`` runs the rows one after the other, each in a temporary copy, and writes ``reports/ablations.csv``,
``reports/ablations.md``, ``reports/ablations.png`` and, of the rows on part of the data,
``reports/data_scaling.png``. A row that has run under the same parameters and code is not run again. Stages before
the first one that a row changes are not rerun either.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import yaml

from selfspec import config
from selfspec.errors import SelfspecError
from tools import tables
from tools.recipe import merge

ROWS: dict[str, dict[str, Any]] = {
    "lk_hybrid": {"loss": {"name": "lk_hybrid"}},
    "ce": {"loss": {"name": "ce"}},
    "lk_nll": {"loss": {"name": "lk_nll"}},
    "chain": {"loss": {"name": "chain"}},
    "kl": {"loss": {"name": "kl"}},
    "cascade": {"head": {"type": "cascade"}},
    "parallel": {"head": {"type": "parallel"}},
    "last_layer": {"head": {"init": "last_layer"}},
    "middle": {"head": {"middle_layers": [10, 20]}},
    "on_policy": {"train": {"on_policy": 0.5}},
    "data_25": {"train": {"data_fraction": 0.25}},
    "data_50": {"train": {"data_fraction": 0.5}},
}
"""What each row changes in params.yaml."""

ONLY_FORCED: dict[str, dict[str, Any]] = {
    "accept": {"max_new_tokens": 8, "lossless_prompts": 4, "lossless_tokens": 16},
    "bench": {"num_drafts": [1]},  # not run; the default's may be deeper than a head with weights per depth goes
}
"""Of every row: the table is teacher-forced, so the rest of stage accept, three quarters of it, is cut short."""

SCALING = {"data_25": 0.25, "data_50": 0.5, "lk_hybrid": 1.0}
"""Rows of the data-scaling curve, by their share of the training completions. Passes over them stay as many."""

METRICS = ("match", "tokens_per_round")
"""Of ``reports/accept.csv``, teacher-forced; ``match`` by depth."""

PREFIX = "ablation-"
COLUMNS = ["row", "changes", "domain", "metric", "depth", "value", "low", "high", "prompts"]
ACCEPT = "reports/accept.csv"


class AblationError(SelfspecError):
    """A row is unknown or has not run under these parameters, or code is not committed."""


@dataclass(frozen=True)
class Row:
    """One experiment: its name in the table, what it changes, and its acceptance by domain and metric."""

    name: str
    changes: str
    cells: list[dict[str, str]]


def expected(base: dict[str, Any], name: str) -> dict[str, Any]:
    """The parameters of row ``name`` over ``base``."""
    params: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    for changes in (ONLY_FORCED, ROWS[name]):
        merge(params, changes)
    return params


def assignments(changes: dict[str, Any]) -> list[str]:
    """Changes of params.yaml as dvc's ``-S`` takes them."""
    return [f"{section}.{key}={value}" for section, keys in changes.items() for key, value in keys.items()]


def experiment(base: dict[str, Any], name: str) -> str:
    """What a row's experiment is called: other parameters or code, another name, so none has to go for a new one."""
    settings = json.dumps(expected(base, name), sort_keys=True) + _git("rev-parse", "HEAD:src", "HEAD:stages")
    return f"{PREFIX}{name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def found(base: dict[str, Any], name: str) -> str | None:
    """The newest commit of an experiment that ran under row ``name``'s parameters and this code; none: None."""
    listed = _git("for-each-ref", "--sort=-committerdate", "--format=%(objectname) %(refname)", "refs/exps")
    wanted = experiment(base, name)
    commits = (line.split(" ")[0] for line in listed.splitlines() if line.rsplit("/", 1)[-1] == wanted)
    return next(commits, None)


def run(base: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Run the rows that have not run yet; returns their names.

    Not through dvc's queue: its worker was seen to die of a message that it read half written, after which `dvc exp
    run --run-all` waits for ever, and a row that fails there leaves exit code 0.

    Raises:
        AblationError: a row failed; the rows before it are kept.
        AblationError: code has edits that git does not hold: the name of an experiment would not tell them.
        ConfigError: a row breaks the schema.
    """
    edited = _git("status", "--porcelain", "--", "src", "stages").split("\n")[0].strip()
    if edited:
        raise AblationError(
            f"code: {edited!r} is not committed, allowed: no edits in src or stages; commit or stash them"
        )
    for name in names:
        config.parse(expected(base, name))
    missing = [name for name in names if found(base, name) is None]
    for name in missing:
        changes = assignments(ONLY_FORCED) + assignments(ROWS[name])
        settings = [part for assignment in changes for part in ("--set-param", assignment)]
        command = ["dvc", "exp", "run", "--temp", "--name", experiment(base, name), *settings, "accept"]
        if subprocess.run(command).returncode:
            raise AblationError(f"rows: {name} failed, as shown above; mend that and run `make ablations` again")
    return missing


def collect(base: dict[str, Any], names: Sequence[str]) -> list[Row]:
    """The rows' acceptance out of their experiments.

    Raises:
        AblationError: a row has not run under these parameters.
    """
    commits = {name: found(base, name) for name in names}
    missing = [name for name, commit in commits.items() if commit is None]
    if missing:
        raise AblationError(
            f"rows: {', '.join(missing)} have not run under these parameters; `make ablations` runs them"
        )
    rows = []
    for name, commit in commits.items():
        lines = csv.DictReader(io.StringIO(_git("show", f"{commit}:{ACCEPT}")))
        cells = [
            line
            for line in lines
            if line["mode"] == "teacher_forced" and line["source"] == "all" and line["metric"] in METRICS
        ]
        rows.append(Row(name, ", ".join(assignments(ROWS[name])), cells))
    return rows


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write table, page and figure into ``folder``."""
    lines = ({**cell, "row": row.name, "changes": row.changes} for row in rows for cell in row.cells)
    tables.write_csv(folder / "ablations.csv", COLUMNS, lines)
    (folder / "ablations.md").write_text(page(rows))
    figure(rows, folder / "ablations.png")  # not among reports/figures, which are an output of stage report
    if SCALING.keys() <= {row.name for row in rows}:
        scaling_figure({row.name: row for row in rows}, folder / "data_scaling.png")


def page(rows: Sequence[Row]) -> str:
    """A table a domain, the rows in the order given."""
    lines = [
        "Acceptance on held-out prompts, teacher-forced on the backbone's own completions, with 95 % bootstrap",
        "intervals over prompts. The same data and seed throughout; each row changes params.yaml as it says.",
    ]
    lines += tables.by_domain(["row", "changes"], [([row.name, f"`{row.changes}`"], row.cells) for row in rows])
    return "\n".join(lines) + "\n"


def figure(rows: Sequence[Row], path: Path) -> None:
    """Tokens per round of every row, a panel a domain, with intervals."""
    domains = tables.domains(rows[0].cells)
    made, axes = plt.subplots(
        1, len(domains), figsize=(2.6 * len(domains) + 1, 0.35 * len(rows) + 1.2), sharey=True, squeeze=False
    )
    for axis, domain in zip(axes[0], domains, strict=True):
        cells = [tables.of_domain(row.cells, domain)["tokens per round"] for row in rows]
        values, reach = tables.bars(cells)
        axis.errorbar(values, range(len(rows)), xerr=reach, fmt="o", color="#0072b2", capsize=3)
        axis.set(title=domain, xlabel="tokens per round")
    axes[0][0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0][0].invert_yaxis()
    made.tight_layout()
    made.savefig(path, dpi=150)
    plt.close(made)


def scaling_figure(rows: dict[str, Row], path: Path) -> None:
    """Depth-1 match and tokens per round over the share of the training completions, a line a domain."""
    made, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for axis, metric in zip(axes, ("match 1", "tokens per round"), strict=True):
        for domain in tables.domains(next(iter(rows.values())).cells):
            values, reach = tables.bars([tables.of_domain(rows[name].cells, domain)[metric] for name in SCALING])
            axis.errorbar([100 * share for share in SCALING.values()], values, yerr=reach, label=domain, capsize=3)
        axis.set(xlabel="training completions, %", ylabel=metric, xscale="log")
        axis.set_xticks([100 * share for share in SCALING.values()], [f"{share:.0%}" for share in SCALING.values()])
        axis.minorticks_off()
    axes[0].legend()
    made.tight_layout()
    made.savefig(path, dpi=150)
    plt.close(made)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["run", "collect"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    options = parser.parse_args(arguments)
    try:
        unknown = [name for name in options.rows if name not in ROWS]
        if unknown:
            raise AblationError(f"rows: got {unknown[0]!r}, allowed: {', '.join(ROWS)}")
        config.load()
        base = yaml.safe_load(Path("params.yaml").read_text())
        if options.step == "run":
            missing = run(base, options.rows)
            print(f"{len(missing)} of {len(options.rows)} rows run: {', '.join(missing) or 'all had run before'}")
        else:
            write(collect(base, options.rows), Path("reports"))
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
