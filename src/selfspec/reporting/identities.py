"""Sums that must come out before any figure is printed.

The definitions stand in ``selfspec.acceptance``; these checks hold the *files* to them, so that a
hand-edited or half-written table cannot reach the model card.
"""

from __future__ import annotations

import pandas as pd

from selfspec.reporting.errors import ReportError

TOLERANCE = 1e-6


def check_acceptance(accept: pd.DataFrame) -> None:
    """Hold ``accept.csv`` to: outcome shares sum to 1, and tokens per round = 1 + sum of cumulative.

    Raises:
        ReportError: a domain, source and mode breaks an identity, or lacks the rows to check it. A group
            without a full round or a whole chain (count 0) claims nothing and is passed over.
    """
    for (domain, source, mode), rows in accept.groupby(["domain", "source", "mode"], sort=True):
        where = f"accept.csv, {domain}/{mode}" if source == "all" else f"accept.csv, {domain}/{source}/{mode}"
        values = {metric: rows.loc[rows["metric"] == metric, "value"] for metric in _NEEDED}
        absent = [metric for metric, found in values.items() if found.empty]
        if absent:
            raise ReportError(f"{where}: no {' or '.join(absent)} rows, so its identities cannot be checked")
        if float(rows.loc[rows["metric"] == "tokens_per_round", "count"].iloc[0]) == 0:
            continue
        shares = float(values["outcome"].sum())
        if not abs(shares - 1.0) <= TOLERANCE:  # written so that NaN fails too
            raise ReportError(f"{where}: outcome shares sum to {shares:.8g}, not 1; rerun the accept stage")
        expected = 1.0 + float(values["cumulative"].sum())
        measured = float(values["tokens_per_round"].iloc[0])
        if not abs(measured - expected) <= TOLERANCE:
            raise ReportError(
                f"{where}: tokens_per_round is {measured:.8g}, but 1 + sum of cumulative is {expected:.8g}; "
                "rerun the accept stage"
            )


_NEEDED = ("outcome", "cumulative", "tokens_per_round")


def check_benchmark(bench: pd.DataFrame) -> None:
    """Hold ``bench.csv`` to: first draft accepted + none accepted = 1, and time shares sum to 1.

    Raises:
        ReportError: a row breaks an identity. Rows whose columns do not apply (empty) are passed over.
    """
    sums = {
        "first_accepted + none_accepted": ["first_accepted", "none_accepted"],
        "draft_share + verify_share + rest_share": ["draft_share", "verify_share", "rest_share"],
    }
    for name, columns in sums.items():
        for row in bench[bench[columns].notna().all(axis=1)].to_dict("records"):
            total = float(sum(row[column] for column in columns))
            if abs(total - 1.0) > TOLERANCE:
                raise ReportError(
                    f"bench.csv, {row['domain']}/{row['mode']}/{row['method']} {row['num_drafts']}: "
                    f"{name} is {total:.8g}, not 1; rerun the bench stage"
                )
