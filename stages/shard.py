"""shard: stream the mixture, split it by group, write parquet shards and the leakage ledger.

Reads   params.yaml: seed, backbone (its tokenizer counts the tokens), shard
Writes  data/shards/{train,validation,heldout}-*.parquet, reports/ledger.json
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from selfspec.backbones.load import load_tokenizer
from selfspec.config import Config
from selfspec.corpus.build import build, domain_counts
from selfspec.corpus.ledger import write
from stages._run import run


def main(config: Config) -> None:
    ledger = build(config.shard, load_tokenizer(config.backbone), config.seed, Path("data/shards"))
    write(ledger, Path("reports/ledger.json"))
    columns = ["source", "domain", "split", "records", "tokens"]
    table = pd.DataFrame(domain_counts(ledger, config.shard), columns=columns)
    print(table.to_string(index=False))
    print(table.pivot_table(index="domain", columns="split", values=["records", "tokens"], aggfunc="sum", fill_value=0))
    dropped = sum(ledger["dropped_overlap"].values())
    print(f"{ledger['exact_duplicates']} exact duplicates and {dropped} overlapping records dropped")


if __name__ == "__main__":
    run(main, before_training=True)
