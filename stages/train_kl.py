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

STAGE_1 = Path("models/head_ce")


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    model = load.load_model(cfg.backbone)
    trained = checkpoint.load(STAGE_1, model, torch.float32)
    head = trained.module
    train, validation = datasets(
        cfg.backbone, cfg.train, cfg.distill.states, cfg.seed, model, head.depths, head.middle_layers
    )
    trainer = Trainer(
        model,
        head,
        trained.vocab,
        Objective(**cfg.loss.model_dump()),
        cfg.train_kl,
        cfg.head.depth_decay,
        train,
        validation,
        cfg.seed + 1,  # another order than stage 1
        shared=cfg.train,
        teacher=load.load_model(cfg.train.teacher) if cfg.train.teacher else None,
        resume=Path(".cache/train/train_kl.pt"),
        exact=trained.backbone,
    )
    curve = trainer.run()
    if trainer.processes.first:
        curve.write(Path("reports/train_kl.csv"))
        trainer.save(Path("models/head"), cfg.backbone.name, trained.facts.get("start"))


if __name__ == "__main__":
    run(main, processes=True)
