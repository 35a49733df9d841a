"""The model card: Hub front matter and Markdown, made from the merged metrics and the parameters alone."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from selfspec.reporting import sources, summary, tables
from selfspec.reporting.measures import Measures, mode_name
from selfspec.reporting.report import Report

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"


def render(report: Report) -> str:
    """The card's text. No dates and no revisions of this repository, so the same run gives the same bytes."""
    measures = report.measures
    accept_modes, bench_modes = measures.modes("accept"), measures.modes("bench")
    card = ModelCard.from_template(
        card_data(report),
        template_path=str(TEMPLATE),
        name=model_name(report),
        backbone=report.config.backbone,
        verdicts=summary.verdicts(measures),
        backbone_note=summary.backbone(report),
        learned_from=sources.learned_from(report),
        lossless=summary.lossless(measures),
        divergence=summary.divergence(report),
        settings=summary.settings(report).markdown(),
        machine=summary.machine(report),
        benchmark=tables.benchmark(measures).markdown(),
        speedups=[(mode_name(mode), tables.speedup(measures, "mtp", mode).markdown()) for mode in bench_modes],
        tokens_per_round=tables.tokens_per_round(measures).markdown(),
        num_drafts=int(measures.metrics["accept.num_drafts"]),
        acceptance=[(mode_name(mode), tables.acceptance(measures, "accept", mode).markdown()) for mode in accept_modes],
        outcomes=[(mode_name(mode), tables.acceptance(measures, "outcome", mode).markdown()) for mode in accept_modes],
        match=tables.teacher_forced(measures, "match").markdown(),
        chains=tables.forced_chains(measures).markdown(),
        by_source=tables.by_source(measures).markdown(),
        data=sources.data(report).markdown(),
        completions=sources.completions(report).markdown(),
        training=sources.training(report).markdown(),
        sizes=sources.sizes(report).markdown(),
        limits=summary.limits(report),
    )
    return card.content.rstrip("\n") + "\n"


def model_name(report: Report) -> str:
    """What the card calls the head."""
    return f"{report.config.backbone.name} MTP head"


def card_data(report: Report) -> ModelCardData:
    """The front matter that the Hub reads: licence, base model, data sets, and results without rounding."""
    config = report.config
    hub_sets = [archive.uri for source in config.shard.sources for archive in source.archives]
    backbone = config.backbone.uri
    return ModelCardData(
        model_name=model_name(report),
        license=config.backbone.license.lower(),
        # A Hub backbone names itself: a recipe that changes the backbone must not inherit another's name.
        base_model=backbone.removeprefix("hf:") if backbone.startswith("hf:") else config.report.base_model,
        datasets=sorted({uri.removeprefix("hf:") for uri in hub_sets if uri.startswith("hf:")}) or None,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "multi-token-prediction", "selfspec"],
        eval_results=eval_results(report.measures),
    )


def eval_results(measures: Measures) -> list[EvalResult]:
    """Tokens per round by domain and mode, and the speedup over all domains, as the Hub's records."""
    found = []
    for domain in measures.domains("accept"):
        for mode in measures.modes("accept"):
            value = measures.number(f"accept.{domain}.{mode}.tokens_per_round")
            if value is not None:
                found.append(_result(domain, "tokens_per_round", f"tokens per round, {mode_name(mode)}", value))
    for mode in summary.recommended_modes(measures):
        name = f"speedup, {mode_name(mode)}, K = {measures.best_k(mode)}"
        found.append(_result("all", "speedup", name, measures.metrics[f"bench.all.{mode}.speedup"]))
    return found


def _result(domain: str, metric: str, name: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=f"selfspec-heldout-{domain}",
        dataset_name=f"held-out prompts, {domain}",
        metric_type=metric,
        metric_name=name,
        metric_value=float(value),
    )
