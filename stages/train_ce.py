"""train_ce: stage 1, cross-entropy of a new head on the backbone's own completions."""

import json
from pathlib import Path

import torch

from selfspec.backbones import load, middle
from selfspec.config import Config
from selfspec.heads import build, start, vocab
from selfspec.losses import Objective
from selfspec.training.loop import Trainer
from selfspec.training.setup import datasets
from stages._run import run


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    given = start.read(cfg.head, load.model_dir(cfg.backbone))  # fails before there is work to lose
    model = load.load_model(cfg.backbone)
    middle.check(cfg.head.middle_layers, model)
    train, validation = datasets(
        cfg.backbone, cfg.train, cfg.distill.states, cfg.seed, model, cfg.head.depths, cfg.head.middle_layers
    )
    tokens = {
        name: torch.cat([torch.tensor(data.completions[i].completion_ids) for i in data.taken])
        for name, data in (("train", train), ("validation", validation))
    }
    draft_vocab = vocab.choose(tokens["train"], model.config.vocab_size, cfg.head.draft_vocab_size)
    facts = {
        "size": len(draft_vocab),
        "vocab_size": model.config.vocab_size,
        "coverage": {name: draft_vocab.coverage(ids) for name, ids in tokens.items()},
    }
    head = build.build(cfg.head, model, draft_vocab, given)
    trainer = Trainer(
        model,
        head,
        draft_vocab,
        Objective("ce"),
        cfg.train_ce,
        cfg.head.depth_decay,
        train,
        validation,
        cfg.seed,
        shared=cfg.train,
        teacher=load.load_model(cfg.train.teacher) if cfg.train.teacher else None,
        resume=Path(".cache/train/train_ce.pt"),
    )
    if trainer.processes.first:
        print(f"draft vocabulary: {len(draft_vocab)} tokens cover {facts['coverage']} of completion tokens")
    curve = trainer.run()
    if trainer.processes.first:
        Path("reports/draft_vocab.json").write_text(json.dumps(facts, indent=2) + "\n")
        curve.write(Path("reports/train_ce.csv"))
        trainer.save(Path("models/head_ce"), cfg.backbone.name, None if given is None else given.facts)


if __name__ == "__main__":
    run(main, before_training=True, processes=True)
