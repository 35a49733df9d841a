"""What ``tools.cotraining`` measures of its two rows, and how it is written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from selfspec.acceptance import ratio, resample_weights
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import heldout
from selfspec.benchmark.heldout import ALL
from selfspec.distill.records import Completion
from selfspec.heads import checkpoint
from tools import tables
from tools.cotraining_costs import Costs

COLUMNS = ["row", "domain", "metric", "depth", "value", "low", "high", "prompts"]
METRICS = ("match", "tokens_per_round")
TEACHER, TRAINING = "teacher", "training"
_ROWS = 128  # positions whose logits are alive at once
_STYLES = (("#0072b2", "o"), ("#d55e00", "s"))  # colour and marker by row

Cells = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Scored:
    """What a model says along the texts' completions.

    Attributes:
        choices: by text, its argmax at every position that scores a token of the completion.
        losses: ``[texts]`` negative log-likelihood of the completions, in nats.
    """

    choices: list[Tensor]
    losses: np.ndarray

    @classmethod
    @torch.inference_mode()
    def of(cls, decoder: Decoder, texts: Sequence[Completion], name: str) -> Scored:
        choices, losses = [], []
        for text in tqdm(texts, desc=name, unit="prompt", mininterval=2):
            _, (hidden,) = decoder.prefill([text.tokens], text.length)
            targets = torch.tensor(text.completion_ids, device=hidden.device)
            best, loss = [], 0.0
            for states, wanted in zip(
                hidden[len(text.prompt_ids) - 1 : -1].split(_ROWS), targets.split(_ROWS), strict=True
            ):
                logits = decoder.logits(states).float()
                best.append(logits.argmax(-1))
                loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
            choices.append(torch.cat(best).cpu())
            losses.append(loss)
        return cls(choices, np.array(losses))


def measure(
    teacher: PreTrainedModel,
    student: Callable[[], PreTrainedModel],
    folders: Mapping[str, Path],
    groups: Mapping[str, Sequence[Completion]],
    samples: int,
    seed: int,
) -> Cells:
    """Figures on held-out texts by row; the teacher's are the last.

    - ``match``, ``tokens_per_round``: of the head against the argmax of its own student (``heldout.forced_rows``)
    - ``agreement``: share of completion positions where student and teacher have the same argmax
    - ``perplexity``: of the completions

    Args:
        student: makes one as it was before training.
        folders: with trained weights of a student and head, by the row's name.
        groups: held-out texts by domain.
    """
    texts = [text for group in groups.values() for text in group]
    reference = Scored.of(Decoder(teacher), texts, TEACHER)
    cells: Cells = {}
    for name, folder in folders.items():
        model = student()
        head = checkpoint.load(folder, model)
        decoder = Decoder(model, middle_layers=head.module.middle_layers)
        forced = heldout.forced_rows(decoder, head, groups, head.module.depths, samples, seed)
        drafted = [asdict(row) for row in forced if row.source == ALL and row.metric in METRICS]
        own = _quality(Scored.of(decoder, texts, name), reference, texts, samples, seed)
        cells[name] = [*drafted, *own]
    of_teacher = _quality(reference, reference, texts, samples, seed)
    cells[TEACHER] = [cell for cell in of_teacher if cell["metric"] == "perplexity"]
    return cells


def _quality(
    scored: Scored, reference: Scored, texts: Sequence[Completion], samples: int, seed: int
) -> list[dict[str, Any]]:
    """Agreement with the teacher, and perplexity, by domain and over all."""
    same = [float((own == its).sum()) for own, its in zip(scored.choices, reference.choices, strict=True)]
    agreed, positions = np.array(same), np.array([float(len(choices)) for choices in scored.choices])
    cells = []
    for (domain, source), members in heldout.grouped(texts).items():
        if source != ALL:
            continue
        weights = resample_weights(len(members), samples, seed)
        agreement = asdict(ratio(agreed[members], positions[members], weights))
        loss = asdict(ratio(scored.losses[members], positions[members], weights))
        perplexity = loss | {end: math.exp(loss[end]) for end in ("value", "low", "high")}
        for metric, figures in (("agreement", agreement), ("perplexity", perplexity)):
            cells.append({"domain": domain, "metric": metric, "depth": 0, **figures})
    return cells


def write(cells: Cells, costs: Mapping[str, Costs], facts: Mapping[str, str], folder: Path) -> str:
    """Write ``cotraining.csv``, ``cotraining.md`` and ``cotraining.png`` into ``folder``; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    # Rounded once, so that page and table never round a tie to different sides.
    cells = {
        name: [{**cell, **{end: f"{cell[end]:.10g}" for end in ("value", "low", "high")}} for cell in own]
        for name, own in cells.items()
    }
    lines = [{"row": name, **cell} for name, own in cells.items() for cell in own]
    for name, cost in costs.items():
        lines += [
            {"row": name, "domain": TRAINING, "metric": metric, "depth": 0, "value": f"{value:.10g}"}
            for metric, value in asdict(cost).items()
        ]
    tables.write_csv(folder / "cotraining.csv", COLUMNS, lines)
    text = page(cells, costs, facts)
    (folder / "cotraining.md").write_text(text)
    figure({name: own for name, own in cells.items() if name in costs}, folder / "cotraining.png")
    return text


def page(cells: Cells, costs: Mapping[str, Costs], facts: Mapping[str, str]) -> str:
    """What was compared, a table a domain, what each row cost, and every setting."""
    together, after = costs.values()
    more = after.operations / together.operations - 1  # above 0: it does all that the other does, and reads once more
    lines = [
        "# Co-trained and post-hoc heads",
        "",
        "One student, distilled from its teacher, and heads with the same initial weights, on the same texts in the",
        "same order. **co-trained**: student and heads are trained together, on the loss of distillation plus lambda",
        "times that of the heads, whose gradient reaches the student. **post-hoc**: the student is distilled first and",
        "sees the texts without heads; then it is frozen and the heads are trained on it, on as many tokens.",
        "",
        "Held-out prompts, teacher-forced on the completions that the teacher wrote. *match* and *tokens per round*",
        "compare each row's drafts with the argmax of that row's own student, so the two students may differ in how",
        "hard they are to draft for. *agreement* is the share of completion positions where a student's argmax is the",
        "teacher's, *perplexity* is of those completions: a student that is easier to draft for but worse shows there.",
        *tables.by_domain(["row"], [([name], own) for name, own in cells.items()]),
        "",
        "In brackets: 95 % bootstrap intervals, over prompts only. One seed was run; what another one, other data or",
        "other learning rates would change is not in them. The system that the comparison is taken from claims 94.2 %",
        "accepted co-trained against 87.3 % post-hoc (docs/systems.md, D), for its own models and texts.",
        "",
        "## What each row cost",
        "",
        f"| | {' | '.join(costs)} |",
        "| --- |" + " ---: |" * len(costs),
    ]
    for name in asdict(together):
        values = [
            f"{getattr(cost, name):,.3g}" if name == "operations" else f"{getattr(cost, name):,}"
            for cost in costs.values()
        ]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(values)} |")
    lines += [
        "",
        f"By these operations, post-hoc took {100 * more:.1f} % more than co-trained: its student reads all once more,",
        "forward only. They are counted from the shapes of weights, not measured. Gradients are clipped by their norm",
        "over all that a training trains: heads and student share that limit in co-training, and else have it alone.",
        "",
        "## Settings",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {fact} |" for name, fact in facts.items()),
    ]
    return "\n".join(lines) + "\n"


def figure(cells: Cells, path: Path) -> None:
    """Match by depth of every row, a panel a domain, with intervals."""
    domains = tables.domains(next(iter(cells.values())))
    made, axes = plt.subplots(1, len(domains), figsize=(2.4 * len(domains) + 1, 3), sharey=True, squeeze=False)
    for axis, domain in zip(axes[0], domains, strict=True):
        for number, ((name, own), (colour, marker)) in enumerate(zip(cells.items(), _STYLES, strict=True)):
            chosen = [cell for cell in own if cell["domain"] == domain and cell["metric"] == "match"]
            values, reach = tables.bars(chosen)
            aside = 0.12 * (number - 0.5)  # so that one row's interval does not hide the other's
            depths = [cell["depth"] + aside for cell in chosen]
            axis.errorbar(depths, values, yerr=reach, marker=marker, color=colour, capsize=3, label=name)
        axis.set(title=domain, xlabel="depth")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0][0].set_ylabel("match with the row's student")
    axes[0][0].legend(frameon=False)
    made.tight_layout()
    made.savefig(path, dpi=150)
    plt.close(made)
