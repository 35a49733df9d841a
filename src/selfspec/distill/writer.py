"""The backbone writes completions: continuous batching over a preallocated cache.

Prompts are admitted in order of length, so that rows decoded together are of similar length. Rows that
finish make room for new ones; when nothing waits, the batch shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from selfspec.backbones.decoder import Decoder, RaggedCache
from selfspec.distill.records import Completion, Prompt
from selfspec.distill.states import States

# Rows that must be free before prompts are admitted: one prefill for several rows costs little more than for one.
_ADMIT_AT_ONCE = 8
_PREFILL_TOKENS = 4096


class _Rows:
    """The rows being decoded: cache, last token, and what each has written and thought so far."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        self.cache: RaggedCache = decoder.new_cache(rows, capacity)
        self.prompts: list[Prompt | None] = [None] * rows
        self.written: list[list[int]] = [[] for _ in range(rows)]
        self.last = torch.zeros(rows, dtype=torch.long, device=decoder.device)
        width = decoder.lm_head.shape[1]
        self.hidden = torch.zeros(rows, capacity, width, dtype=decoder.dtype, device=decoder.device)
        self.lse = torch.zeros(rows, capacity, device=decoder.device)

    def free(self) -> list[int]:
        return [row for row, prompt in enumerate(self.prompts) if prompt is None]

    def shrink(self, rows: list[int]) -> None:
        self.cache = self.cache.select(rows)
        self.prompts = [self.prompts[row] for row in rows]
        self.written = [self.written[row] for row in rows]
        self.last, self.hidden, self.lse = self.last[rows], self.hidden[rows], self.lse[rows]

    def states(self, row: int, length: int) -> States:
        """What ``row`` holds over ``length`` tokens; the last one was written, not read, and stays zero."""
        hidden, lse = self.hidden[row, :length].cpu().clone(), self.lse[row, :length].cpu().clone()
        hidden[-1], lse[-1] = 0, 0
        return States(hidden, lse)


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Next tokens ``[rows]`` from ``logits [rows, vocabulary]``: argmax at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def write_completions(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    end_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    on_finished: Callable[[Completion, States], None],
    description: str = "distilling",
) -> None:
    """Complete every prompt; ``on_finished`` gets each completion and its states as it ends (not in prompt order)."""
    waiting = sorted(prompts, key=lambda prompt: len(prompt.prompt_ids))  # popped from the end: longest first
    if not waiting:
        return
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    capacity = len(waiting[-1].prompt_ids) + max_new_tokens
    rows = _Rows(decoder, min(batch_size, len(waiting)), capacity)
    ends = set(end_tokens)
    with tqdm(total=len(waiting), desc=description, unit="prompt", mininterval=2) as progress:
        tokens = 0

        def take(row: int, token: int) -> None:
            nonlocal tokens
            tokens += 1
            prompt, written = rows.prompts[row], rows.written[row]
            assert prompt is not None
            written.append(token)
            if token not in ends and len(written) < max_new_tokens:
                return
            stop: Literal["eos", "length"] = "eos" if token in ends else "length"
            completion = Completion(**vars(prompt), completion_ids=written, stop=stop, temperature=temperature)
            on_finished(completion, rows.states(row, completion.length))
            rows.prompts[row], rows.written[row] = None, []
            progress.set_postfix_str(f"{tokens / max(progress.format_dict['elapsed'], 1e-9):,.0f} tok/s", refresh=False)
            progress.update()

        while True:
            free = rows.free()
            if waiting and (len(free) >= min(_ADMIT_AT_ONCE, len(waiting)) or len(free) == len(rows.prompts)):
                _admit(decoder, rows, free, waiting, temperature, generator, take)
                continue
            if not waiting and len(free) > len(rows.prompts) // 4:
                kept = [row for row, prompt in enumerate(rows.prompts) if prompt is not None]
                if not kept:
                    return
                rows.shrink(kept)
            hidden = decoder.forward(rows.last[:, None], rows.cache)[:, 0]
            logits = decoder.logits(hidden)
            every, position = torch.arange(len(rows.prompts)), torch.tensor(rows.cache.lengths)
            rows.hidden[every, position] = hidden
            rows.lse[every, position] = logits.float().logsumexp(-1)
            busy = [prompt is not None for prompt in rows.prompts]
            rows.cache.advance([int(is_busy) for is_busy in busy])
            rows.last = pick(logits, temperature, generator)
            for row, token in enumerate(rows.last.tolist()):
                if busy[row]:
                    take(row, token)


def _admit(
    decoder: Decoder,
    rows: _Rows,
    free: list[int],
    waiting: list[Prompt],
    temperature: float,
    generator: torch.Generator,
    take: Callable[[int, int], None],
) -> None:
    """Prefill the longest waiting prompts into free rows and take their first token."""
    fitting = max(1, _PREFILL_TOKENS // len(waiting[-1].prompt_ids))
    chosen = free[: min(len(waiting), fitting)]
    admitted = [waiting.pop() for _ in chosen]
    lengths = [len(prompt.prompt_ids) for prompt in admitted]
    cache, hidden = decoder.prefill([prompt.prompt_ids for prompt in admitted], max(lengths))
    rows.cache.copy_rows(cache, chosen)
    logits = decoder.logits(torch.stack([state[-1] for state in hidden]))
    lse = logits.float().logsumexp(-1)
    first = pick(logits, temperature, generator)
    rows.last[torch.tensor(chosen, device=first.device)] = first
    for number, (row, prompt, token) in enumerate(zip(chosen, admitted, first.tolist(), strict=True)):
        rows.prompts[row], rows.written[row] = prompt, []
        length = lengths[number]
        rows.hidden[row, :length] = hidden[number]
        rows.lse[row] = 0
        rows.lse[row, length - 1] = lse[number]
        take(row, token)
