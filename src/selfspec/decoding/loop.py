"""The draft–verify–accept–commit loop, for batches whose rows accept different numbers of drafts.

Invariant at the start of a round, for a row with n committed tokens x[0..n): the backbone's cache
holds x[0..n-1) (the newest token is pending), the head's cache holds anchors 0..n-2. Drafts continue
from anchor n-2; one forward of [x[n-1], drafts] verifies them and yields the states of the next
anchors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.backbones.decoder import Decoder, RaggedCache
from selfspec.decoding.drafter import DraftCache, Drafter
from selfspec.decoding.rules import Rule
from selfspec.errors import SelfspecError

# (row, new tokens) whenever a row commits; for streaming.
OnTokens = Callable[[int, list[int]], None]


class DraftingError(SelfspecError, ValueError):
    """The backbone or its head cannot decode what is asked of them."""


@dataclass
class Generation:
    """What one call produced.

    Attributes:
        completions: per prompt, new token ids; an end token, when written, is the last.
        rounds: per prompt, one ``(drafted, accepted)`` per verification, which commits accepted + 1 tokens.
            A round that an end token or ``max_new_tokens`` cut short counts only the drafts before its last
            token as drafted, so it is never a full one.
        draft_seconds, verify_seconds: wall-clock in head and backbone; prefill is in neither.
        seconds: all of it.
    """

    completions: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.completions))


@dataclass
class _Batch:
    """Rows still running."""

    rows: list[int]  # index into the prompts
    cache: RaggedCache
    head_cache: DraftCache | None
    pending: Tensor  # [rows] newest committed token, not yet read by the backbone
    state: Tensor | None  # [rows, H] depth-1 head state of the newest anchor
    room: list[int] = field(default_factory=list)  # tokens a row may still commit

    def keep(self, positions: list[int]) -> None:
        index = torch.tensor(positions, device=self.pending.device)
        self.rows = [self.rows[i] for i in positions]
        self.room = [self.room[i] for i in positions]
        self.cache = self.cache.select(positions)
        self.head_cache = self.head_cache.select(positions) if self.head_cache else None
        self.pending = self.pending[index]
        self.state = self.state[index] if self.state is not None else None


def speculate(
    decoder: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafts: int,
    rule: Rule,
    end_tokens: Sequence[int] = (),
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Decode ``prompts`` with up to ``num_drafts`` drafts a round; 0 is plain decoding in the same engine.

    Raises:
        DraftingError: an empty prompt, drafts without a drafter or beyond what it can make, or more tokens than the
            backbone's context.
    """
    _check(decoder, drafter, prompts, max_new_tokens, num_drafts)
    started = time.perf_counter()
    result = Generation([[] for _ in prompts], [[] for _ in prompts])
    ends = frozenset(end_tokens)
    longest = max(map(len, prompts))
    capacity = min(longest + max_new_tokens + num_drafts, decoder.max_positions)
    batch = _prefill(decoder, drafter if num_drafts else None, prompts, capacity, rule, num_drafts)
    batch.room = [max_new_tokens] * len(prompts)
    result.prefill_seconds = time.perf_counter() - started
    _commit(batch, [[token] for token in batch.pending.tolist()], result, ends, on_tokens)
    while batch.rows:
        drafted = min(num_drafts, max(batch.room) - 1, capacity - max(batch.cache.lengths) - 1)
        _round(decoder, drafter, batch, drafted, rule, result, ends, on_tokens)
    result.seconds = time.perf_counter() - started
    return result


def check_context(name: str, max_new_tokens: int, longest_prompt: int, max_positions: int) -> None:
    """Hold the parameter ``name``, whose value is ``max_new_tokens``, against the backbone's context, before decoding.

    Args:
        longest_prompt, max_positions: tokens.

    Raises:
        DraftingError: the longest prompt leaves too little room.
    """
    if longest_prompt + max_new_tokens > max_positions:
        raise DraftingError(
            f"{name}: got {max_new_tokens}; allowed: at most {max_positions - longest_prompt}: the longest prompt has "
            f"{longest_prompt} tokens and the backbone {max_positions} positions; lower it, or "
            "distill.max_prompt_tokens"
        )


def _check(
    decoder: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_drafts: int,
) -> None:
    if not prompts or min(map(len, prompts)) == 0:
        raise DraftingError("prompts: got an empty one; every prompt needs at least one token")
    if max_new_tokens < 1:
        raise DraftingError(f"max_new_tokens: got {max_new_tokens}, allowed: at least 1")
    if num_drafts < 0 or (num_drafts and drafter is None):
        raise DraftingError(f"num_drafts: got {num_drafts}, allowed: 0, or more with a head")
    if drafter is not None and drafter.max_drafts is not None and num_drafts > drafter.max_drafts:
        raise DraftingError(
            f"num_drafts: got {num_drafts}, allowed: at most {drafter.max_drafts}, the depths that this head has; "
            "lower it, or train with more head.depths"
        )
    needed = max(map(len, prompts)) + max_new_tokens
    if needed > decoder.max_positions:
        raise DraftingError(
            f"prompt and max_new_tokens need {needed} positions, the backbone has {decoder.max_positions}; "
            "shorten either"
        )


def _prefill(
    decoder: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    rule: Rule,
    num_drafts: int,
) -> _Batch:
    cache, hidden = decoder.prefill([list(prompt) for prompt in prompts], capacity)
    pending = rule.first(decoder.logits(torch.stack([state[-1] for state in hidden])))
    batch = _Batch(list(range(len(prompts))), cache, None, pending, None)
    if drafter is not None:
        following = [
            torch.cat([torch.tensor(list(prompt[1:]), dtype=torch.long, device=pending.device), pending[row : row + 1]])
            for row, prompt in enumerate(prompts)
        ]
        batch.head_cache = drafter.new_cache(len(prompts), capacity, num_drafts)
        batch.state = drafter.observe(
            pad_sequence(following, batch_first=True),
            pad_sequence(hidden, batch_first=True),
            [len(prompt) for prompt in prompts],
            batch.head_cache,
        )
    return batch


def _round(
    decoder: Decoder,
    drafter: Drafter | None,
    batch: _Batch,
    drafted: int,
    rule: Rule,
    result: Generation,
    ends: frozenset[int],
    on_tokens: OnTokens | None,
) -> None:
    clock = time.perf_counter()
    drafts = _draft(drafter, batch, drafted, rule)
    after_draft = time.perf_counter()
    hidden = decoder.forward(torch.cat([batch.pending[:, None], drafts], dim=1), batch.cache)
    vocab = drafter.vocab if drafter else None
    verdict = rule.verify(decoder.logits(hidden), drafts, vocab)
    accepted = verdict.accepted.tolist()
    after_verify = time.perf_counter()
    counts = [count + 1 for count in accepted]
    batch.cache.advance(counts)
    # The committed tokens: accepted drafts, then the backbone's own. What follows them is never read.
    committed = torch.cat([drafts, verdict.added[:, None]], dim=1)
    committed.scatter_(1, verdict.accepted[:, None], verdict.added[:, None])
    batch.pending = verdict.added
    if drafter is not None and batch.head_cache is not None:
        time_steps = max(counts)
        batch.state = drafter.observe(committed[:, :time_steps], hidden[:, :time_steps], counts, batch.head_cache)
    after_observe = time.perf_counter()
    result.draft_seconds += (after_draft - clock) + (after_observe - after_verify)
    result.verify_seconds += after_verify - after_draft
    for row, room, count in zip(batch.rows, batch.room, accepted, strict=True):
        # Drafts beyond a row's room are made because other rows have it; counted, only their rejections would show.
        offered = min(drafted, room - 1)
        result.rounds[row].append((offered, min(count, offered)))
    tokens = [row[:count] for row, count in zip(committed.tolist(), counts, strict=True)]
    _commit(batch, tokens, result, ends, on_tokens)


def _draft(drafter: Drafter | None, batch: _Batch, count: int, rule: Rule) -> Tensor:
    """``[rows, count]`` draft tokens; the head's cache lengths stay at the verified anchors."""
    if count == 0:
        return batch.pending.new_empty(len(batch.rows), 0)
    assert drafter is not None
    assert batch.state is not None
    assert batch.head_cache is not None
    state: Tensor = batch.state
    drafts: list[Tensor] = []
    for depth in range(1, count + 1):
        if depth > 1:
            state = drafter.deepen(drafts[-1], state, depth, batch.head_cache)
        drafts.append(rule.propose(drafter.logits(state, depth), drafter.vocab))
    return torch.stack(drafts, dim=1)


def _commit(
    batch: _Batch, tokens: list[list[int]], result: Generation, ends: frozenset[int], on_tokens: OnTokens | None
) -> None:
    """Append each row's tokens up to its end token or its limit; drop rows that are done."""
    running = []
    for position, (row, new) in enumerate(zip(batch.rows, tokens, strict=True)):
        new = new[: batch.room[position]]
        stop = next((index for index, token in enumerate(new) if token in ends), None)
        if stop is not None:
            new = new[: stop + 1]
        if len(new) < len(tokens[position]) and result.rounds[row]:
            # Cut short: its last token ends it, whether drafted or added; statistics of full rounds leave it out.
            result.rounds[row][-1] = (len(new) - 1, len(new) - 1)
        result.completions[row].extend(new)
        if on_tokens is not None:
            on_tokens(row, new)
        batch.room[position] -= len(new)
        if stop is None and batch.room[position] > 0:
            running.append(position)
    if len(running) < len(batch.rows):
        if running:
            batch.keep(running)
        else:
            batch.rows = []
