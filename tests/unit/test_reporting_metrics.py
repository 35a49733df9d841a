"""The merged metrics, and the identities that guard them."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from selfspec.errors import SelfspecError
from selfspec.reporting import metrics
from selfspec.reporting.errors import ReportError
from selfspec.reporting.inputs import InputPaths, read
from selfspec.reporting.measures import Estimate, Measures
from tests.unit.reporting_synthetic import write_inputs


@pytest.fixture
def paths(tmp_path: Path) -> InputPaths:
    write_inputs(tmp_path)
    return InputPaths.under(tmp_path / "reports")


def merged(paths: InputPaths) -> dict[str, float]:
    return metrics.merge(read(paths))


def change(path: Path, edit) -> None:
    table = pd.read_csv(path)
    edit(table)
    table.to_csv(path, index=False)


def test_acceptance_values_are_the_tables(paths):
    found = merged(paths)
    table = pd.read_csv(paths.accept)
    for row in table.to_dict("records"):
        prefix = f"accept.{row['domain']}" if row["source"] == "all" else f"accept.source.{row['source']}"
        prompts = prefix if row["mode"] == "teacher_forced" else f"{prefix}.{row['mode']}"
        if row["metric"] not in ("match", "overlap"):
            prefix += f".{row['mode']}"
        name = row["metric"] if row["metric"] == "tokens_per_round" else f"{row['metric']}_{row['depth']}"
        for end, column in (("", "value"), ("_low", "low"), ("_high", "high")):
            assert found[f"{prefix}.{name}{end}"] == row[column]
        assert found[f"{prompts}.prompts"] == row["prompts"]
        if row["metric"] == "tokens_per_round":
            counted = "anchors" if row["mode"] == "teacher_forced" else "rounds"
            assert found[f"{prefix}.{counted}"] == row["count"]


def test_benchmark_values_are_the_tables_and_best_k_is_one_setting_for_all_domains(paths):
    found = merged(paths)
    bench = pd.read_csv(paths.bench)
    overall = bench[(bench["domain"] == "all") & (bench["mode"] == "greedy") & (bench["method"] == "mtp")]
    best = overall.loc[overall["speedup"].idxmax()]
    for domain in ("chat", "maths", "code", "all"):
        assert found[f"bench.{domain}.greedy.best_k"] == best["num_drafts"]
        row = bench[
            (bench["domain"] == domain)
            & (bench["mode"] == "greedy")
            & (bench["method"] == "mtp")
            & (bench["num_drafts"] == best["num_drafts"])
        ].iloc[0]
        assert found[f"bench.{domain}.greedy.speedup"] == row["speedup"]
        assert found[f"bench.{domain}.greedy.speedup_low"] == row["speedup_low"]
    row = bench[(bench["domain"] == "code") & (bench["mode"] == "t0.5") & (bench["method"] == "prompt_lookup")].iloc[1]
    assert found["bench.code.t0.5.prompt_lookup_10.speedup"] == row["speedup"]
    ours, stock = (
        bench[(bench["engine"] == engine) & (bench["method"] == "vanilla")].iloc[0]["tokens_per_second"]
        for engine in ("selfspec", "transformers")
    )
    assert found["bench.chat.greedy.vanilla_tokens_per_second"] == ours
    assert found["bench.chat.greedy.stock_vanilla_tokens_per_second"] == stock
    first = [found[f"bench.chat.greedy.{name}"] for name in ("vanilla_first_token_ms", "k2.first_token_ms_high")]
    assert first == [41.5, 46.25]
    assert "bench.chat.greedy.stock_vanilla_first_token_ms" not in found


def test_training_takes_the_last_validation_and_data_sums_the_ledger(paths):
    found = merged(paths)
    table = pd.read_csv(paths.train_kl)
    row = table[(table["split"] == "validation") & (table["depth"] == 2)].sort_values("step").iloc[-1]
    assert found["train.kl.loss_2"] == row["loss"]
    assert found["train.kl.alpha_2"] == row["alpha"]
    assert found["data.train_tokens"] == 4 * 301_417
    assert found["data.completion_tokens"] == json.loads(paths.distill.read_text())["tokens"]
    assert found["data.draft_vocab_coverage"] == 0.9732
    assert found["accept.lossless.identical"] == 36


def test_divergences_are_counted_by_drafts(paths):
    found = merged(paths)
    assert [found[f"bench.divergence.k{count}.identical"] for count in (1, 2, 3, 4)] == [18, 17, 18, 18]
    names = ("prompts", "count", "largest_gap", "tolerance")
    assert [found[f"bench.divergence.{name}"] for name in names] == [18, 1, 0.1875, 0.5]
    facts = json.loads(paths.bench_facts.read_text())
    facts["divergence"] |= {"gaps": [], "largest_gap": None}
    paths.bench_facts.write_text(json.dumps(facts))
    found = merged(paths)
    assert found["bench.divergence.count"] == 0
    assert "bench.divergence.largest_gap" not in found


def test_written_file_reads_back_exactly(paths, tmp_path):
    found = merged(paths)
    metrics.write(found, tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text()) == found
    assert all(type(value) is float for value in found.values())


def test_every_key_is_documented_and_every_documented_key_exists(paths):
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.split("## metrics.json")[1].splitlines() if line.startswith("| `")]
    documented = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    parts = {"<mode>": r"(?:greedy|t[\d.]+)", "<d>": r"\d+", "<n>": r"\d+", "<K>": r"\d+"}
    patterns = {}
    for key in documented:
        pieces = re.split(r"(<\w+>)", key)
        patterns[key] = "".join(
            parts.get(piece, r"\w+") if piece.startswith("<") else re.escape(piece) for piece in pieces
        )
    keys = {re.sub(r"_(low|high)$", "", key) for key in merged(paths)}
    assert [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns.values())] == []
    assert [key for key, pattern in patterns.items() if not any(re.fullmatch(pattern, found) for found in keys)] == []


def test_an_empty_cell_has_no_key_and_no_nan(paths):
    change(paths.train_ce, lambda table: table.__setitem__("alpha", float("nan")))
    found = merged(paths)
    assert "train.ce.alpha_1" not in found
    assert "train.ce.loss_1" in found


def test_equal_speedups_choose_the_fewest_drafts():
    rows = pd.DataFrame(
        {"domain": "all", "mode": "greedy", "method": "mtp", "num_drafts": [3, 2, 1], "speedup": [1.4, 1.4, 1.1]}
    )
    assert metrics.best_drafts(rows) == {"greedy": 2}


def _first(table: pd.DataFrame, metric: str) -> int:
    return int(table.index[(table["metric"] == metric) & (table["mode"] == "greedy")][0])


@pytest.mark.parametrize("metric", ["outcome", "tokens_per_round", "cumulative"])
@pytest.mark.parametrize("shift", [1e-5, -1e-5, float("nan")])
def test_a_broken_acceptance_identity_is_one_line(paths, metric, shift):
    def edit(table: pd.DataFrame) -> None:
        table.loc[_first(table, metric), "value"] += shift

    change(paths.accept, edit)
    with pytest.raises(ReportError, match=r"^accept\.csv, chat/greedy: .*rerun the accept stage$") as caught:
        merged(paths)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SelfspecError)


def _of_source(table: pd.DataFrame, metric: str, mode: str = "t0.5") -> pd.Series:
    return (table["source"] == "synthetic_code") & (table["mode"] == mode) & (table["metric"] == metric)


@pytest.mark.parametrize("mode", ["t0.5", "teacher_forced"])
@pytest.mark.parametrize("metric", ["outcome", "tokens_per_round", "cumulative"])
def test_a_source_s_identities_are_held_too(paths, metric, mode):
    def edit(table: pd.DataFrame) -> None:
        table.loc[table.index[_of_source(table, metric, mode)][0], "value"] += 1e-5

    change(paths.accept, edit)
    where = re.escape(f"accept.csv, code/synthetic_code/{mode}: ")
    with pytest.raises(ReportError, match=rf"^{where}.*rerun the accept stage$"):
        merged(paths)


def test_a_source_without_a_full_round_claims_nothing(paths):
    def edit(table: pd.DataFrame) -> None:
        for metric in ("outcome", "cumulative", "accept", "tokens_per_round"):
            table.loc[_of_source(table, metric), ["value", "low", "high"]] = float("nan")
            table.loc[_of_source(table, metric), "count"] = 0

    change(paths.accept, edit)
    found = merged(paths)
    assert found["accept.source.synthetic_code.t0.5.rounds"] == 0
    assert "accept.source.synthetic_code.t0.5.tokens_per_round" not in found
    assert "accept.source.synthetic_code_late.t0.5.tokens_per_round" in found


def test_sources_are_not_taken_for_a_domain_or_a_mode(paths):
    table = pd.read_csv(paths.accept)
    table["source"] = table["source"].replace("synthetic_code", "greedy")
    table.to_csv(paths.accept, index=False)
    measures = Measures(merged(paths))
    assert measures.domains("accept") == ["chat", "maths", "code", "prose", "all"]
    assert measures.modes("accept") == ["greedy", "t0.5", "t1.0"]
    domains = ("chat", "code", "maths", "prose")
    named = {f"synthetic_{domain}{end}" for domain in domains for end in ("", "_late")}
    assert measures.sources() == sorted(named - {"synthetic_code"} | {"greedy"})


def test_rounding_noise_below_the_tolerance_passes(paths):
    change(paths.accept, lambda table: table.__setitem__("value", table["value"].round(8)))
    merged(paths)


def test_missing_outcome_rows_cannot_pass_for_a_check(paths):
    table = pd.read_csv(paths.accept)
    table[table["metric"] != "outcome"].to_csv(paths.accept, index=False)
    with pytest.raises(ReportError, match="no outcome rows"):
        merged(paths)


@pytest.mark.parametrize(("column", "name"), [("none_accepted", "first_accepted"), ("rest_share", "draft_share")])
def test_benchmark_shares_must_sum_to_one(paths, column, name):
    def edit(table: pd.DataFrame) -> None:
        table.loc[table.index[table["method"] == "mtp"][0], column] += 0.016  # 22.7 % + 75.7 % is 98.4 %

    change(paths.bench, edit)
    with pytest.raises(ReportError, match=rf"chat/greedy/mtp 1: {name} .* not 1; rerun the bench stage"):
        merged(paths)


def test_leaked_prompts_stop_the_report(paths):
    ledger = json.loads(paths.ledger.read_text())
    paths.ledger.write_text(json.dumps(ledger | {"heldout_in_training": ["a/1", "a/2"]}))
    with pytest.raises(ReportError, match="2 held-out prompts are in the training split"):
        merged(paths)


def test_faulty_inputs_name_the_file_and_the_remedy(paths):
    change(paths.bench, lambda table: table.pop("speedup_low"))
    with pytest.raises(ReportError, match=r"bench\.csv: lacks the columns speedup_low; docs/metrics\.md"):
        merged(paths)
    paths.bench.unlink()
    with pytest.raises(ReportError, match=r"bench\.csv: no such file; run `dvc repro`"):
        merged(paths)


def test_two_rows_for_one_key_are_refused(paths):
    table = pd.read_csv(paths.accept)
    duplicate = table[table["metric"] == "match"].head(1)
    pd.concat([table, duplicate]).to_csv(paths.accept, index=False)
    with pytest.raises(ReportError, match=r"accept\.chat\.match_1: two input rows"):
        merged(paths)


def test_measures_find_what_there_is_in_order(paths):
    measures = Measures(merged(paths))
    assert measures.domains("accept") == ["chat", "maths", "code", "prose", "all"]
    assert measures.domains("bench") == ["chat", "maths", "code", "all"]
    assert measures.modes("accept") == ["greedy", "t0.5", "t1.0"]
    assert measures.depths("accept") == [1, 2, 3]
    assert measures.depths("outcome") == [0, 1, 2, 3]
    assert measures.draft_counts() == [1, 2, 3, 4]
    assert measures.lookup_counts() == [3, 10]
    assert Measures({"a": 1.0, "a_low": 0.5, "a_high": 2.0}).get("a") == Estimate(1.0, 0.5, 2.0)
    assert Measures({"a": 1.0}).get("b") is None
