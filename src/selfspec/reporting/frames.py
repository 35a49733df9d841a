"""The numbers behind each figure, as tidy frames. A figure and its table read the same frame."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from selfspec.reporting.measures import Estimate, Measures

STAGES = {"ce": "stage 1", "kl": "stage 2"}


def losses(train: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """``stage, split, step, depth, loss, match, alpha``: training as logged, validation at each evaluation."""
    parts = []
    for stage, table in train.items():
        part = table[["split", "step", "depth", "loss", "match", "alpha"]].copy()
        part.insert(0, "stage", stage)
        parts.append(part)
    merged = pd.concat(parts, ignore_index=True)
    return merged.sort_values(["stage", "split", "depth", "step"], kind="stable", ignore_index=True)


def forced_chains(measures: Measures) -> pd.DataFrame:
    """``domain, metric, depth, value, low, high, prompts``: teacher-forced ``cumulative`` and ``tokens_per_round``.

    ``depth`` is 0 for tokens per round.
    """
    keys = [("cumulative", depth, f"cumulative_{depth}") for depth in measures.depths("cumulative")]
    keys.append(("tokens_per_round", 0, "tokens_per_round"))
    rows = [
        {
            "domain": domain,
            "metric": metric,
            "depth": depth,
            **_columns(estimate),
            "prompts": measures.number(f"accept.{domain}.prompts"),
        }
        for domain in measures.domains("accept")
        for metric, depth, key in keys
        if (estimate := measures.get(f"accept.{domain}.teacher_forced.{key}")) is not None
    ]
    return pd.DataFrame(rows, columns=["domain", "metric", "depth", "value", "low", "high", "prompts"])


def acceptance(measures: Measures, metric: str = "accept") -> pd.DataFrame:
    """``mode, domain, depth, value, low, high, prompts`` of a free-running metric.

    ``metric`` is ``accept`` (given that all earlier drafts were accepted), ``cumulative`` or ``outcome``.
    """
    rows = [
        {"mode": mode, "domain": domain, "depth": depth, **_columns(estimate), "prompts": prompts}
        for mode in measures.modes("accept")
        for domain in measures.domains("accept")
        for depth in measures.depths(metric)
        if (estimate := measures.get(f"accept.{domain}.{mode}.{metric}_{depth}")) is not None
        if (prompts := measures.number(f"accept.{domain}.{mode}.prompts")) is not None
    ]
    return pd.DataFrame(rows, columns=["mode", "domain", "depth", "value", "low", "high", "prompts"])


def teacher_forced(measures: Measures, metric: str) -> pd.DataFrame:
    """``domain, depth, value, low, high, prompts`` of ``match`` or ``overlap``."""
    rows = [
        {"domain": domain, "depth": depth, **_columns(estimate), "prompts": measures.number(f"accept.{domain}.prompts")}
        for domain in measures.domains("accept")
        for depth in measures.depths(metric)
        if (estimate := measures.get(f"accept.{domain}.{metric}_{depth}")) is not None
    ]
    return pd.DataFrame(rows, columns=["domain", "depth", "value", "low", "high", "prompts"])


def tokens_per_round(measures: Measures) -> pd.DataFrame:
    """``domain, mode, value, low, high, prompts, rounds``: committed tokens per backbone verification."""
    rows = [
        {
            "domain": domain,
            "mode": mode,
            **_columns(estimate),
            "prompts": measures.number(f"accept.{domain}.{mode}.prompts"),
            "rounds": measures.number(f"accept.{domain}.{mode}.rounds"),
        }
        for domain in measures.domains("accept")
        for mode in measures.modes("accept")
        if (estimate := measures.get(f"accept.{domain}.{mode}.tokens_per_round")) is not None
    ]
    return pd.DataFrame(rows, columns=["domain", "mode", "value", "low", "high", "prompts", "rounds"])


def by_source(measures: Measures) -> pd.DataFrame:
    """``source, metric, depth, value, low, high, prompts``: ``match`` by depth, and tokens per round.

    ``metric`` is ``match``, or ``teacher_forced`` or ``greedy`` for tokens per round, with a ``depth`` of 0.
    """
    keys = [("match", depth, f"match_{depth}") for depth in measures.depths("match")]
    keys += [(mode, 0, f"{mode}.tokens_per_round") for mode in ("teacher_forced", "greedy")]
    rows = [
        {
            "source": source,
            "metric": metric,
            "depth": depth,
            **_columns(estimate),
            "prompts": measures.number(f"accept.source.{source}.prompts"),
        }
        for source in measures.sources()
        for metric, depth, key in keys
        if (estimate := measures.get(f"accept.source.{source}.{key}")) is not None
    ]
    return pd.DataFrame(rows, columns=["source", "metric", "depth", "value", "low", "high", "prompts"])


def speedup(measures: Measures) -> pd.DataFrame:
    """``mode, domain, method, drafts, value, low, high, prompts``: each method against its own engine's vanilla.

    ``method`` is ``mtp`` or ``prompt_lookup``; ``drafts`` is K, or the look-up's token count.
    """
    rivals = [("mtp", count, f"k{count}") for count in measures.draft_counts()]
    rivals += [("prompt_lookup", count, f"prompt_lookup_{count}") for count in measures.lookup_counts()]
    rows = [
        {
            "mode": mode,
            "domain": domain,
            "method": method,
            "drafts": drafts,
            **_columns(estimate),
            "prompts": measures.number(f"bench.{domain}.{mode}.prompts"),
        }
        for mode in measures.modes("bench")
        for domain in measures.domains("bench")
        for method, drafts, key in rivals
        if (estimate := measures.get(f"bench.{domain}.{mode}.{key}.speedup")) is not None
    ]
    return pd.DataFrame(rows, columns=["mode", "domain", "method", "drafts", "value", "low", "high", "prompts"])


def time_split(measures: Measures) -> pd.DataFrame:
    """``mode, drafts, draft, verify, rest``: shares of decoding time, all domains together."""
    rows = [
        {"mode": mode, "drafts": drafts, **{part: shares[part].value for part in ("draft", "verify", "rest")}}
        for mode in measures.modes("bench")
        for drafts in measures.draft_counts()
        if len(shares := _time_shares(measures, f"bench.all.{mode}.k{drafts}")) == 3
    ]
    return pd.DataFrame(rows, columns=["mode", "drafts", "draft", "verify", "rest"])


def headline(measures: Measures) -> pd.DataFrame:
    """``speedup`` at each mode's recommended K only, by domain: the figure of the first screen."""
    frame = speedup(measures)
    recommended = frame["mode"].map(measures.best_k)
    return frame[(frame["method"] == "mtp") & (frame["drafts"] == recommended)].reset_index(drop=True)


def _columns(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _time_shares(measures: Measures, prefix: str) -> dict[str, Estimate]:
    found = {part: measures.get(f"{prefix}.{part}_share") for part in ("draft", "verify", "rest")}
    return {part: estimate for part, estimate in found.items() if estimate is not None}
