"""From shards to what the backbone reads: chat template for messages, a prefix for documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.config import DistillConfig, Split
from selfspec.distill.records import Completion, Prompt
from selfspec.errors import SelfspecError

# A document shorter than this leaves nothing to continue from.
_MIN_PREFIX_TOKENS = 8
# What gives a split more records.
_SPLIT_SIZE: Mapping[Split, str] = {
    "train": "shard.max_train_tokens",
    "validation": "shard.validation_fraction",
    "heldout": "shard.heldout_fraction",
}


class DistillError(SelfspecError):
    """The prompts cannot be completed by this backbone."""


@dataclass(frozen=True)
class Selection:
    """Prompts in shard order.

    Attributes:
        skipped_long: prompts over ``distill.max_prompt_tokens``, by domain.
        missing: how many prompts fewer than asked for the shards hold, by domain.
    """

    prompts: list[Prompt]
    skipped_long: dict[str, int]
    missing: dict[str, int]


def select(
    rows: Iterable[Mapping[str, str]], counts: Mapping[str, int], config: DistillConfig, tokenizer: Any
) -> Selection:
    """The first ``counts[domain]`` usable records of each domain.

    Raises:
        DistillError: chat prompts, but the tokenizer has no chat template.
    """
    wanted = Counter({domain: count for domain, count in counts.items() if count})
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        domain = row["domain"]
        if wanted[domain] <= 0:
            continue
        ids = token_ids(row, config.prefix_tokens, tokenizer)
        if len(ids) < _MIN_PREFIX_TOKENS:
            continue
        if len(ids) > config.max_prompt_tokens:
            skipped[domain] += 1
            continue
        prompts.append(Prompt(row["id"], row["source"], row["kind"], domain, ids))
        wanted[domain] -= 1
        if not +wanted:
            break
    return Selection(prompts, dict(skipped), dict(+wanted))


def documents(
    rows: Iterable[Mapping[str, str]], counts: Mapping[str, int], config: DistillConfig, tokenizer: Any
) -> list[Completion]:
    """The first ``counts[domain]`` corpus records of each domain, to be trained on as they are.

    The first token stands for the prompt, since something has to; of the rest, at most ``max_prompt_tokens`` +
    ``max_new_tokens`` in all are taken.
    """
    wanted = Counter({domain: count for domain, count in counts.items() if count})
    found: list[Completion] = []
    for row in rows:
        if row["kind"] != "corpus" or wanted[row["domain"]] <= 0:
            continue
        ids = tokenizer(row["text"]).input_ids[: config.max_prompt_tokens + config.max_new_tokens]
        if len(ids) < _MIN_PREFIX_TOKENS:
            continue
        place = (row["id"], row["source"], row["kind"], row["domain"])
        found.append(Completion(*place, ids[:1], ids[1:], "length", 0.0))
        wanted[row["domain"]] -= 1
        if not +wanted:
            break
    return found


def check_found(split: Split, selection: Selection, config: DistillConfig) -> None:
    """Every split needs a prompt: one trains on train, stops by validation and measures on heldout.

    Raises:
        DistillError: ``selection`` is empty.
    """
    if selection.prompts:
        return
    asked = {domain: count for domain, count in getattr(config.prompts, split).model_dump().items() if count}
    line = (
        f"distill.prompts.{split}: got 0 of the {sum(asked.values())} prompts asked for in {', '.join(asked)}; "
        f"allowed: at least 1; raise {_SPLIT_SIZE[split]}, or ask for a domain that the shards hold"
    )
    if skipped := sum(selection.skipped_long.values()):
        line += f", or raise distill.max_prompt_tokens above {config.max_prompt_tokens} ({skipped} prompts are longer)"
    raise DistillError(line)


def check_context(config: DistillConfig, max_positions: int) -> None:
    """Hold the longest text that may be written against the backbone's ``max_positions``, in tokens.

    Raises:
        DistillError: prompt and completion may need more.
    """
    if config.max_prompt_tokens + config.max_new_tokens > max_positions:
        raise DistillError(
            f"distill.max_prompt_tokens + distill.max_new_tokens: got {config.max_prompt_tokens} + "
            f"{config.max_new_tokens}; allowed: at most {max_positions} together, the positions that the backbone "
            "has; lower one of the two"
        )


def token_ids(row: Mapping[str, str], prefix_tokens: int, tokenizer: Any) -> list[int]:
    """Ids of one record: messages through the chat template, or the first ``prefix_tokens`` of its text."""
    if row["kind"] == "corpus":
        ids: list[int] = tokenizer(row["text"]).input_ids[:prefix_tokens]
        return ids
    if tokenizer.chat_template is None:
        raise DistillError(
            f"shard.sources: {row['source']} is of kind prompt, but the backbone's tokenizer has no chat template; "
            "use corpus sources, or add a chat_template to the tokenizer"
        )
    return list(
        tokenizer.apply_chat_template(json.loads(row["messages"]), add_generation_prompt=True, return_dict=False)
    )
