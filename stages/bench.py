"""bench: wall-clock of MTP decoding against vanilla and prompt look-up, interleaved in one run."""

import json
from pathlib import Path

import pandas as pd
import torch

from selfspec.backbones import load
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import divergence, machine, table
from selfspec.benchmark.timing import Method, Runner, interleave, our_runner, stock_runner, timed_prompts
from selfspec.config import Config
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.loop import check_context
from selfspec.distill import records
from selfspec.heads import checkpoint
from stages._run import run


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.bench.threads)
    model = load.load_model(cfg.backbone)
    dtype = load.DTYPES[cfg.backbone.dtype]
    head = checkpoint.load(Path("models/head"), model, dtype)
    decoder = Decoder(model, middle_layers=head.module.middle_layers)
    groups = records.by_domain(records.read(Path("data/distill/heldout")), cfg.bench.prompts)
    prompts = timed_prompts(groups, cfg.bench.domains)
    limit = cfg.bench.max_new_tokens
    longest = max(len(prompt) for of_domain in prompts.values() for prompt in of_domain)
    check_context("bench.max_new_tokens", limit, longest, decoder.max_positions)
    drafter = drafter_for(decoder, head)

    runners: dict[Method, Runner] = {Method("selfspec", "vanilla", 0): our_runner(decoder, drafter, 0, limit)}
    for count in cfg.bench.num_drafts:
        runners[Method("selfspec", "mtp", count)] = our_runner(decoder, drafter, count, limit)
    runners[Method("transformers", "vanilla", 0)] = stock_runner(model, 0, limit)
    for count in cfg.bench.lookup_tokens:
        runners[Method("transformers", "prompt_lookup", count)] = stock_runner(model, count, limit)

    modes = {"greedy": 0.0, f"t{cfg.bench.temperature}": cfg.bench.temperature}
    runs = interleave(runners, prompts, modes, cfg.seed)
    parted = divergence.check(decoder, runs, prompts, load.arithmetic_name(cfg.backbone), cfg.bench.logit_gap_tolerance)
    rows = pd.DataFrame(table.rows(runs, cfg.bench.bootstrap_samples, cfg.seed))
    rows.to_csv("reports/bench.csv", index=False, float_format="%.10g")
    backbone_parameters = sum(p.numel() for p in model.parameters())  # tied embeddings come once
    facts = {
        "machine": machine.describe(),
        "dtype": load.arithmetic_name(cfg.backbone),
        "divergence": vars(parted),
        "peak_memory_mib": machine.peak_memory_mib(),
        "head_mib": machine.weights_mib(drafter.nbytes() // decoder.dtype.itemsize, dtype),
        "head_parameters": head.facts["parameters"],
        "backbone_mib": machine.weights_mib(backbone_parameters, dtype),
        "backbone_parameters": backbone_parameters,
    }
    Path("reports/bench.json").write_text(json.dumps(facts, indent=2) + "\n")
    shown = [
        "domain",
        "mode",
        "engine",
        "method",
        "num_drafts",
        "tokens_per_second",
        "speedup",
        "speedup_low",
        "speedup_high",
        "tokens_per_round",
        "draft_share",
    ]
    print(rows[shown].round(3).to_string(index=False))


if __name__ == "__main__":
    run(main)
