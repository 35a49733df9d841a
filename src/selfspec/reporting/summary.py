"""What the first screen says: whether to switch the head on, with which settings, and what limits that."""

from __future__ import annotations

from selfspec.reporting import text
from selfspec.reporting.measures import Measures, mode_name
from selfspec.reporting.report import Report
from selfspec.reporting.text import Table


def recommended_modes(measures: Measures) -> list[str]:
    """Modes for which a best K was measured."""
    return [mode for mode in measures.modes("bench") if measures.best_k(mode) is not None]


def verdicts(measures: Measures) -> list[str]:
    """One sentence a mode: the speedup at the best K, and what its interval allows to conclude."""
    return [_verdict(measures, mode) for mode in recommended_modes(measures)]


def _verdict(measures: Measures, mode: str) -> str:
    name = mode_name(mode)
    return (
        f"{name[0].upper()}{name[1:]}, K = {measures.best_k(mode)}: speedup "
        f"{text.ratio(measures.get(f'bench.all.{mode}.speedup'))} over "
        f"{text.count(measures.number(f'bench.all.{mode}.prompts'))} prompts: {_conclusion(measures, mode)[1]}."
    )


def _conclusion(measures: Measures, mode: str) -> tuple[str, str]:
    """``on``, ``off`` or ``undecided``, and why: the interval has to lie clear of 1."""
    estimate = measures.get(f"bench.all.{mode}.speedup")
    if estimate is None or estimate.low is None or estimate.high is None:
        return "undecided", "no interval, so no conclusion"
    if estimate.low > 1.0:
        return "on", "faster than plain decoding"
    if estimate.high < 1.0:
        return "off", "slower than plain decoding, leave it off here"
    return "undecided", "no difference that these prompts can show"


def machine(report: Report) -> str:
    """The machine of the timed run, in one line."""
    facts = report.inputs.bench_facts["machine"]
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts['threads']} threads used), "
        f"{facts['memory_gib']:.1f} GiB, {facts['platform']}, Python {facts['python']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {report.inputs.bench_facts['dtype']}"
    )


def settings(report: Report) -> Table:
    """The settings to use, a row a mode: what the recommended figures were measured with."""
    rows = [
        [
            mode_name(mode),
            _conclusion(report.measures, mode)[0],
            str(report.measures.best_k(mode)),
            report.inputs.bench_facts["dtype"],
            "1",
        ]
        for mode in recommended_modes(report.measures)
    ]
    return Table(["decoding", "drafting", "K", "dtype", "batch"], rows)


def lossless(measures: Measures) -> str:
    """The outcome of the float32 identity check, in one sentence."""
    names = ("identical", "prompts", "tokens")
    identical, prompts, tokens = (measures.number(f"accept.lossless.{name}") for name in names)
    if not prompts:
        return "Losslessness was not checked in this run."
    line = (
        f"Greedy in float32: {text.count(identical)} of {text.count(prompts)} held-out prompts "
        f"({text.count(tokens)} tokens) came out token-identical to stock `generate`"
    )
    return (
        f"{line}." if identical == prompts else f"**NOT LOSSLESS.** {line}; do not use this head before that is mended."
    )


def backbone(report: Report) -> str:
    """Whether the backbone was trained too, and what that did to it."""
    layers = report.config.train.unfrozen_layers
    if not layers:
        return "The backbone's weights are untouched."
    shown = []
    for name, what in (("perplexity_before", "before"), ("perplexity_after", "after")):
        value, low, high = (report.measures.number(f"accept.drift.{name}{end}") for end in ("", "_low", "_high"))
        shown.append(f"{text.decimal(value)} [{text.decimal(low)}, {text.decimal(high)}] {what}")
    same, prompts = (report.measures.number(f"accept.drift.exact_match{end}") for end in ("", "_texts"))
    return (
        f"**The backbone was trained too**: its last {layers} layers, final norm and lm_head, so all of this is about "
        f"the changed model. Held-out perplexity: {', '.join(shown)}; greedy completions that stayed the same: "
        f"{text.MISSING if same is None else f'{same:.0%}'} of {text.count(prompts)} held-out prompts."
    )


def divergence(report: Report) -> str:
    """How often the timed greedy texts equal plain decoding's in the run's own dtype, in one sentence."""
    number = report.measures.number
    identical = ", ".join(
        f"{text.count(same)} (K = {drafts})"
        for drafts in report.measures.draft_counts()
        if (same := number(f"bench.divergence.k{drafts}.identical")) is not None
    )
    line = (
        f"Greedy in {report.inputs.bench_facts['dtype']}: text identical to plain decoding in the same engine for "
        f"{identical} of {text.count(number('bench.divergence.prompts'))} timed prompts"
    )
    largest = number("bench.divergence.largest_gap")
    if largest is None:
        return f"{line}."
    allowed = text.decimal(number("bench.divergence.tolerance"))
    return f"{line}; largest top-2 logit gap at a divergence: {text.decimal(largest)} (allowed: {allowed})."


def limits(report: Report) -> list[str]:
    """What the figures do not show, from the run's own numbers."""
    measures, config = report.measures, report.config
    found = [
        "Speeds are from one run on the machine named above, one sequence at a time. The ratios carry over to "
        "other hardware only roughly; larger batches gain less, because rejected drafts then cost more.",
        "K was chosen on the same prompts that its speedup is reported on, which flatters it a little.",
        f"The timed runs decode at most {config.bench.max_new_tokens} tokens a prompt, the acceptance runs "
        f"{config.accept.max_new_tokens}.",
    ]
    coverage = measures.number("data.draft_vocab_coverage_heldout")
    size, vocabulary = (measures.number(f"data.{name}") for name in ("draft_vocab_size", "vocab_size"))
    if coverage is not None and size is not None and vocabulary is not None and size < vocabulary:
        found.append(
            f"The head scores {text.count(size)} of {text.count(vocabulary)} tokens, which cover "
            f"{100 * coverage:.1f} % of the held-out completion tokens; the others can never be drafted."
        )
    if measures.lookup_counts():
        found.append(
            "Prompt look-up runs in stock transformers and is measured against that engine's own plain decoding: "
            "compare the speedups, not the speeds."
        )
    untimed = [domain for domain in measures.domains("accept") if domain not in measures.domains("bench")]
    if untimed:
        found.append(f"Acceptance was measured, speed was not, for: {', '.join(untimed)}.")
    return found
