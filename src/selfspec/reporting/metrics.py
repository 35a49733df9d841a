"""Merge the stages' outputs into ``reports/metrics.json``: flat floats, keys as in docs/metrics.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from selfspec.reporting.errors import ReportError
from selfspec.reporting.identities import check_acceptance, check_benchmark
from selfspec.reporting.inputs import BENCH_ESTIMATES, BENCH_SHARES, BENCH_TIME_SHARES, Inputs

Pairs = Iterator[tuple[str, float]]
_MARGINAL = ("match", "overlap")  # teacher-forced by definition, so their keys do not say so
_MTP_COLUMNS = ("tokens_per_second", "first_token_ms", *BENCH_ESTIMATES, *BENCH_SHARES, *BENCH_TIME_SHARES)


def merge(inputs: Inputs) -> dict[str, float]:
    """All metrics, in a fixed order. What was not measured (an empty cell) has no key.

    Raises:
        ReportError: an identity is broken (see ``identities``), held-out prompts were trained on,
            ``bench.csv`` has no ``all`` row for a drafting engine, or two rows claim one key.
    """
    check_acceptance(inputs.accept)
    check_benchmark(inputs.bench)
    leaked = inputs.ledger["heldout_in_training"]
    if leaked:
        raise ReportError(f"ledger.json: {len(leaked)} held-out prompts are in the training split; rerun shard")
    merged: dict[str, float] = {}
    for part in (_acceptance(inputs), _benchmark(inputs), _training(inputs.train), _data(inputs)):
        for key, value in part:
            if math.isnan(value):
                continue
            if key in merged:
                raise ReportError(f"{key}: two input rows give it a value; each must be measured once")
            if math.isinf(value):
                raise ReportError(f"{key}: the inputs give {value}, allowed: a finite number")
            merged[key] = value
    return merged


def write(metrics: Mapping[str, float], path: Path) -> None:
    """Write ``metrics`` as JSON, one key a line, floats in full precision."""
    path.write_text(json.dumps(dict(metrics), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def _estimate(key: str, row: Mapping[str, Any], column: str) -> Pairs:
    """``column`` of ``row``, and its interval where the table has one for it."""
    yield key, float(row[column])
    for end in ("_low", "_high"):
        if f"{column}{end}" in row:
            yield f"{key}{end}", float(row[f"{column}{end}"])


def _acceptance(inputs: Inputs) -> Pairs:
    table = inputs.accept.rename(columns={"low": "value_low", "high": "value_high"})
    for (domain, source, mode), rows in table.groupby(["domain", "source", "mode"], sort=True):
        forced = mode == "teacher_forced"
        of = f"accept.{domain}" if source == "all" else f"accept.source.{source}"
        yield f"{of}.prompts" if forced else f"{of}.{mode}.prompts", float(rows["prompts"].max())
        rounds = float(rows.loc[rows["metric"] == "tokens_per_round", "count"].iloc[0])
        yield f"{of}.{mode}.{'anchors' if forced else 'rounds'}", rounds
        for row in _records(rows):
            metric, depth = row["metric"], int(row["depth"])
            prefix = of if metric in _MARGINAL else f"{of}.{mode}"
            name = metric if metric == "tokens_per_round" else f"{metric}_{depth}"
            yield from _estimate(f"{prefix}.{name}", row, "value")
    facts = inputs.accept_facts
    lossless = facts["lossless"]
    if not 0 <= lossless["identical"] <= lossless["prompts"]:
        raise ReportError(
            f"accept.json: lossless.identical is {lossless['identical']}, "
            f"allowed: a count of prompts from 0 to {lossless['prompts']}"
        )
    yield "accept.num_drafts", float(facts["num_drafts"])
    for name in ("identical", "prompts", "tokens"):
        yield f"accept.lossless.{name}", float(lossless[name])
    for name, estimate in (facts.get("drift") or {}).items():
        for end in ("value", "low", "high"):
            yield f"accept.drift.{name}" + ("" if end == "value" else f"_{end}"), float(estimate[end])
        yield f"accept.drift.{name}_texts", float(estimate["prompts"])


def _benchmark(inputs: Inputs) -> Pairs:
    bench = inputs.bench
    best = best_drafts(bench)
    for (domain, mode), rows in bench.groupby(["domain", "mode"], sort=True):
        prefix = f"bench.{domain}.{mode}"
        yield f"{prefix}.prompts", float(rows["prompts"].max())
        for row in _records(rows.sort_values(["method", "engine", "num_drafts"])):
            count = int(row["num_drafts"])
            if row["method"] == "vanilla":
                stock = "" if row["engine"] == "selfspec" else "stock_"
                yield f"{prefix}.{stock}vanilla_tokens_per_second", float(row["tokens_per_second"])
                yield from _estimate(f"{prefix}.{stock}vanilla_first_token_ms", row, "first_token_ms")
            elif row["method"] == "mtp":
                for column in _MTP_COLUMNS:
                    yield from _estimate(f"{prefix}.k{count}.{column}", row, column)
                if best.get(str(mode)) == count:
                    yield f"{prefix}.best_k", float(count)
                    yield from _estimate(f"{prefix}.speedup", row, "speedup")
            else:
                for column in ("tokens_per_second", "speedup"):
                    yield from _estimate(f"{prefix}.{row['method']}_{count}.{column}", row, column)
    parted = inputs.bench_facts["divergence"]
    for name in ("prompts", "tolerance"):
        yield f"bench.divergence.{name}", float(parted[name])
    for drafts, identical in parted["identical_by_K"].items():
        yield f"bench.divergence.k{drafts}.identical", float(identical)
    yield "bench.divergence.count", float(len(parted["gaps"]))
    if parted["largest_gap"] is not None:
        yield "bench.divergence.largest_gap", float(parted["largest_gap"])
    for name in ("head_mib", "peak_memory_mib", "backbone_mib", "head_parameters", "backbone_parameters"):
        yield f"bench.{name}", float(inputs.bench_facts[name])


def best_drafts(bench: pd.DataFrame) -> dict[str, int]:
    """Drafts per round with the highest speedup over all domains together, per mode; the fewest if equal.

    Raises:
        ReportError: no mode has an ``all`` row with a measured speedup.
    """
    rows = bench[(bench["domain"] == "all") & (bench["method"] == "mtp") & bench["speedup"].notna()]
    if rows.empty:
        raise ReportError("bench.csv: no mtp row with a speedup for domain all, so no setting can be recommended")
    ordered = rows.sort_values(["speedup", "num_drafts"], ascending=[False, True])
    return {str(mode): int(found["num_drafts"].iloc[0]) for mode, found in ordered.groupby("mode", sort=True)}


def _training(train: Mapping[str, pd.DataFrame]) -> Pairs:
    for stage, table in train.items():
        validation = table[table["split"] == "validation"]
        last = validation[validation["step"] == validation["step"].max()].sort_values("depth")
        for row in _records(last):
            for name in ("loss", "match", "alpha"):
                yield f"train.{stage}.{name}_{int(row['depth'])}", float(row[name])
        yield f"train.{stage}.steps", float(table["step"].max())


def _data(inputs: Inputs) -> Pairs:
    ledger, distill, vocabulary = inputs.ledger, inputs.distill, inputs.draft_vocab
    by_source = {name: float(splits.get("train", 0)) for name, splits in sorted(ledger["tokens"].items())}
    yield "data.train_tokens", sum(by_source.values())
    for name, tokens in by_source.items():
        yield f"data.source.{name}.train_tokens", tokens
    yield "data.completion_tokens", float(distill["tokens"])
    for domain, counts in sorted(distill["domains"].items()):
        yield f"data.{domain}.prompts", float(counts["prompts"])
        yield f"data.{domain}.completion_tokens", float(counts["tokens"])
    yield "data.draft_vocab_size", float(vocabulary["size"])
    yield "data.vocab_size", float(vocabulary["vocab_size"])
    yield "data.draft_vocab_coverage", float(vocabulary["coverage"]["validation"])
    yield "data.draft_vocab_coverage_train", float(vocabulary["coverage"]["train"])
    yield "data.draft_vocab_coverage_heldout", float(inputs.accept_facts["heldout_coverage"])
    if "dropped_overlap" in ledger:
        yield "data.dropped_overlap", float(sum(ledger["dropped_overlap"].values()))
    for name in ("heldout_prompts", "max_overlap_after", "ngram"):
        if name in ledger:
            yield f"data.{name}", float(ledger[name])
