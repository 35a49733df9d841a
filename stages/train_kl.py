"""train_kl: stage 2, from stage 1's head towards the backbone's whole distribution (KL or an LK loss)."""

from pathlib import Path

import torch

from selfspec.backbones import load
from selfspec.config import Config
from selfspec.heads import checkpoint
from selfspec.losses import Objective
from selfspec.training.loop import Trainer
from selfspec.training.setup import datasets
from stages._run import run


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    model = load.load_model(cfg.backbone)
    trained = checkpoint.load(Path("models/head_ce"), model, torch.float32)
    train, validation = datasets(cfg.backbone, trained.module.depths)
    loss = Objective(**cfg.loss.model_dump())
    trainer = Trainer(
        model,
        trained.module,
        trained.vocab,
        loss,
        cfg.train_kl,
        cfg.head.depth_decay,
        train,
        validation,
        cfg.seed + 1,  # another order than stage 1
    )
    trainer.run().write(Path("reports/train_kl.csv"))
    start = trained.facts.get("start")
    checkpoint.save(Path("models/head"), trained.module, trained.vocab, cfg.backbone.name, start)


if __name__ == "__main__":
    run(main)
