"""Greedy text with drafts against greedy text without, in one engine and dtype: where they part, and by how little.

Verifying several tokens in one forward rounds differently than one token at a time. In float32 the
texts are expected to be the same; in bfloat16 and float16 they may part where the backbone itself
all but ties. Anything wider is a fault in the decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfspec.backbones.decoder import Decoder
from selfspec.benchmark.timing import Method, Run
from selfspec.errors import SelfspecError

_PLAIN = Method("selfspec", "vanilla", 0)


class DivergenceError(SelfspecError):
    """Drafting changed a greedy text by more than rounding can."""


@dataclass(frozen=True)
class Divergence:
    """Where two greedy texts of one prompt part.

    Attributes:
        position: how many new tokens they share.
        drafted, plain: the token that follows with drafts and without; None where that text has ended.
        gap: how far the lower of the two logits lies below the backbone's highest. One of the two is normally
            the highest itself, and this is the gap of the top two. Infinite where a text has ended: texts end
            on an end token or together.
    """

    position: int
    drafted: int | None
    plain: int | None
    gap: float


@dataclass(frozen=True)
class Divergences:
    """All of a benchmark: prompts compared for each K, and those that came out identical, by K.

    Attributes:
        gaps: one a divergence, in the order found; ``largest_gap`` is None without any.
        tolerance: the largest gap allowed.
    """

    dtype: str
    prompts: int
    identical_by_K: dict[str, int]
    gaps: list[float]
    largest_gap: float | None
    tolerance: float


def find(decoder: Decoder, prompt: Sequence[int], drafted: Sequence[int], plain: Sequence[int]) -> Divergence | None:
    """The first difference of two completions of ``prompt``, or None; one forward of the backbone if there is one."""
    if list(drafted) == list(plain):
        return None
    shorter = min(len(drafted), len(plain))
    position = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), shorter)
    if position == shorter:
        ours, base = (text[position] if position < len(text) else None for text in (drafted, plain))
        return Divergence(position, ours, base, float("inf"))
    pair = drafted[position], plain[position]
    prefix = [*prompt, *plain[:position]]
    _, (hidden,) = decoder.prefill([prefix], len(prefix))
    logits = decoder.logits(hidden[-1]).float()
    gap = float(logits.max() - logits[list(pair)].min())
    return Divergence(position, *pair, gap)


def check(
    decoder: Decoder,
    runs: Mapping[tuple[str, str, Method], Sequence[Run]],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    dtype: str,
    tolerance: float,
) -> Divergences:
    """Hold every greedy text with drafts to the one without.

    Args:
        runs: what ``timing.interleave`` measured on ``prompts``.
        tolerance: in logits.

    Raises:
        DivergenceError: texts part where the backbone's logits are further apart; names prompt, position and tokens.
    """
    identical: dict[str, int] = {}
    gaps: list[float] = []
    for (domain, mode, method), drafted in runs.items():
        if mode != "greedy" or method.name != "mtp":
            continue
        plain = runs[domain, mode, _PLAIN]
        count = str(method.num_drafts)
        identical.setdefault(count, 0)
        for number, (prompt, ours, base) in enumerate(zip(prompts[domain], drafted, plain, strict=True)):
            found = find(decoder, prompt, ours.completion, base.completion)
            if found is None:
                identical[count] += 1
                continue
            if not found.gap <= tolerance:
                raise DivergenceError(
                    f"greedy check in {dtype}: {domain} prompt {number} with K = {count} differs from plain decoding "
                    f"at new token {found.position}: with drafts {_token(found.drafted)}, without "
                    f"{_token(found.plain)}; the backbone's logits there are {found.gap:.4g} apart, "
                    f"allowed: {tolerance:g} (bench.logit_gap_tolerance); rounding does not explain that, "
                    "so do not use this head's figures"
                )
            gaps.append(found.gap)
    total = sum(map(len, prompts.values()))
    return Divergences(dtype, total, identical, gaps, max(gaps, default=None), tolerance)


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
