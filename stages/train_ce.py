"""train_ce: stage 1, cross-entropy of a new head on the backbone's own completions."""

import json
from pathlib import Path

import torch

from selfspec.backbones import load
from selfspec.config import Config
from selfspec.heads import build, checkpoint, start, vocab
from selfspec.losses import Objective
from selfspec.training.loop import Trainer
from selfspec.training.setup import datasets
from stages._run import run


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    given = start.read(cfg.head, load.model_dir(cfg.backbone))  # fails before there is work to lose
    model = load.load_model(cfg.backbone)
    train, validation = datasets(cfg.backbone, cfg.head.depths)
    tokens = {
        name: torch.cat([torch.tensor(c.completion_ids) for c in data.completions])
        for name, data in (("train", train), ("validation", validation))
    }
    draft_vocab = vocab.choose(tokens["train"], model.config.vocab_size, cfg.head.draft_vocab_size)
    facts = {
        "size": len(draft_vocab),
        "vocab_size": model.config.vocab_size,
        "coverage": {name: draft_vocab.coverage(ids) for name, ids in tokens.items()},
    }
    Path("reports/draft_vocab.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"draft vocabulary: {len(draft_vocab)} tokens cover {facts['coverage']} of completion tokens")

    head = build.build(cfg.head, model, draft_vocab, given)
    trainer = Trainer(
        model, head, draft_vocab, Objective("ce"), cfg.train_ce, cfg.head.depth_decay, train, validation, cfg.seed
    )
    trainer.run().write(Path("reports/train_ce.csv"))
    facts_of_start = None if given is None else given.facts
    checkpoint.save(Path("models/head_ce"), head, draft_vocab, cfg.backbone.name, facts_of_start)


if __name__ == "__main__":
    run(main, before_training=True)
