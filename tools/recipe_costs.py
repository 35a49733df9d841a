"""What every recipe needs, as a table: ``make recipe-costs``. An estimate from counted work, not a measurement.

``tools/counts.py`` counts operations and bytes; here they meet the speeds of a GPU. The assumed ones:

- training and prefill reach `UTILISATION` of the card's dense bfloat16 peak;
- decoding waits for memory, of whose bandwidth it gets `BANDWIDTH_SHARE`, or computes at that utilisation where this
  takes longer;
- a process holds `OVERHEAD` beside what is counted (CUDA context, workspaces, fragmentation).

None has been measured for this code on a GPU.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfspec import config as configuration
from selfspec.config import Config
from selfspec.errors import SelfspecError
from selfspec.heads.build import construct
from selfspec.heads.protocol import Head
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective
from tools import counts, recipe

SIZES = recipe.ROOT / "tools/backbones.yaml"
SYSTEMS = "docs/systems.md"
GIB = 2**30
UTILISATION = 0.2  # of eager code on matrices of a few thousand rows; tuned engines reach twice as much and more
BANDWIDTH_SHARE = 0.2
OVERHEAD = 2 * GIB


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: memory in GiB as usable, dense bfloat16 operations and bytes a second."""

    name: str
    memory_gib: float
    operations: float
    bandwidth: float


CARDS = (
    Card("H100 SXM", 79.0, 989e12, 3.35e12),
    Card("A10", 22.0, 125e12, 600e9),
)


class CostError(SelfspecError):
    """A backbone's sizes are not known."""


@dataclass(frozen=True)
class Costs:
    """One recipe's.

    Attributes:
        writing, training: operations, and bytes that decoding moves.
        memory: bytes on the GPU in the stage that needs most.
        disk: bytes of the stored states.
    """

    writing: list[counts.Work]
    training: list[counts.Work]
    memory: float
    disk: float

    def seconds(self, card: Card) -> float:
        """On ``card``, at the assumed utilisation."""
        seconds = 0.0
        for work in [*self.writing, *self.training]:
            computing = work.operations / (card.operations * UTILISATION)
            seconds += max(computing, work.bytes_moved / (card.bandwidth * BANDWIDTH_SHARE))
        return seconds


def of(name: str) -> Costs:
    """Counts of recipe ``name``.

    Raises:
        CostError: its backbone's sizes are not in tools/backbones.yaml.
        RecipeError, ConfigError: as ``recipe.build``.
    """
    config = configuration.parse(recipe.plain(recipe.build(name)))
    known = sizes(config.backbone.uri)
    model = empty_model(known["config"])
    taught_by = config.train.teacher
    teacher = None if taught_by is None else empty_model(sizes(taught_by.uri)["config"])
    return counted(config, model, empty_head(config, model, known), teacher)


def counted(config: Config, model: PreTrainedModel, head: Head, teacher: PreTrainedModel | None = None) -> Costs:
    """Counts for a backbone, a head and the backbone's teacher, of which only the sizes matter."""
    backbone, texts, batch = counts.Backbone.of(model), counts.Texts.of(config), config.distill.batch_size
    live = config.distill.states == "live"
    taught_by = None if teacher is None else counts.Backbone.of(teacher)
    draft_rows = (config.head.draft_vocab_size or backbone.vocabulary) * backbone.hidden
    stages = [
        counts.Stage(training, config.train, objective, head, backbone, draft_rows, texts, live, taught_by)
        for training, objective in (
            (config.train_ce, Objective("ce")),
            (config.train_kl, Objective(**config.loss.model_dump())),
        )
    ]
    writing = [counts.prefill(backbone, texts), counts.decode(backbone, texts, batch)]
    if texts.corpus and not live:
        writing.append(counts.reading(backbone, texts))
    return Costs(
        writing=writing,
        training=[counts.Work(stage.operations()) for stage in stages],
        memory=OVERHEAD + max(counts.writing_memory(backbone, texts, batch), *(stage.memory() for stage in stages)),
        disk=0.0 if live else counts.stored_states(backbone, texts, len(config.head.middle_layers)),
    )


def sizes(uri: str) -> dict[str, Any]:
    """The entry of ``uri`` in tools/backbones.yaml.

    Raises:
        CostError: there is none.
    """
    known: dict[str, dict[str, Any]] = yaml.safe_load(SIZES.read_text())
    if uri not in known:
        raise CostError(f"backbone.uri: got {uri}, allowed: {', '.join(known)}; add its sizes to {SIZES.name}")
    return known[uri]


def empty_model(options: dict[str, Any]) -> PreTrainedModel:
    """A stock model of a configuration, without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    return model


def empty_head(config: Config, model: PreTrainedModel, known: dict[str, Any]) -> Head:
    """The recipe's head on ``model``, without weights; ``known`` are the backbone's ``sizes``.

    Its layer is one with full attention. A backbone with linear attention besides, which is refused so far, is taken
    as one without.
    """
    kinds = getattr(model.config, "layer_types", None) or []
    if "linear_attention" in kinds:
        model = empty_model({**known["config"], "layer_types": ["full_attention"] * len(kinds)})
    vocabulary = model.config.vocab_size
    ids = torch.arange(config.head.draft_vocab_size or vocabulary)
    head = config.head
    with torch.device("meta"):
        return construct(head.type, model, head.depths, DraftVocab(ids, vocabulary), head.options)


def source(name: str) -> str:
    """The published system behind a recipe, as a link under the title that it has in docs/systems.md."""
    found = re.search(rf"^## (.+?) \(.*recipe `{re.escape(name)}`$", (recipe.ROOT / SYSTEMS).read_text(), re.MULTILINE)
    return f"[{found[1]}]({SYSTEMS})" if found else "this project's default"


def table() -> str:
    """All recipes in Markdown, with what the figures are under it."""
    header = ["recipe", "source", "GPU memory, GiB", "states on disk, GiB"]
    header += [f"time, {card.name}" for card in CARDS] + ["command"]
    rows = []
    for name in recipe.names():
        costs = of(name)
        times = [_time(costs, card) for card in CARDS]
        memory, disk = costs.memory / GIB, costs.disk / GIB
        command = f"`make recipe NAME={name} && make repro`"
        rows.append([f"`{name}`", source(name), f"{memory:.0f}", f"{disk:.1f}", *times, command])
    align = ["---", "---"] + ["---:"] * (len(header) - 3) + ["---"]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, align, *rows)]
    cards = "; ".join(
        f"{card.name}: {card.operations / 1e12:.0f} TFLOP/s, {card.bandwidth / 1e12:.2g} TB/s" for card in CARDS
    )
    note = (
        "Estimates from counted operations and bytes, not measurements: one GPU, every text at the longest that the "
        f"recipe allows, {_percent(UTILISATION)} of the dense bfloat16 peak in training and prefill, "
        f"{_percent(BANDWIDTH_SHARE)} of the memory bandwidth in decoding ({cards}), {OVERHEAD / GIB:.0f} GiB beside "
        "what is counted. Downloads, evaluation and validation are not in them, nor the time to launch kernels, which "
        "a small model may wait for longer than for the kernels. –: does not fit."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


def _time(costs: Costs, card: Card) -> str:
    if costs.memory > card.memory_gib * GIB:
        return "–"
    minutes = costs.seconds(card) / 60
    return f"{minutes / 60:.1f} h" if minutes >= 60 else f"{math.ceil(minutes)} min"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(table(), end="")
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
