"""Tables of what the head was trained on and how."""

from __future__ import annotations

from selfspec.config import HeadConfig, SharedTrainConfig, TrainConfig
from selfspec.reporting import text
from selfspec.reporting.measures import order_domains
from selfspec.reporting.report import Report
from selfspec.reporting.text import Table


def data(report: Report) -> Table:
    """A row a source of the mixture: domain, licence, training tokens, pins (each once)."""
    licenses = report.inputs.ledger["licenses"]
    domains = {source.name: source.domain for source in report.config.shard.sources}
    rows = [
        [
            name,
            domains.get(name, text.MISSING),
            licenses[name],
            _tokens(report.measures.number(f"data.source.{name}.train_tokens")),
            ", ".join(dict.fromkeys(map(_short, report.inputs.ledger["revisions"].get(name, [])))),
        ]
        for name in sorted(licenses)
    ]
    return Table(["source", "domain", "licence", "training tokens", "pinned as"], rows, prose=True)


def _tokens(count: float | None) -> str:
    return text.count(count) if count else "none: held out"


def _short(revision: str) -> str:
    """``uri@pin`` with the pin cut to 12 characters, as version-control tools print it."""
    uri, _, pin = revision.rpartition("@")
    return f"{uri}@{pin[:12]}" if uri else revision


def learned_from(report: Report) -> str:
    """What the texts of ``completions`` are."""
    if report.config.distill.text == "corpus":
        return "The head learned from these documents as they are (the prompts are their first tokens):"
    license_ = report.config.backbone.license
    return f"The backbone ({license_}) completed these prompts itself, and the head learned from its own words:"


def completions(report: Report) -> Table:
    """A row a domain: prompts that the backbone completed for training, and the tokens it wrote."""
    measures = report.measures
    rows = [
        [
            domain,
            text.count(measures.number(f"data.{domain}.prompts")),
            text.count(measures.number(f"data.{domain}.completion_tokens")),
        ]
        for domain in order_domains(report.inputs.distill["domains"])
    ]
    return Table(["domain", "prompts", "completion tokens"], rows)


def sizes(report: Report) -> Table:
    """Parameters and memory of the head beside the backbone's."""
    number = report.measures.number
    rows = [
        [
            name,
            text.millions(number(f"bench.{part}_parameters")),
            text.mebibytes(number(f"bench.{part}_mib")),
        ]
        for part, name in (("backbone", "backbone"), ("head", "head"))
    ]
    rows.append(["peak of the timed run", text.MISSING, text.mebibytes(number("bench.peak_memory_mib"))])
    return Table(["", "parameters", "memory"], rows)


def training(report: Report) -> Table:
    """The hyper-parameters, as params.yaml has them."""
    config = report.config
    head, loss = config.head, config.loss
    # Only what the loss reads.
    settings = {
        "lk_hybrid": f", eta {loss.eta:g}, lambda by {loss.lambda_scope}",
        "kl": f", temperature {loss.temperature:g}",
    }
    stage_two = loss.name + settings.get(loss.name, "")
    rows = [
        ["head", f"{head.type}, depths {head.depths}, depth decay {head.depth_decay:g}{_variant(head)}"],
        ["both stages", _shared(config.train)],
        ["stage 1", f"cross-entropy; {_schedule(config.train_ce)}"],
        ["stage 2", f"{stage_two}, cross-entropy weight {loss.ce_weight:g}; {_schedule(config.train_kl)}"],
        ["seed", str(config.seed)],
    ]
    return Table(["", "setting"], rows, prose=True)


def _variant(head: HeadConfig) -> str:
    """The options of the type that are not at their defaults."""
    defaults = {name: field.default for name, field in type(head).model_fields.items()}
    changed = {name: value for name, value in head.options.items() if getattr(head, name) != defaults[name]}
    return "".join(f", {name} {value}" for name, value in changed.items())


def _shared(train: SharedTrainConfig) -> str:
    parts = [f"{train.data_fraction:.0%} of the training texts"]
    if train.on_policy:
        parts.append(f"own drafts as inputs with chance {train.on_policy:g}")
    if train.unfrozen_layers:
        parts.append(
            f"backbone's last {train.unfrozen_layers} layers unfrozen, learning rate "
            f"{train.backbone_learning_rate:g}, main loss weight {train.main_weight:g}"
        )
    else:
        parts.append("frozen backbone")
    return "; ".join(parts)


def _schedule(train: TrainConfig) -> str:
    return (
        f"{train.epochs:g} epochs, {train.batch_sequences} sequences a step, learning rate {train.learning_rate:g} "
        f"({train.schedule}), {train.dtype}"
    )
