"""Greedy speculative decoding against stock ``generate(do_sample=False)``, token for token, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.load import end_tokens
from selfspec.decoding.drafter import Drafter
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Greedy
from selfspec.errors import SelfspecError

_ROWS = 12  # prompts a stock batch holds


class LosslessError(SelfspecError):
    """Speculative decoding changed the text."""


@dataclass(frozen=True)
class Comparison:
    """How many prompts were compared, over how many tokens, and how many came out identical."""

    prompts: int
    tokens: int
    identical: int


def stock_greedy(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """New tokens of stock ``generate`` (left-padded batches), an end token included, padding removed."""
    ends = set(end_tokens(model))
    completions: list[list[int]] = []
    for start in range(0, len(prompts), _ROWS):
        chunk = prompts[start : start + _ROWS]
        longest = max(map(len, chunk))
        ids = torch.zeros(len(chunk), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(chunk):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=model.generation_config.pad_token_id or 0,
        )
        for row in out[:, longest:].tolist():
            stop = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
            completions.append(row[: stop + 1])
    return completions


def check(
    model: PreTrainedModel,
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_drafts: int,
) -> Comparison:
    """Compare on ``prompts``; ``model``, ``decoder`` and ``drafter`` are the same weights in float32.

    Raises:
        LosslessError: a completion differs; names the prompt, the position and both tokens.
    """
    expected = stock_greedy(model, prompts, max_new_tokens)
    actual = speculate(
        decoder,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        num_drafts=num_drafts,
        rule=Greedy(),
        end_tokens=decoder.end_tokens,
    ).completions
    for number, (ours, stock) in enumerate(zip(actual, expected, strict=True)):
        if ours != stock:
            where = next(
                (i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), min(len(ours), len(stock))
            )
            raise LosslessError(
                f"lossless check: prompt {number} differs from stock generate at new token {where}: "
                f"ours {ours[where : where + 3]}, stock {stock[where : where + 3]}; "
                "greedy speculative decoding must not change the text, so do not use this head's figures"
            )
    return Comparison(len(prompts), sum(map(len, expected)), len(prompts))
