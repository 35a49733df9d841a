"""What training a backbone beside its heads did to it: held-out perplexity and greedy texts, before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from selfspec.acceptance import Estimate, ratio, resample_weights
from selfspec.backbones.decoder import Decoder
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Greedy

_ROWS = 128  # positions whose logits are alive at once


@torch.inference_mode()
def negative_log_likelihood(decoder: Decoder, text: Sequence[int]) -> float:
    """Of all tokens of ``text`` but the first, summed, in nats."""
    _, (hidden,) = decoder.prefill([list(text)], len(text))
    targets = torch.tensor(text[1:], device=hidden.device)
    total = 0.0
    for states, wanted in zip(hidden[:-1].split(_ROWS), targets.split(_ROWS), strict=True):
        total += float(torch.nn.functional.cross_entropy(decoder.logits(states).float(), wanted, reduction="sum"))
    return total


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> list[list[int]]:
    """Completions without drafts."""
    written: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        written += speculate(
            decoder,
            None,
            prompts[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            num_drafts=0,
            rule=Greedy(),
            end_tokens=decoder.end_tokens,
        ).completions
    return written


def measure(
    before: Decoder,
    after: Decoder,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    samples: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Figures by name, each an ``Estimate``'s fields; in the dtype of the decoders, with the same engine.

    Args:
        texts: held-out human text, token ids; of at least 2 tokens.
        prompts: held-out prompts.

    Returns:
        ``perplexity_before`` and ``perplexity_after`` over ``texts``; ``exact_match``, the share of prompts whose
        greedy completion of at most ``max_new_tokens`` is the same before and after.
    """
    tokens = np.array([len(text) - 1 for text in texts], dtype=float)
    weights = resample_weights(len(texts), samples, seed)
    found: dict[str, Estimate] = {}
    with tqdm(total=2 * len(texts), desc="drift", unit="text", mininterval=2) as progress:
        for name, decoder in (("before", before), ("after", after)):
            losses = []
            for text in texts:
                losses.append(negative_log_likelihood(decoder, text))
                progress.update()
            mean = ratio(np.array(losses), tokens, weights)
            value, low, high = (math.exp(end) for end in (mean.value, mean.low, mean.high))
            found[f"perplexity_{name}"] = Estimate(value, low, high, mean.prompts, mean.count)
    written = [greedy(decoder, prompts, max_new_tokens, batch_size) for decoder in (before, after)]
    same = np.array([float(one == other) for one, other in zip(*written, strict=True)])
    found["exact_match"] = ratio(same, np.ones(len(same)), resample_weights(len(same), samples, seed))
    return {name: asdict(estimate) for name, estimate in found.items()}
