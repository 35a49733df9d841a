"""Train, validation or held out: a pure function of the group's name."""

from __future__ import annotations

from selfspec.config import ShardConfig, SourceConfig, Split
from selfspec.corpus.records import stable_hash


def split_of(group: str, source: SourceConfig, config: ShardConfig) -> Split | None:
    """The split of every record of ``group``; None where the record must not be used.

    The hash alone decides, not the source or the seed: a held-out group is held out of every source
    that reads it. A source with ``split: train`` therefore drops the groups that a ``split: hash``
    source of the same documents would hold out.
    """
    if source.split == "heldout":
        return "heldout"
    position = stable_hash(f"split/{group}") / 2**64
    if position < config.heldout_fraction:
        return "heldout" if source.split == "hash" else None
    if position < config.heldout_fraction + config.validation_fraction:
        return "validation"
    return "train"
