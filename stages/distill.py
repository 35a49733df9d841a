"""distill: the backbone completes the prompts of every split; token ids and hidden states are kept."""

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from selfspec.backbones import load, middle
from selfspec.backbones.decoder import Decoder
from selfspec.config import SPLITS, Config, Split
from selfspec.corpus import shards
from selfspec.corpus.overlap import HeldoutIndex, shared_ngrams
from selfspec.distill import prompts, records, states
from selfspec.distill.journal import Journal, key_of
from selfspec.distill.records import Completion, Prompt
from selfspec.distill.states import States
from selfspec.distill.writer import write_completions
from stages._run import run

SHARDS = Path("data/shards")
OUT = Path("data/distill")
HIDDEN = Path("data/hidden")
JOURNALS = Path(".cache/distill")


def main(cfg: Config) -> None:
    tokenizer = load.load_tokenizer(cfg.backbone)
    written_by_backbone = SPLITS if cfg.distill.text == "completions" else ("heldout",)
    selections = {
        split: prompts.select(
            shards.iter_split(SHARDS, split), getattr(cfg.distill.prompts, split).model_dump(), cfg.distill, tokenizer
        )
        for split in written_by_backbone
    }
    for split, selection in selections.items():
        prompts.check_found(split, selection, cfg.distill)
        for domain, missing in selection.missing.items():
            print(f"note: {split} has {missing} {domain} prompts fewer than distill.prompts.{split}.{domain} asks for")
    texts = {split: read_corpus(cfg, split, tokenizer) for split in SPLITS if split not in selections}
    decoder = Decoder(load.load_model(cfg.backbone), middle_layers=cfg.head.middle_layers)
    prompts.check_context(cfg.distill, decoder.max_positions)
    every = [prompt for selection in selections.values() for prompt in selection.prompts]
    journal, seconds, written = complete(cfg, decoder, every)

    dropped: Counter[str] = Counter()
    if "train" in selections:
        index = HeldoutIndex.from_shards(SHARDS, cfg.shard.ngram)
    for split, selection in selections.items():
        kept: list[Completion] = []
        for prompt in selection.prompts:
            completion = journal.finished[prompt.id]
            # What the backbone writes is training text too: it must not recite a held-out prompt.
            if (
                split == "train"
                and shared_ngrams(tokenizer.decode(completion.completion_ids), index) > cfg.shard.max_shared_ngrams
            ):
                dropped[completion.domain] += 1
                continue
            kept.append(completion)
        if not kept:
            raise prompts.DistillError(
                f"shard.max_shared_ngrams: got {cfg.shard.max_shared_ngrams}; all {len(selection.prompts)} completions "
                f"of {split} share more {cfg.shard.ngram}-grams with a held-out prompt; raise it, or shard.ngram"
            )
        texts[split] = kept
    for split, kept in texts.items():
        save(OUT / split, kept, cfg.distill.records_per_shard)
    save_states(cfg, decoder, journal, {split: kept for split, kept in texts.items() if split != "heldout"})
    facts = {
        "domains": {
            domain: {
                "prompts": len(group),
                "tokens": sum(len(c.completion_ids) for c in group),
                "eos_share": sum(c.stop == "eos" for c in group) / len(group),
            }
            for domain, group in sorted(records.by_domain(texts["train"]).items())
        },
        "tokens": sum(len(completion.completion_ids) for completion in texts["train"]),
        "skipped_long": selections["train"].skipped_long if "train" in selections else {},
        "dropped_overlap": dict(dropped),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(written / seconds, 1) if seconds else None,
    }
    Path("reports/distill.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    print(json.dumps(facts, indent=2))
    journal.discard()


def read_corpus(cfg: Config, split: Split, tokenizer: Any) -> list[Completion]:
    """Documents that training reads as they are (``distill.text: corpus``)."""
    counts = getattr(cfg.distill.prompts, split).model_dump()
    found = prompts.documents(shards.iter_split(SHARDS, split), counts, cfg.distill, tokenizer)
    if not found:
        raise prompts.DistillError(
            f"distill.text: got corpus, but {split} has no corpus records in the domains that distill.prompts.{split} "
            "asks for; allowed: completions, or domains with corpus sources; change it, the counts or shard.sources"
        )
    return found


def complete(cfg: Config, decoder: Decoder, every: list[Prompt]) -> tuple[Journal, float, int]:
    """Write what the journal lacks; returns it with the seconds spent and the tokens written in this process."""
    journal = Journal(
        JOURNALS,
        key_of([cfg.seed, cfg.backbone.model_dump(), cfg.distill.model_dump(), cfg.head.middle_layers], every),
        cfg.distill.records_per_shard,
        load.DTYPES[cfg.backbone.dtype],
        keep_states=cfg.distill.states == "cached",
    )
    remaining = journal.remaining(every)
    if len(remaining) < len(every):
        print(f"going on after an interrupted run: {len(every) - len(remaining)} of {len(every)} prompts are done")
    written = 0

    def finished(completion: Completion, of: States) -> None:
        nonlocal written
        written += len(completion.completion_ids)
        journal.add(completion, of)

    started = time.perf_counter()
    write_completions(
        decoder,
        remaining,
        end_tokens=decoder.end_tokens,
        max_new_tokens=cfg.distill.max_new_tokens,
        temperature=cfg.distill.temperature,
        batch_size=cfg.distill.batch_size,
        seed=cfg.seed,
        on_finished=finished,
        store=journal.dtype,
        workers=torch.get_num_threads() if decoder.device.type == "cpu" else 1,
    )
    journal.flush()
    return journal, time.perf_counter() - started, written


def save(directory: Path, completions: list[Completion], per_shard: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for number, start in enumerate(range(0, max(1, len(completions)), per_shard)):
        records.write(directory / f"{number:05d}.parquet", completions[start : start + per_shard])


def save_states(cfg: Config, decoder: Decoder, journal: Journal, texts: dict[Split, list[Completion]]) -> None:
    """Beside the texts, the backbone's states over them: from the journal, or by a forward pass over documents."""
    shutil.rmtree(HIDDEN, ignore_errors=True)
    HIDDEN.mkdir(parents=True)
    if cfg.distill.states == "live":
        (HIDDEN / "live.txt").write_text("distill.states: live; training computes the backbone's states itself.\n")
        return
    for split, completions in texts.items():
        if cfg.distill.text == "completions":
            parts = map(journal.states, completions)
        else:
            shown = tqdm(completions, desc=f"states of {split}", unit="document", mininterval=2)
            parts = (states.recompute(decoder, completion, journal.dtype) for completion in shown)
        tokens = sum(completion.length for completion in completions)
        width = middle.width(decoder.lm_head.shape[1], cfg.head.middle_layers)
        states.write(HIDDEN, split, parts, tokens, width, journal.dtype)


if __name__ == "__main__":
    run(main, before_training=True)
