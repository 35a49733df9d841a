"""The tables of the card and the notebook, from the same frames as the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from selfspec.reporting import frames, text
from selfspec.reporting.measures import Estimate, Measures, mode_name, order_domains, order_modes
from selfspec.reporting.text import Table

INTERVALS = "In brackets: 95 % bootstrap interval over prompts."


def benchmark(measures: Measures, domain: str = "all") -> Table:
    """What published heads' cards show: speeds, speedup and outcomes at the recommended K, a column a mode."""
    modes = [mode for mode in measures.modes("bench") if measures.best_k(mode) is not None]
    rows: list[list[str]] = [["Drafts per round (K)", *(str(measures.best_k(mode)) for mode in modes)]]

    def row(name: str, write: Callable[[str, str], str]) -> None:
        cells = [write(f"bench.{domain}.{mode}", f"bench.{domain}.{mode}.k{measures.best_k(mode)}") for mode in modes]
        if any(cell != text.MISSING for cell in cells):
            rows.append([name, *cells])

    row("Speedup, MTP / vanilla", lambda _, k: text.ratio(measures.get(f"{k}.speedup")))
    row("Vanilla tok/s", lambda base, _: text.speed(measures.number(f"{base}.vanilla_tokens_per_second")))
    row("MTP tok/s", lambda _, k: text.speed(measures.number(f"{k}.tokens_per_second")))
    row("Vanilla first token, ms", lambda base, _: text.ratio(measures.get(f"{base}.vanilla_first_token_ms")))
    row("MTP first token, ms", lambda _, k: text.ratio(measures.get(f"{k}.first_token_ms")))
    row("Tokens per round", lambda _, k: text.ratio(measures.get(f"{k}.tokens_per_round")))
    row("First draft accepted", lambda _, k: text.share(measures.get(f"{k}.first_accepted")))
    row("All drafts accepted", lambda _, k: text.share(measures.get(f"{k}.all_accepted")))
    row("None accepted", lambda _, k: text.share(measures.get(f"{k}.none_accepted")))
    for count in measures.lookup_counts():
        lookup = f"prompt_lookup_{count}.speedup"
        row(f"Rival: prompt look-up, {count} tokens, speedup", partial(_ratio_below, measures, lookup))
    row(
        "Stock transformers, vanilla tok/s",
        lambda base, _: text.speed(measures.number(f"{base}.stock_vanilla_tokens_per_second")),
    )
    row("Prompts", lambda base, _: text.count(measures.number(f"{base}.prompts")))
    return Table(["", *map(mode_name, modes)], rows, f"{INTERVALS} Accepted shares are of rounds.")


def speedup(measures: Measures, method: str, mode: str) -> Table:
    """Speedup by domain, a column for each K (``mtp``) or token count (``prompt_lookup``)."""
    frame = frames.speedup(measures)
    frame = frame[(frame["method"] == method) & (frame["mode"] == mode)]
    label = "K = {}" if method == "mtp" else "{} tokens"
    return _by_domain(frame, "drafts", label, text.ratio, INTERVALS)


def acceptance(measures: Measures, metric: str, mode: str) -> Table:
    """``accept``, ``cumulative`` or ``outcome`` by domain, a column a depth (or a number accepted)."""
    frame = frames.acceptance(measures, metric)
    label = "{} accepted" if metric == "outcome" else "depth {}"
    return _by_domain(frame[frame["mode"] == mode], "depth", label, text.share, INTERVALS)


def teacher_forced(measures: Measures, metric: str) -> Table:
    """``match`` or ``overlap`` by domain, a column a depth."""
    return _by_domain(frames.teacher_forced(measures, metric), "depth", "depth {}", text.share, INTERVALS)


def forced_chains(measures: Measures) -> Table:
    """Teacher-forced chains by domain: the share with at least d drafts right, and tokens per round."""
    frame = frames.forced_chains(measures)
    depths = sorted(set(frame.loc[frame["metric"] == "cumulative", "depth"]))
    columns: list[_Column] = [(f"at least {depth}", ("cumulative", depth), text.share) for depth in depths]
    columns += [("tokens per round", ("tokens_per_round", 0), text.ratio)]
    return _mixed(frame, "domain", order_domains(set(frame["domain"])), columns)


def tokens_per_round(measures: Measures) -> Table:
    """Tokens per round by domain, a column a mode, with the prompts behind them."""
    frame = frames.tokens_per_round(measures)
    return _by_domain(frame, "mode", "{}", text.ratio, INTERVALS)


def by_source(measures: Measures) -> Table:
    """Acceptance by source of the held-out prompts: argmax match by depth, and tokens per round."""
    frame = frames.by_source(measures)
    columns: list[_Column] = [
        (f"match, depth {depth}", ("match", depth), text.share) for depth in measures.depths("match")
    ]
    columns += [("tokens per round, teacher-forced", ("teacher_forced", 0), text.ratio)]
    columns += [("tokens per round, greedy", ("greedy", 0), text.ratio)]
    return _mixed(frame, "source", sorted(set(frame["source"])), columns)


def time_split(measures: Measures) -> Table:
    """Shares of decoding time by K and mode, all domains together."""
    rows = [
        [f"{mode_name(row['mode'])}, K = {row['drafts']}"]
        + [text.share(Estimate(row[part])) for part in ("draft", "verify", "rest")]
        for row in frames.time_split(measures).to_dict("records")
    ]
    return Table(["", "drafting", "verifying", "the rest"], rows)


def losses(frame: pd.DataFrame, stage: str) -> Table:
    """Validation loss of one training stage at each evaluation, a column a depth."""
    rows = frame[(frame["stage"] == stage) & (frame["split"] == "validation")]
    depths = sorted(rows["depth"].unique())
    wide = rows.pivot_table(index="step", columns="depth", values="loss")
    body = [
        [text.count(float(step))] + [text.decimal(wide.loc[step, depth]) for depth in depths] for step in wide.index
    ]
    return Table(["step", *(f"depth {depth}" for depth in depths)], body)


def last_validation(measures: Measures) -> Table:
    """Loss, argmax match and acceptance estimate (alpha) at the end of each training stage, by depth."""
    rows = []
    for stage, name in frames.STAGES.items():
        depth = 1
        while (loss := measures.number(f"train.{stage}.loss_{depth}")) is not None:
            match, alpha = (measures.get(f"train.{stage}.{metric}_{depth}") for metric in ("match", "alpha"))
            rows.append([f"{name}, depth {depth}", text.decimal(loss), text.share(match), text.share(alpha)])
            depth += 1
    return Table(["", "loss", "match", "alpha"], rows)


def _ratio_below(measures: Measures, name: str, base: str, _: str) -> str:
    return text.ratio(measures.get(f"{base}.{name}"))


def _by_domain(
    frame: pd.DataFrame, column: str, label: str, write: Callable[[Estimate | None], str], note: str
) -> Table:
    """A row a domain: its prompt count, then a column for each value of ``column``."""
    domains = order_domains(set(frame["domain"]))
    keys: Sequence[Any] = order_modes(set(frame[column])) if column == "mode" else sorted(set(frame[column]))
    cells = {(row["domain"], row[column]): row for row in frame.to_dict("records")}
    rows = []
    for domain in domains:
        found = [cells.get((domain, key)) for key in keys]
        prompts = sorted({int(row["prompts"]) for row in found if row is not None})
        rows.append([domain, " / ".join(map(str, prompts)), *(write(_estimate(row)) for row in found)])
    names = [label.format(mode_name(key) if column == "mode" else key) for key in keys]
    return Table(["domain", "prompts", *names], rows, note if rows else "")


# Title, the cell's (metric, depth), and how its estimate is written.
_Column = tuple[str, tuple[str, int], Callable[[Estimate | None], str]]


def _mixed(frame: pd.DataFrame, by: str, names: Sequence[str], columns: Sequence[_Column]) -> Table:
    """A row for each of ``names``: its prompt count, then ``columns`` of several metrics."""
    cells = {(row[by], row["metric"], row["depth"]): row for row in frame.to_dict("records")}
    prompts = frame.groupby(by)["prompts"].max()
    rows = [
        [name, text.count(prompts[name]), *(write(_estimate(cells.get((name, *key)))) for _, key, write in columns)]
        for name in names
    ]
    return Table([by, "prompts", *(title for title, _, _ in columns)], rows, INTERVALS if rows else "")


def _estimate(row: Mapping[Any, Any] | None) -> Estimate | None:
    if row is None:
        return None
    low, high = (None if pd.isna(row[end]) else float(row[end]) for end in ("low", "high"))
    return Estimate(float(row["value"]), low, high)
