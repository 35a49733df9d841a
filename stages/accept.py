"""accept: held-out acceptance of the trained head, and the float32 losslessness check."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from selfspec.backbones import load, unfreeze
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import drift, heldout, lossless
from selfspec.config import Config
from selfspec.corpus import shards
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.loop import check_context
from selfspec.decoding.rules import rule_for
from selfspec.distill import records
from selfspec.heads import checkpoint
from stages._run import run

HEAD = Path("models/head")
SHARDS = Path("data/shards")


def main(cfg: Config) -> None:
    ledger = json.loads(Path("reports/ledger.json").read_text())
    held = records.read(Path("data/distill/heldout"))
    trained = records.read(Path("data/distill/train"))
    heldout.refuse_leaks(ledger, (c.id for c in trained), (c.id for c in held))
    groups = records.by_domain(held, cfg.accept.prompts)

    compared = check_lossless(cfg, groups)
    print(
        f"lossless: {compared.identical} of {compared.prompts} prompts identical in float32 ({compared.tokens} tokens)"
    )

    model = load.load_model(cfg.backbone)
    head = checkpoint.load(HEAD, model, load.DTYPES[cfg.backbone.dtype])
    decoder = Decoder(model, middle_layers=head.module.middle_layers)
    samples, seed = cfg.accept.bootstrap_samples, cfg.seed
    temperatures = {"greedy": 0.0} | {f"t{temperature}": temperature for temperature in cfg.accept.temperatures}
    modes = {mode: rule_for(temperature, seeded(cfg, decoder)) for mode, temperature in temperatures.items()}
    rows = heldout.forced_rows(decoder, head, groups, head.module.depths, samples, seed)
    rows += heldout.running_rows(
        decoder,
        drafter_for(decoder, head),
        groups,
        modes,
        num_drafts=cfg.accept.num_drafts,
        max_new_tokens=cfg.accept.max_new_tokens,
        batch_size=cfg.accept.batch_size,
        samples=samples,
        seed=seed,
    )
    table = pd.DataFrame([vars(row) for row in rows])
    table.to_csv("reports/accept.csv", index=False, float_format="%.10g")
    tokens = torch.tensor([token for group in groups.values() for c in group for token in c.completion_ids])
    drifted = check_drift(cfg, decoder, groups)
    facts = {
        "num_drafts": cfg.accept.num_drafts,
        "lossless": vars(compared),
        "prompts": {domain: len(group) for domain, group in groups.items()},
        "heldout_coverage": head.vocab.coverage(tokens),
        "drift": drifted,
    }
    Path("reports/accept.json").write_text(json.dumps(facts, indent=2) + "\n")
    shown = table[(table.metric == "tokens_per_round") | ((table.metric == "match") & (table.depth == 1))]
    print(shown.round(3).to_string(index=False))


def check_drift(cfg: Config, decoder: Decoder, groups: dict[str, list[records.Completion]]) -> dict[str, Any] | None:
    """What training the backbone too did to it; None for a frozen one."""
    if not unfreeze.changed(HEAD):
        return None
    tokenizer = load.load_tokenizer(cfg.backbone)
    texts: list[list[int]] = []
    for row in shards.iter_split(SHARDS, "heldout"):
        if row["kind"] == "corpus" and len(texts) < cfg.accept.prompts * len(groups):
            ids = tokenizer(row["text"]).input_ids[: decoder.max_positions]
            texts += [ids] if len(ids) > 1 else []
    if not texts:
        raise heldout.LeakError(
            "shard.sources: no corpus records are held out, so the drift of the unfrozen backbone cannot be measured; "
            "allowed: a corpus source with split: hash; add one, or set train.unfrozen_layers to 0"
        )
    return drift.measure(
        Decoder(load.load_model(cfg.backbone)),
        decoder,
        texts,
        [completion.prompt_ids for group in groups.values() for completion in group],
        max_new_tokens=cfg.accept.max_new_tokens,
        batch_size=cfg.accept.batch_size,
        samples=cfg.accept.bootstrap_samples,
        seed=cfg.seed,
    )


def check_lossless(cfg: Config, groups: dict[str, list[records.Completion]]) -> lossless.Comparison:
    """Greedy identity in float32 on prompts taken in turn from every domain; first, whether all texts fit."""
    model = load.load_model(cfg.backbone, torch.float32)
    head = checkpoint.load(HEAD, model)
    decoder = Decoder(model, middle_layers=head.module.middle_layers)
    longest_prompt = max(len(c.prompt_ids) for group in groups.values() for c in group)
    for name in ("max_new_tokens", "lossless_tokens"):
        check_context(f"accept.{name}", getattr(cfg.accept, name), longest_prompt, decoder.max_positions)
    drafter = drafter_for(decoder, head)
    longest = max(map(len, groups.values()))
    in_turn = [group[i].prompt_ids for i in range(longest) for group in groups.values() if i < len(group)]
    prompts = in_turn[: cfg.accept.lossless_prompts]
    return lossless.check(model, decoder, drafter, prompts, cfg.accept.lossless_tokens, cfg.accept.num_drafts)


def seeded(cfg: Config, decoder: Decoder) -> torch.Generator:
    return torch.Generator(device=decoder.device).manual_seed(cfg.seed)


if __name__ == "__main__":
    run(main)
