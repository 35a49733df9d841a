"""Held-out acceptance of a head: teacher-forced, then free-running in the real loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from selfspec.acceptance import Estimate, outcome_counts, ratio, resample_weights, round_statistics
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import teacher_forced
from selfspec.decoding.drafter import Drafter
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Rule
from selfspec.distill.records import Completion
from selfspec.errors import SelfspecError
from selfspec.heads.checkpoint import TrainedHead

ALL = "all"
FORCED = "teacher_forced"  # the mode of figures on stored completions
Group = tuple[str, str]  # domain and source; either may be ALL, the domain only with the source


class LeakError(SelfspecError):
    """Held-out prompts were seen in training."""


def refuse_leaks(ledger: Mapping[str, Any], trained: Iterable[str], heldout: Iterable[str]) -> None:
    """Hold the ledger and the record ids against each other before anything is measured.

    Raises:
        LeakError: a held-out prompt is in the training split, or overlaps it beyond the threshold.
    """
    leaked = sorted({*ledger["heldout_in_training"], *(set(trained) & set(heldout))})
    if leaked:
        raise LeakError(
            f"ledger: {len(leaked)} held-out prompts are in the training split ({', '.join(leaked[:3])}…); "
            "acceptance on them would mean nothing: mend shard.sources and rerun"
        )
    if ledger["max_overlap_after"] > ledger["threshold"]:
        raise LeakError(
            f"ledger: a held-out prompt shares {ledger['max_overlap_after']} {ledger['ngram']}-grams with training "
            f"text, allowed: {ledger['threshold']} (shard.max_shared_ngrams); rerun shard"
        )


@dataclass(frozen=True)
class Row:
    """One figure of ``reports/accept.csv``."""

    domain: str
    source: str
    mode: str
    metric: str
    depth: int
    value: float
    low: float
    high: float
    prompts: int
    count: float


def _row(group: Group, mode: str, metric: str, depth: int, estimate: Estimate) -> Row:
    return Row(*group, mode, metric, depth, **vars(estimate))


def grouped(completions: Sequence[Completion]) -> dict[Group, list[int]]:
    """Which of ``completions`` each row of figures is about: every source of a domain, every domain, all of them."""
    members: dict[Group, list[int]] = {}
    for number, completion in enumerate(completions):
        domain, source = completion.domain, completion.source
        for group in dict.fromkeys([(domain, ALL), (domain, source), (ALL, ALL)]):
            members.setdefault(group, []).append(number)
    return members


def forced_rows(
    decoder: Decoder,
    head: TrainedHead,
    groups: Mapping[str, Sequence[Completion]],
    depths: int,
    samples: int,
    seed: int,
) -> list[Row]:
    """``match``, ``overlap`` and the figures of chains by source, by domain and over all."""
    completions = [completion for group in groups.values() for completion in group]
    forced = teacher_forced.measure(
        decoder, head, tqdm(completions, desc="teacher-forced", unit="prompt", mininterval=2), depths
    )
    rows = []
    for group, members in grouped(completions).items():
        weights = resample_weights(len(members), samples, seed)
        for depth in range(depths):
            positions = forced.positions[members, depth]
            for metric, totals in (("match", forced.hits), ("overlap", forced.overlap)):
                estimate = ratio(totals[members, depth], positions, weights)
                rows.append(_row(group, FORCED, metric, depth + 1, estimate))
        for (metric, depth), estimate in round_statistics(forced.chains[members], samples, seed).items():
            rows.append(_row(group, FORCED, metric, depth, estimate))
    return rows


def running_rows(
    decoder: Decoder,
    drafter: Drafter,
    groups: Mapping[str, Sequence[Completion]],
    modes: Mapping[str, Rule],
    *,
    num_drafts: int,
    max_new_tokens: int,
    batch_size: int,
    samples: int,
    seed: int,
) -> list[Row]:
    """Round statistics by source, by domain and over all, for each mode's acceptance rule.

    A mode's batches share its rule, and with it the generator: each draws on where the last one stopped.
    """
    rows = []
    batches = [batch for group in groups.values() for batch in _batches(group, batch_size)]
    completions = [completion for batch in batches for completion in batch]
    members = grouped(completions)
    with tqdm(total=len(modes) * len(completions), desc="free-running", unit="prompt", mininterval=2) as progress:
        for mode, rule in modes.items():
            rounds: list[list[tuple[int, int]]] = []
            for batch in batches:
                result = speculate(
                    decoder,
                    drafter,
                    [completion.prompt_ids for completion in batch],
                    max_new_tokens=max_new_tokens,
                    num_drafts=num_drafts,
                    rule=rule,
                    end_tokens=decoder.end_tokens,
                )
                rounds += result.rounds
                progress.update(len(batch))
            counts = outcome_counts(rounds, num_drafts)
            for group, numbers in members.items():
                for (metric, depth), estimate in round_statistics(counts[numbers], samples, seed).items():
                    rows.append(_row(group, mode, metric, depth, estimate))
    return rows


def _batches(group: Sequence[Completion], size: int) -> Iterator[Sequence[Completion]]:
    ordered = sorted(group, key=lambda completion: len(completion.prompt_ids))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
