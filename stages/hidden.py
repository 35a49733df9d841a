"""hidden: final hidden states of the frozen backbone over the completions that train and validate the head."""

from pathlib import Path

from selfspec.backbones import load
from selfspec.backbones.decoder import Decoder
from selfspec.config import Config
from selfspec.distill import records
from selfspec.training import hidden
from stages._run import run


def main(cfg: Config) -> None:
    decoder = Decoder(load.load_model(cfg.backbone))
    for split in ("train", "validation"):
        hidden.compute(decoder, records.read(Path("data/distill") / split), Path("data/hidden"), split)


if __name__ == "__main__":
    run(main)
