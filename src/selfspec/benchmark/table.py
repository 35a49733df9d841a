"""From timed runs to ``reports/bench.csv``: totals over totals, paired intervals, identities held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfspec.acceptance import Estimate, check_speedup, outcome_counts, ratio, resample_weights, round_statistics
from selfspec.benchmark.timing import Method, Run

ALL = "all"
Runs = Mapping[tuple[str, str, Method], Sequence[Run]]


def speedup(runs: Sequence[Run], vanilla: Sequence[Run], samples: int, seed: int) -> Estimate:
    """Ratio of total tokens per total second, resampling prompts jointly for both."""

    def sums(of: Sequence[Run]) -> np.ndarray:
        return np.array([[run.tokens, run.seconds] for run in of])

    ours, base = sums(runs), sums(vanilla)

    def rate_ratio(weights: np.ndarray) -> np.ndarray:
        a, b = weights @ ours, weights @ base
        return np.asarray((a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1]))

    low, high = np.quantile(rate_ratio(resample_weights(len(runs), samples, seed)), [0.025, 0.975])
    return Estimate(float(rate_ratio(np.ones(len(runs)))), float(low), float(high), len(runs), float(ours[:, 1].sum()))


def rows(runs: Runs, samples: int, seed: int) -> list[dict[str, Any]]:
    """All rows, per domain and over all domains.

    Raises:
        IdentityError: a speedup beyond tokens per round.
    """
    pooled: dict[tuple[str, str, Method], list[Run]] = {}
    for (domain, mode, method), of_domain in runs.items():
        pooled.setdefault((domain, mode, method), []).extend(of_domain)
        pooled.setdefault((ALL, mode, method), []).extend(of_domain)
    return [
        _row(domain, mode, method, measured, pooled[domain, mode, Method(method.engine, "vanilla", 0)], samples, seed)
        for (domain, mode, method), measured in pooled.items()
    ]


def _row(
    domain: str, mode: str, method: Method, runs: Sequence[Run], vanilla: Sequence[Run], samples: int, seed: int
) -> dict[str, Any]:
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    row: dict[str, Any] = {
        "domain": domain,
        "mode": mode,
        "engine": method.engine,
        "method": method.name,
        "num_drafts": method.num_drafts,
        "prompts": len(runs),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    faster = speedup(runs, vanilla, samples, seed)
    if method.name != "vanilla":
        row |= _with_interval("speedup", faster)
    if method.engine == "selfspec":
        first = np.array([1000 * run.prefill_seconds for run in runs])
        weights = resample_weights(len(runs), samples, seed)
        row |= _with_interval("first_token_ms", ratio(first, np.ones(len(runs)), weights))
        draft = sum(run.draft_seconds for run in runs) / seconds
        verify = sum(run.verify_seconds for run in runs) / seconds
        row |= {"draft_share": draft, "verify_share": verify, "rest_share": 1 - draft - verify}
    if method.name == "mtp":
        figures = round_statistics(outcome_counts([run.rounds for run in runs], method.num_drafts), samples, seed)
        row |= _with_interval("tokens_per_round", figures["tokens_per_round", 0])
        row |= _with_interval("first_accepted", figures["cumulative", 1])
        row |= _with_interval("all_accepted", figures["outcome", method.num_drafts])
        row |= _with_interval("none_accepted", figures["outcome", 0])
        check_speedup(f"bench {domain} {mode} K={method.num_drafts}", faster, figures["tokens_per_round", 0])
    return row


def _with_interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
