"""What every figure about acceptance means, and the identities that hold them together.

A *round* is one backbone verification. It offers ``drafted`` drafts and accepts the first ``accepted``
of them. Statistics count full rounds only: those that offered all K drafts and were not cut short by an
end token or a length limit. Then, with n_a the number of full rounds that accepted exactly a:

- outcome[a]     = n_a / sum n
- cumulative[d]  = P(at least d accepted) = sum_{a >= d} n_a / sum n
- accept[d]      = P(draft d accepted | drafts 1..d-1 accepted) = cumulative[d] / cumulative[d-1]
- tokens_per_round (tau) = committed tokens per verification = 1 + sum_d cumulative[d]

Teacher-forced figures are taken on stored completions. Marginal: match[d] is the share of positions
where the head's argmax at depth d is the backbone's, overlap[d] the mean of sum_v min(p_v, q_v) there.
Chained: every anchor whose K drafts all lie in the completion counts as a full round that accepts as
many drafts as are the backbone's argmax before the first that is not; the figures of rounds above then
hold for anchors. Free-running rounds start where the last one ended, so after a token that the head
did not foresee: their tau is lower.

Every figure is a ratio of sums over prompts, never a mean of per-prompt ratios; its 95 % interval
resamples prompts with replacement (percentile bootstrap).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from selfspec.errors import SelfspecError

FloatArray = np.ndarray
_TOLERANCE = 1e-9


class IdentityError(SelfspecError):
    """Figures that contradict each other: a fault in the accounting, never a footnote."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, the number of prompts and the size of its denominator."""

    value: float
    low: float
    high: float
    prompts: int
    count: float


def resample_weights(prompts: int, samples: int, seed: int) -> FloatArray:
    """``[samples, prompts]``: how often each prompt is drawn in each bootstrap resample."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=samples).astype(float)


def ratio(numerator: FloatArray, denominator: FloatArray, weights: FloatArray) -> Estimate:
    """``sum(numerator) / sum(denominator)`` over prompts, both ``[prompts]``.

    A resample whose denominator is 0 says nothing and is left out; with no denominator at all the
    figure is NaN.
    """
    total = float(denominator.sum())
    if total == 0:
        return Estimate(float("nan"), float("nan"), float("nan"), len(numerator), 0.0)
    below = weights @ denominator
    drawn = (weights @ numerator)[below > 0] / below[below > 0]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(numerator.sum()) / total, float(low), float(high), len(numerator), total)


def outcome_counts(rounds: Iterable[Sequence[tuple[int, int]]], num_drafts: int) -> FloatArray:
    """``[prompts, K + 1]`` full rounds by number accepted, from ``(drafted, accepted)`` lists per prompt."""
    rows = []
    for of_prompt in rounds:
        row = np.zeros(num_drafts + 1)
        for drafted, accepted in of_prompt:
            if drafted == num_drafts:
                row[accepted] += 1
        rows.append(row)
    return np.array(rows).reshape(-1, num_drafts + 1)


def round_statistics(counts: FloatArray, samples: int, seed: int) -> dict[tuple[str, int], Estimate]:
    """All free-running figures from ``outcome_counts``: keys ``(metric, depth)``, see the module.

    Raises:
        IdentityError: never, unless this module is wrong; the check runs all the same.
    """
    prompts, width = counts.shape
    weights = resample_weights(prompts, samples, seed)
    at_least = counts[:, ::-1].cumsum(axis=1)[:, ::-1]  # [:, d] = rounds with >= d accepted; [:, 0] = all
    figures = {("outcome", a): ratio(counts[:, a], at_least[:, 0], weights) for a in range(width)}
    for depth in range(1, width):
        figures["cumulative", depth] = ratio(at_least[:, depth], at_least[:, 0], weights)
        figures["accept", depth] = ratio(at_least[:, depth], at_least[:, depth - 1], weights)
    figures["tokens_per_round", 0] = ratio(counts @ np.arange(1.0, width + 1), at_least[:, 0], weights)
    check_rounds({key: estimate.value for key, estimate in figures.items()}, width - 1)
    return figures


def check_rounds(values: dict[tuple[str, int], float], num_drafts: int) -> None:
    """Outcome shares sum to 1, and tau = 1 + sum of cumulative.

    Raises:
        IdentityError: one of them does not hold.
    """
    if np.isnan(values["tokens_per_round", 0]):
        return  # no full round: nothing is claimed
    shares = sum(values["outcome", a] for a in range(num_drafts + 1))
    if abs(shares - 1) > _TOLERANCE:
        raise IdentityError(f"outcome shares sum to {shares}, must be 1")
    tau = 1 + sum(values["cumulative", depth] for depth in range(1, num_drafts + 1))
    if abs(tau - values["tokens_per_round", 0]) > _TOLERANCE:
        raise IdentityError(f"tokens per round {values['tokens_per_round', 0]} is not 1 + sum of cumulative = {tau}")


def check_speedup(label: str, speedup: Estimate, tokens_per_round: Estimate) -> None:
    """In one engine a verification costs at least a plain step, so speedup cannot exceed tau.

    Compared at the ends of the intervals: both are measured.

    Raises:
        IdentityError: the whole interval of the speedup lies above that of tokens per round.
    """
    if speedup.low > tokens_per_round.high:
        raise IdentityError(
            f"{label}: speedup {speedup.value:.3f} [{speedup.low:.3f}, {speedup.high:.3f}] exceeds tokens per round "
            f"{tokens_per_round.value:.3f} [{tokens_per_round.low:.3f}, {tokens_per_round.high:.3f}]; "
            "the vanilla run was disturbed or the rounds are miscounted: run bench again on a quiet machine"
        )
