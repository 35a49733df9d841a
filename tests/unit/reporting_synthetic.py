"""Synthetic inputs for the report's tests: a seeded simulation that obeys docs/metrics.md. No measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

# P(draft accepted | earlier ones were) at depth 1; deeper drafts lose a tenth of it each.
FIRST_ACCEPT = {"chat": 0.62, "maths": 0.7, "code": 0.75, "prose": 0.5}
RESAMPLES = 200


def write_inputs(
    folder: Path,
    *,
    accept_domains: Sequence[str] = ("chat", "maths", "code", "prose"),
    bench_domains: Sequence[str] = ("chat", "maths", "code"),
    accept_modes: Sequence[str] = ("greedy", "t0.5", "t1.0"),
    bench_modes: Sequence[str] = ("greedy", "t0.5"),
    depths: int = 3,
    draft_counts: Sequence[int] = (1, 2, 3, 4),
    lookup_counts: Sequence[int] = (3, 10),
    prompts: int = 24,
    bench_prompts: int = 6,
    seed: int = 5,
) -> None:
    """Write every input of the report stage, and params.yaml, below ``folder``."""
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    accept = _accept_rows(rng, accept_domains, accept_modes, depths, prompts)
    pd.DataFrame(accept).to_csv(reports / "accept.csv", index=False)
    bench = _bench_rows(rng, bench_domains, bench_modes, draft_counts, lookup_counts, bench_prompts)
    pd.DataFrame(bench).to_csv(reports / "bench.csv", index=False)
    for stage, floor, steps in (("ce", 2.1, 1200), ("kl", 0.55, 480)):
        _loss_table(rng, floor, steps, depths).to_csv(reports / f"train_{stage}.csv", index=False)
    _write_json(reports, accept_domains, depths, prompts, draft_counts, bench_prompts * len(bench_domains))
    _write_params(folder)


def _rounds(rng: np.random.Generator, domain: str, mode: str, depths: int) -> np.ndarray:
    """Number of accepted drafts in each round of one prompt."""
    base = FIRST_ACCEPT.get(domain, 0.55) * (1.0 if mode == "greedy" else 0.9) + rng.normal(0, 0.05)
    chances = np.clip(base * 0.9 ** np.arange(depths), 0.02, 0.98)
    accepted = rng.random((int(rng.integers(35, 60)), depths)) < chances
    return np.cumprod(accepted, axis=1).sum(axis=1)


def _interval(rng: np.random.Generator, top: np.ndarray, bottom: np.ndarray) -> tuple[float, float, float]:
    """Ratio of sums over prompts, and its 95 % bootstrap interval."""
    draws = rng.integers(0, len(top), (RESAMPLES, len(top)))
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled = top[draws].sum(axis=1) / bottom[draws].sum(axis=1)
        value = top.sum() / bottom.sum()
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return float(value), float(low), float(high)


def _accept_rows(rng, domains, modes, depths, prompts):
    rows = []
    for mode in (*modes, "teacher_forced"):
        runs = {domain: [_rounds(rng, domain, mode, depths) for _ in range(prompts)] for domain in domains}
        groups = {(domain, "all"): run for domain, run in runs.items()}
        groups |= {group: [runs[group[0]][number] for number in half] for group, half in _halves(domains, prompts)}
        groups["all", "all"] = [run for domain in domains for run in runs[domain]]
        for (domain, source), accepted in groups.items():
            total = np.array([len(run) for run in accepted], dtype=float)
            at_least = {n: np.array([(run >= n).sum() for run in accepted], dtype=float) for n in range(depths + 1)}
            exactly = {n: np.array([(run == n).sum() for run in accepted], dtype=float) for n in range(depths + 1)}
            parts = [("cumulative", d, at_least[d], total) for d in range(1, depths + 1)]
            parts += [("accept", d, at_least[d], at_least[d - 1]) for d in range(1, depths + 1)]
            parts += [("outcome", n, exactly[n], total) for n in range(depths + 1)]
            parts += [("tokens_per_round", 0, total + sum(at_least[d] for d in range(1, depths + 1)), total)]
            for metric, depth, top, bottom in parts:
                value, low, high = _interval(rng, top, bottom)
                rows.append(
                    dict(
                        domain=domain,
                        source=source,
                        mode=mode,
                        metric=metric,
                        depth=depth,
                        value=value,
                        low=low,
                        high=high,
                        prompts=len(accepted),
                        count=int(bottom.sum()),
                    )
                )
    sizes = {(domain, "all"): prompts for domain in domains} | {("all", "all"): prompts * len(domains)}
    sizes |= {group: len(half) for group, half in _halves(domains, prompts)}
    for (domain, source), count in sizes.items():
        for metric, scale in (("match", 1.0), ("overlap", 0.85)):
            for depth in range(1, depths + 1):
                value = FIRST_ACCEPT.get(domain, 0.6) * scale * 0.88 ** (depth - 1)
                value += 0.02 * source.endswith("_late")
                rows.append(
                    dict(
                        domain=domain,
                        source=source,
                        mode="teacher_forced",
                        metric=metric,
                        depth=depth,
                        value=value,
                        low=value - 0.03,
                        high=value + 0.03,
                        prompts=count,
                        count=count * 96,
                    )
                )
    return rows


def _halves(domains, prompts):
    """Each domain's two sources, and which of its prompts come from them."""
    for domain in domains:
        yield (domain, f"synthetic_{domain}"), range(-(-prompts // 3))
        yield (domain, f"synthetic_{domain}_late"), range(-(-prompts // 3), prompts)


def _bench_rows(rng, domains, modes, draft_counts, lookup_counts, prompts):
    rows = []
    for mode in modes:
        for domain in (*domains, "all"):
            count = prompts * (len(domains) if domain == "all" else 1)
            common = dict(domain=domain, mode=mode, prompts=count, tokens=count * 64)
            speed = float(rng.normal(31, 0.4))
            rows.append(
                common
                | dict(
                    engine="selfspec",
                    method="vanilla",
                    num_drafts=0,
                    seconds=count * 64 / speed,
                    tokens_per_second=speed,
                    first_token_ms=41.5,
                    first_token_ms_low=39.5,
                    first_token_ms_high=44.5,
                )
            )
            stock = float(rng.normal(28, 0.4))
            rows.append(
                common
                | dict(
                    engine="transformers",
                    method="vanilla",
                    num_drafts=0,
                    seconds=count * 64 / stock,
                    tokens_per_second=stock,
                )
            )
            first = FIRST_ACCEPT.get(domain, 0.66) * (1.0 if mode == "greedy" else 0.9)
            for drafts in draft_counts:
                cumulative = np.cumprod(first * 0.9 ** np.arange(drafts))
                tau = float(1 + cumulative.sum())
                speedup = tau / (1.06 + 0.16 * drafts) + float(rng.normal(0, 0.01))
                draft = 0.1 * drafts / (1 + 0.1 * drafts)
                rows.append(
                    common
                    | dict(
                        engine="selfspec",
                        method="mtp",
                        num_drafts=drafts,
                        seconds=count * 64 / (speed * speedup),
                        tokens_per_second=speed * speedup,
                        first_token_ms=43.25,
                        first_token_ms_low=41.25,
                        first_token_ms_high=46.25,
                        speedup=speedup,
                        speedup_low=speedup - 0.07,
                        speedup_high=speedup + 0.06,
                        tokens_per_round=tau,
                        tokens_per_round_low=tau - 0.1,
                        tokens_per_round_high=tau + 0.1,
                        first_accepted=cumulative[0],
                        all_accepted=cumulative[-1],
                        none_accepted=1 - cumulative[0],
                        draft_share=draft,
                        verify_share=0.93 - draft,
                        rest_share=0.07,
                    )
                )
            for tokens in lookup_counts:
                gain = 0.95 + (0.18 if domain == "code" else 0.05) + float(rng.normal(0, 0.02))
                rows.append(
                    common
                    | dict(
                        engine="transformers",
                        method="prompt_lookup",
                        num_drafts=tokens,
                        seconds=count * 64 / (stock * gain),
                        tokens_per_second=stock * gain,
                        speedup=gain,
                        speedup_low=gain - 0.08,
                        speedup_high=gain + 0.08,
                    )
                )
    return rows


def _loss_table(rng: np.random.Generator, floor: float, steps: int, depths: int) -> pd.DataFrame:
    rows = []
    for split, stride in (("train", 20), ("validation", steps // 6)):
        for step in range(stride, steps + 1, stride):
            for depth in range(1, depths + 1):
                noise = 0.06 if split == "train" else 0.01
                loss = floor + 0.3 * depth + 3.0 * np.exp(-step / (0.2 * steps)) + rng.normal(0, noise)
                rows.append(
                    dict(
                        step=step,
                        epoch=step / 240,
                        split=split,
                        depth=depth,
                        loss=loss,
                        match=0.6 - 0.08 * depth,
                        alpha=0.55 - 0.07 * depth,
                        learning_rate=1e-3,
                        grad_norm=0.8,
                    )
                )
    return pd.DataFrame(rows)


def _write_json(
    reports: Path, domains: Sequence[str], depths: int, prompts: int, draft_counts: Sequence[int], timed: int
) -> None:
    sources = {f"synthetic_{domain}": domain for domain in domains}
    counts = {
        domain: {"prompts": 900, "tokens": 121_313 + 1_000 * i, "eos_share": 0.4} for i, domain in enumerate(domains)
    }
    objects = {
        "ledger": {
            "records": {name: {"train": 2000, "validation": 60, "heldout": 60} for name in sources},
            "tokens": {name: {"train": 301_417, "validation": 9_000, "heldout": 9_000} for name in sources},
            "licenses": dict.fromkeys(sources, "MIT"),
            "revisions": {name: [f"pypi:{name}-1.0-py3-none-any.whl@{'0123456789abcdef' * 4}"] for name in sources},
            "exact_duplicates": 4,
            "ngram": 13,
            "threshold": 0,
            "heldout_prompts": prompts * len(sources),
            "dropped_overlap": dict.fromkeys(sources, 3),
            "max_overlap_after": 0,
            "heldout": [],
            "heldout_in_training": [],
        },
        "distill": {
            "domains": counts,
            "skipped_long": 7,
            "dropped_overlap": 0,
            "tokens": sum(entry["tokens"] for entry in counts.values()),
            "seconds": 1810.5,
            "tokens_per_second": 268.0,
        },
        "draft_vocab": {"size": 8192, "vocab_size": 49152, "coverage": {"train": 0.9971, "validation": 0.9732}},
        "accept": {
            "num_drafts": depths,
            "lossless": {"prompts": 36, "tokens": 2211, "identical": 36},
            "prompts": dict.fromkeys(domains, prompts),
            "heldout_coverage": 0.9688,
            "drift": {
                "perplexity_before": {"value": 11.02, "low": 10.4, "high": 11.7, "prompts": 60, "count": 9000.0},
                "perplexity_after": {"value": 10.61, "low": 10.0, "high": 11.3, "prompts": 60, "count": 9000.0},
                "exact_match": {"value": 0.25, "low": 0.2, "high": 0.3, "prompts": prompts, "count": float(prompts)},
            },
        },
        "bench": {
            "machine": {
                "cpu": "Synthetic CPU",
                "cores": 2,
                "threads": 2,
                "memory_gib": 7.8,
                "platform": "Linux",
                "python": "3.11",
                "torch": "2.13.0",
                "transformers": "5.16.1",
            },
            "dtype": "bfloat16",
            "divergence": {
                "dtype": "bfloat16",
                "prompts": timed,
                "identical_by_K": {str(count): timed - (count == 2) for count in draft_counts},
                "gaps": [0.1875],
                "largest_gap": 0.1875,
                "tolerance": 0.5,
            },
            "peak_memory_mib": 913.4,
            "head_mib": 24.6,
            "head_parameters": 12_903_221,
            "backbone_mib": 256.6,
            "backbone_parameters": 134_515_008,
        },
    }
    for name, value in objects.items():
        (reports / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def _write_params(folder: Path) -> None:
    """The repository's own parameters, with the synthetic sources' place in the mixture left empty if it is."""
    params = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text(encoding="utf-8"))
    params["report"]["title"] = "SYNTHETIC report"
    if not params["shard"]["sources"]:
        params["shard"]["sources"] = [
            {
                "name": f"synthetic_{domain}",
                "loader": "synthetic",
                "kind": "prompt",
                "domain": domain,
                "weight": 1.0,
                "split": "hash",
                "license": "MIT",
                "archives": [{"uri": f"pypi:synthetic_{domain}-1.0-py3-none-any.whl", "sha256": "0" * 64}],
            }
            for domain in FIRST_ACCEPT
        ]
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
