"""Timed runs of one prompt at a time, methods interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from tqdm import tqdm

from selfspec.backbones.decoder import Decoder
from selfspec.decoding.drafter import Drafter
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import rule_for
from selfspec.distill.records import Completion
from selfspec.errors import SelfspecError


class BenchError(SelfspecError):
    """There is nothing to time."""


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        engine: ``selfspec`` or ``transformers``.
        name: ``vanilla``, ``mtp`` or ``prompt_lookup``.
        num_drafts: drafts per round, 0 for vanilla; for prompt look-up, tokens looked up.
    """

    engine: str
    name: str
    num_drafts: int


@dataclass(frozen=True)
class Run:
    """One prompt decoded once.

    Attributes:
        prefill_seconds: until the first token is there, the head's reading of the prompt included.
        rounds: ``(drafted, accepted)`` per verification; empty where the engine does not tell.
        completion: the new tokens; empty for stock ``generate``.
    """

    tokens: int
    seconds: float
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    completion: list[int] = field(default_factory=list)


# (prompt, temperature or 0, seed) -> Run
Runner = Callable[[Sequence[int], float, int], Run]


def our_runner(decoder: Decoder, drafter: Drafter, num_drafts: int, max_new_tokens: int) -> Runner:
    """Our engine with ``num_drafts`` drafts a round."""

    def once(prompt: Sequence[int], temperature: float, seed: int) -> Run:
        generator = torch.Generator(device=decoder.device).manual_seed(seed)
        result = speculate(
            decoder,
            drafter,
            [prompt],
            max_new_tokens=max_new_tokens,
            num_drafts=num_drafts,
            rule=rule_for(temperature, generator),
            end_tokens=decoder.end_tokens,
        )
        return Run(
            result.tokens,
            result.seconds,
            result.draft_seconds,
            result.verify_seconds,
            result.rounds[0],
            result.prefill_seconds,
            result.completions[0],
        )

    return once


def stock_runner(model: Any, lookup_tokens: int, max_new_tokens: int) -> Runner:
    """Stock ``generate``; with ``lookup_tokens``, its prompt look-up."""
    extra = {"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}

    def once(prompt: Sequence[int], temperature: float, seed: int) -> Run:
        torch.manual_seed(seed)
        ids = torch.tensor([list(prompt)], device=model.device)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=model.generation_config.pad_token_id or 0,
            **sampling,
            **extra,
        )
        return Run(out.shape[1] - len(prompt), time.perf_counter() - started)

    return once


def timed_prompts(groups: Mapping[str, Sequence[Completion]], domains: Sequence[str]) -> dict[str, list[list[int]]]:
    """Token ids of the held-out prompts in ``groups``, by domain; of ``domains``, those without any are named.

    Raises:
        BenchError: none of ``domains`` has any.
    """
    for domain in domains:
        if domain not in groups:
            print(f"note: {domain} is not timed: distill found no held-out prompt of it")
    found = {domain: [completion.prompt_ids for completion in groups[domain]] for domain in domains if domain in groups}
    if not found:
        raise BenchError(
            f"bench.domains: got {', '.join(domains)}; allowed: {' or '.join(groups)}, of which distill found held-out "
            "prompts; change bench.domains, or raise shard.heldout_fraction"
        )
    return found


def orders(methods: Sequence[Method]) -> list[list[Method]]:
    """Orders in which each method stands in every place equally often and right behind each other equally often.

    A rotation alone would put every method behind the same one always. Williams's design (1949): n orders for
    an even number n of methods, 2n for an odd one, where the second half is the first reversed.
    """
    count = len(methods)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]  # 0, 1, -1, 2, -2, …
    square = [[methods[(start + offset) % count] for offset in zigzag] for start in range(count)]
    return square + [order[::-1] for order in square] if count % 2 else square


def interleave(
    runners: Mapping[Method, Runner],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    modes: Mapping[str, float],
    seed: int,
) -> dict[tuple[str, str, Method], list[Run]]:
    """Time every method on every prompt, in turn, so that drift of the machine and what ran before hit all alike.

    Each prompt takes the next of ``orders``, in all modes: a mode sees every order as often as another, to within
    one prompt.

    Args:
        prompts: by domain.
        modes: name to temperature, 0 for greedy.

    Returns:
        Runs by ``(domain, mode, method)``, in prompt order. A warm-up run of each method is not among them.
    """
    first = next(iter(prompts.values()))[0]
    for runner in runners.values():
        for temperature in modes.values():
            runner(first, temperature, seed)
    runs: dict[tuple[str, str, Method], list[Run]] = {}
    turns = cycle(orders(list(runners)))
    total = sum(map(len, prompts.values())) * len(modes) * len(runners)
    with tqdm(total=total, desc="benchmark", unit="run", mininterval=2) as progress:
        for domain, of_domain in prompts.items():
            for number, prompt in enumerate(of_domain):
                order = next(turns)
                for mode, temperature in modes.items():
                    for method in order:
                        run = runners[method](prompt, temperature, seed + number)
                        runs.setdefault((domain, mode, method), []).append(run)
                        progress.update()
    return runs
