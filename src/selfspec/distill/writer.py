"""The backbone writes completions: continuous batching over a preallocated cache.

Prompts are admitted in order of length, so that rows decoded together are of similar length. Rows that
finish make room for new ones; when nothing waits, the batch shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Lock
from typing import Any, Literal

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

    def __init__(self, decoder: Decoder, rows: int, capacity: int, store: torch.dtype) -> None:
        self.cache: RaggedCache = decoder.new_cache(rows, capacity)
        self.prompts: list[Prompt | None] = [None] * rows
        self.written: list[list[int]] = [[] for _ in range(rows)]
        self.last = torch.zeros(rows, dtype=torch.long, device=decoder.device)
        self.hidden = torch.zeros(rows, capacity, decoder.state_width, dtype=store, device=decoder.device)
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
    """Next tokens ``[rows]`` from float32 ``logits [rows, vocabulary]``: argmax at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / temperature, dim=-1)
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
    store: torch.dtype | None = None,
    workers: int = 1,
    description: str = "distilling",
) -> None:
    """Complete every prompt; ``on_finished`` gets each completion and its states as it ends (not in prompt order).

    Args:
        batch_size: rows decoded together, over all workers.
        store: dtype that the states are kept in (default: the decoder's own). Tokens and log-normalisers come
            from states rounded so: what is taught is then exactly what the stored states say.
        workers: threads that share the prompts, each with rows of its own and one CPU thread for its
            arithmetic. Two workers of 64 rows beat one of 128 on two cores: no kernel waits for the other core.
    """
    if not prompts:
        return
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    queue = _Queue(prompts, longest + max_new_tokens)
    ends, threads = frozenset(end_tokens), torch.get_num_threads()
    with tqdm(total=len(prompts), desc=description, unit="prompt", mininterval=2) as progress:
        tally = _Tally(progress, on_finished)

        def work(number: int) -> None:
            if workers > 1:
                torch.set_num_threads(1)  # of this thread
            generator = torch.Generator(device=decoder.device).manual_seed(seed + number)
            rows = max(1, min(batch_size, len(prompts)) // workers)
            with torch.inference_mode():
                _Worker(
                    decoder, queue, rows, store or decoder.dtype, ends, max_new_tokens, temperature, generator, tally
                ).run()

        if workers == 1:
            work(0)
            return
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in as_completed([pool.submit(work, number) for number in range(workers)]):
                    done.result()
            except BaseException:
                queue.close()  # the other workers finish their rows and stop
                raise
            finally:
                torch.set_num_threads(threads)


class _Queue:
    """Prompts waiting for a row, longest first, shared by the workers."""

    def __init__(self, prompts: Sequence[Prompt], limit: int) -> None:
        self.limit = limit
        self._waiting = sorted(prompts, key=lambda prompt: len(prompt.prompt_ids))
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, rows: int) -> list[Prompt]:
        """At most ``rows`` prompts, and no more than one prefill should hold."""
        with self._lock:
            if not self._waiting:
                return []
            fitting = max(1, _PREFILL_TOKENS // len(self._waiting[-1].prompt_ids))
            return [self._waiting.pop() for _ in range(min(rows, fitting, len(self._waiting)))]

    def close(self) -> None:
        with self._lock:
            self._waiting.clear()


class _Tally:
    """Hands completions on, one at a time, and shows the rate."""

    def __init__(self, progress: tqdm[Any], on_finished: Callable[[Completion, States], None]) -> None:
        self._progress, self._on_finished = progress, on_finished
        self._tokens, self._lock = 0, Lock()

    def finished(self, completion: Completion, states: States) -> None:
        with self._lock:
            self._on_finished(completion, states)
            self._tokens += len(completion.completion_ids)
            rate = self._tokens / max(self._progress.format_dict["elapsed"], 1e-9)
            self._progress.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
            self._progress.update()


class _Worker:
    """One batch of rows over the shared queue."""

    def __init__(
        self,
        decoder: Decoder,
        queue: _Queue,
        rows: int,
        store: torch.dtype,
        ends: frozenset[int],
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator,
        tally: _Tally,
    ) -> None:
        self.decoder, self.queue, self.tally = decoder, queue, tally
        self.rows = _Rows(decoder, rows, queue.limit, store)
        self.store = store
        self.ends, self.max_new_tokens = ends, max_new_tokens
        self.temperature, self.generator = temperature, generator

    def run(self) -> None:
        rows = self.rows
        while True:
            free, waiting = rows.free(), len(self.queue)
            if waiting and (len(free) >= min(_ADMIT_AT_ONCE, waiting) or len(free) == len(rows.prompts)):
                self._admit(free)
                continue
            if not waiting and len(free) > len(rows.prompts) // 4:
                kept = [row for row, prompt in enumerate(rows.prompts) if prompt is not None]
                if not kept:
                    return
                rows.shrink(kept)
            self._step()

    def _step(self) -> None:
        """One token for every busy row; free rows compute along and are ignored."""
        rows, decoder = self.rows, self.decoder
        hidden = decoder.forward(rows.last[:, None], rows.cache)[:, 0].to(self.store)
        logits = decoder.logits(hidden.to(decoder.dtype)).float()
        every, position = torch.arange(len(rows.prompts)), torch.tensor(rows.cache.lengths)
        rows.hidden[every, position] = hidden
        rows.lse[every, position] = logits.logsumexp(-1)
        busy = [prompt is not None for prompt in rows.prompts]
        rows.cache.advance([int(is_busy) for is_busy in busy])
        rows.last = pick(logits, self.temperature, self.generator)
        for row, token in enumerate(rows.last.tolist()):
            if busy[row]:
                self._take(row, token)

    def _admit(self, free: list[int]) -> None:
        """Prefill the longest waiting prompts into free rows and take their first token."""
        rows, decoder = self.rows, self.decoder
        admitted = self.queue.take(len(free))
        if not admitted:  # another worker was quicker
            return
        chosen = free[: len(admitted)]
        lengths = [len(prompt.prompt_ids) for prompt in admitted]
        cache, hidden = decoder.prefill([prompt.prompt_ids for prompt in admitted], max(lengths))
        rows.cache.copy_rows(cache, chosen)
        last = torch.stack([state[-1] for state in hidden]).to(self.store)
        logits = decoder.logits(last.to(decoder.dtype)).float()
        lse = logits.logsumexp(-1)
        first = pick(logits, self.temperature, self.generator)
        rows.last[torch.tensor(chosen, device=first.device)] = first
        for number, (row, prompt, token) in enumerate(zip(chosen, admitted, first.tolist(), strict=True)):
            rows.prompts[row], rows.written[row] = prompt, []
            rows.hidden[row, : lengths[number]] = hidden[number]
            rows.lse[row] = 0
            rows.lse[row, lengths[number] - 1] = lse[number]
            self._take(row, token)

    def _take(self, row: int, token: int) -> None:
        rows = self.rows
        prompt, written = rows.prompts[row], rows.written[row]
        assert prompt is not None
        written.append(token)
        if token not in self.ends and len(written) < self.max_new_tokens:
            return
        stop: Literal["eos", "length"] = "eos" if token in self.ends else "length"
        completion = Completion(**vars(prompt), completion_ids=written, stop=stop, temperature=self.temperature)
        states = rows.states(row, completion.length)
        rows.prompts[row], rows.written[row] = None, []
        rows.cache.clear(row)  # so that the cache can shrink to what the others need
        self.tally.finished(completion, states)
