"""The model card says what metrics.json says, and nothing else."""

import json
import re
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
import yaml
from huggingface_hub import ModelCard

from selfspec.config import LossConfig
from selfspec.reporting import card, summary, text
from selfspec.reporting.measures import Estimate
from selfspec.reporting.report import LOSS_NAMES
from tests.unit.reporting_synthetic import write_inputs
from tests.unit.test_reporting_figures import SMALL, make_report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def rendered(report) -> str:
    return card.render(report)


def row_of(rendered: str, heading: str, name: str) -> list[str]:
    section = rendered.split(heading, 1)[1]
    line = next(line for line in section.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_benchmark_rows_are_the_metrics(report, rendered):
    found = report.measures.metrics
    for column, mode in enumerate(("greedy", "t0.5")):
        base = f"bench.all.{mode}"
        k = int(found[f"{base}.best_k"])
        low, value, high = (found[f"{base}.speedup{end}"] for end in ("_low", "", "_high"))
        expected = {
            "Drafts per round (K)": f"{k}",
            "Vanilla tok/s": f"{found[f'{base}.vanilla_tokens_per_second']:.1f}",
            "MTP tok/s": f"{found[f'{base}.k{k}.tokens_per_second']:.1f}",
            "Speedup, MTP / vanilla": f"{value:.2f} [{low:.2f}, {high:.2f}]",
            "Vanilla first token, ms": "41.50 [39.50, 44.50]",
            "MTP first token, ms": "43.25 [41.25, 46.25]",
            "First draft accepted": f"{100 * found[f'{base}.k{k}.first_accepted']:.1f} %",
            "All drafts accepted": f"{100 * found[f'{base}.k{k}.all_accepted']:.1f} %",
            "None accepted": f"{100 * found[f'{base}.k{k}.none_accepted']:.1f} %",
            "Prompts": f"{found[f'{base}.prompts']:.0f}",
        }
        for name, cell in expected.items():
            assert row_of(rendered, "## Benchmark", name)[column] == cell


def test_every_number_of_the_body_comes_from_the_run(report, rendered):
    """No figure is typed: each is a metric, rounded as tables round, or a parameter or fact of the run."""
    found = report.measures.metrics
    writers = (text.speed, text.count, text.decimal, text.millions, text.mebibytes)
    allowed = {written for value in found.values() for write in writers for written in numbers(write(value))}
    for value in found.values():
        allowed |= set(numbers(text.ratio(Estimate(value)))) | set(numbers(text.share(Estimate(value))))
    body = rendered.split("\n---\n", 1)[1].replace(summary.machine(report), "")
    body = body.replace(report.config.backbone.name, "").replace(report.config.backbone.license, "")
    # The hyper-parameters are checked against params.yaml by the next test, the pins against the ledger.
    body = body.split("## Training")[0] + body.split("## Size")[1]
    body = re.sub(r"pypi:\S+@[0-9a-f]{12}", "", body)
    for fixed in (
        "95 %",
        "T = 0.5",
        "T = 1.0",
        "drafts 1 to d",
        "float32",
        "sums to 100 %",
        "backbone: 1 plus",
        "bfloat16",
    ):
        body = body.replace(fixed, "")
    config = report.config
    lengths = (config.bench.max_new_tokens, config.accept.max_new_tokens)
    parameters = {str(number) for number in (*lengths, *report.measures.draft_counts(), *config.bench.lookup_tokens)}
    batch = {"1"}
    assert [number for number in numbers(body) if number not in allowed | parameters | batch] == []
    assert len(numbers(body)) > 300


def numbers(written: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", written)


def test_training_rows_are_the_parameters(report, rendered):
    config = report.config
    (head,) = row_of(rendered, "## Training", "head")
    assert head == f"shared, depths {config.head.depths}, depth decay {config.head.depth_decay:g}"
    (second,) = row_of(rendered, "## Training", "stage 2")
    assert f"eta {config.loss.eta:g}" in second
    assert f"learning rate {config.train_kl.learning_rate:g}" in second


def test_front_matter_holds_unrounded_results(report, rendered):
    data = ModelCard(rendered).data
    assert data.license == "apache-2.0"
    assert data.pipeline_tag == "text-generation"
    results = {(r.dataset_type.rsplit("-", 1)[1], r.metric_name): r.metric_value for r in data.eval_results}
    found = report.measures.metrics
    assert results["maths", "tokens per round, T = 0.5"] == found["accept.maths.t0.5.tokens_per_round"]
    k = report.measures.best_k("greedy")
    assert results["all", f"speedup, greedy, K = {k}"] == found["bench.all.greedy.speedup"]
    assert len(results) == 5 * 3 + 2


def test_card_is_the_same_twice_and_names_no_date(report, rendered):
    assert card.render(report) == rendered
    assert not re.search(r"20\d\d-\d\d", rendered)


@pytest.mark.parametrize(
    ("low", "high", "drafting", "words"),
    [
        (1.1, 1.3, "on", "faster than plain decoding"),
        (0.9, 1.3, "undecided", "no difference that these prompts can show"),
        (0.7, 0.9, "off", "slower than plain decoding, leave it off here"),
    ],
)
def test_the_verdict_follows_the_interval(tmp_path, low, high, drafting, words):
    write_inputs(tmp_path)
    path = tmp_path / "reports/bench.csv"
    bench = pd.read_csv(path)
    bench.loc[bench["method"] == "mtp", ["speedup", "speedup_low", "speedup_high"]] = [(low + high) / 2, low, high]
    bench.to_csv(path, index=False)
    report = reload(tmp_path)
    assert all(verdict.endswith(f"over 18 prompts: {words}.") for verdict in summary.verdicts(report.measures))
    assert [row[1] for row in summary.settings(report).rows] == [drafting, drafting]


def test_a_lossy_head_is_called_lossy(tmp_path):
    write_inputs(tmp_path)
    path = tmp_path / "reports/accept.json"
    path.write_text(path.read_text().replace('"identical": 36', '"identical": 35'))
    assert "**NOT LOSSLESS.** Greedy in float32: 35 of 36" in card.render(reload(tmp_path))


def test_domains_without_timing_are_named(rendered):
    assert "- Acceptance was measured, speed was not, for: prose." in rendered


def test_a_hub_backbone_is_the_base_model(tmp_path):
    write_inputs(tmp_path)
    path = tmp_path / "params.yaml"
    params = yaml.safe_load(path.read_text())
    params["report"]["base_model"] = "inherited/other"
    params["backbone"] |= {"uri": "hf:owner/model", "member": None, "sha256": None, "revision": "a" * 40}
    path.write_text(yaml.safe_dump(params))
    assert card.card_data(reload(tmp_path)).base_model == "owner/model"


def test_sources_show_each_pin_once_and_mark_what_was_held_out(tmp_path):
    write_inputs(tmp_path)
    path = tmp_path / "reports/ledger.json"
    ledger = json.loads(path.read_text())
    ledger["tokens"]["synthetic_code"].pop("train")
    ledger["revisions"]["synthetic_chat"] *= 2
    path.write_text(json.dumps(ledger))
    rendered = card.render(reload(tmp_path))
    assert row_of(rendered, "## Data", "synthetic_chat")[1:] == [
        "MIT",
        "301,417",
        "pypi:synthetic_chat-1.0-py3-none-any.whl@0123456789ab",
    ]
    assert row_of(rendered, "## Data", "synthetic_code")[2] == "none: held out"


def test_divergences_in_the_run_s_dtype_are_told(report, rendered, tmp_path):
    assert (
        "- Greedy in bfloat16: text identical to plain decoding in the same engine for 18 (K = 1), 17 (K = 2), "
        "18 (K = 3), 18 (K = 4) of 18 timed prompts; largest top-2 logit gap at a divergence: 0.188 (allowed: 0.500)."
    ) in rendered
    write_inputs(tmp_path)
    path = tmp_path / "reports/bench.json"
    facts = json.loads(path.read_text())
    facts["divergence"] |= {"gaps": [], "largest_gap": None}
    path.write_text(json.dumps(facts))
    assert summary.divergence(reload(tmp_path)).endswith("18 (K = 4) of 18 timed prompts.")


def test_each_source_has_its_row(report, rendered):
    found = report.measures.metrics
    for source in ("synthetic_code", "synthetic_code_late"):
        key = f"accept.source.{source}"
        prompts, first, *_, forced, tau = row_of(rendered, "### By source", source)
        assert forced == text.ratio(report.measures.get(f"{key}.teacher_forced.tokens_per_round"))
        assert prompts == f"{found[f'{key}.prompts']:.0f}"
        assert first == text.share(report.measures.get(f"{key}.match_1"))
        assert tau == text.ratio(report.measures.get(f"{key}.greedy.tokens_per_round"))
    assert found["accept.source.synthetic_code.prompts"] + found["accept.source.synthetic_code_late.prompts"] == 24


def test_chains_are_the_teacher_forced_metrics(report, rendered):
    get = report.measures.get
    prompts, *shares, tau = row_of(rendered, "### Chains", "code")
    assert prompts == "24"
    assert shares == [text.share(get(f"accept.code.teacher_forced.cumulative_{depth}")) for depth in (1, 2, 3)]
    assert tau == text.ratio(get("accept.code.teacher_forced.tokens_per_round"))


def test_a_tiny_run_has_a_card(tmp_path):
    rendered = card.render(make_report(tmp_path, **SMALL))
    assert "**greedy**" in rendered
    assert "look-up" not in rendered


def reload(folder: Path):
    from selfspec.config import load
    from selfspec.reporting.inputs import InputPaths
    from selfspec.reporting.report import load_report

    return load_report(InputPaths.under(folder / "reports"), load(folder / "params.yaml"))


def test_every_loss_has_words_for_its_figure():
    allowed = get_args(LossConfig.model_fields["name"].annotation)
    assert set(LOSS_NAMES) == set(allowed)
