"""The shard stage on small sources: proportions, splits, duplicates, overlap, determinism, faults."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from selfspec import config as configuration
from selfspec.config import ConfigError, ShardConfig
from selfspec.corpus import shards
from selfspec.corpus.build import build, interleaved
from selfspec.corpus.ledger import write
from selfspec.corpus.mixture import Mixture
from selfspec.corpus.overlap import HeldoutIndex, shared_ngrams
from selfspec.corpus.records import CorpusError, Record
from selfspec.corpus.shards import iter_split, read_split
from selfspec.resources import ResourceError
from tests.unit import tiny
from tests.unit.hub_server import COMMIT, serve

ROOT = Path(__file__).parents[2]
SIZES = {
    "max_train_tokens": 20000,
    "chunk_tokens": 128,
    "probe_records": 50,
    "shuffle_buffer": 50,
    "records_per_shard": 100,
    "validation_fraction": 0.05,
    "heldout_fraction": 0.1,
    "max_eval_records": 30,
    "ngram": 13,
    "max_shared_ngrams": 0,
}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    """`datasets` waits five seconds whenever a parquet stream ends, for the sake of remote files."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def _word(*key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:5]


def _text(source: str, row: int, words: int) -> str:
    return " ".join(_word(source, row, place) for place in range(words))


def _source(name: str, weight: float, **more: object) -> dict:
    fields = {"loader": "dataset", "kind": "corpus", "domain": "prose", "split": "hash", "license": "MIT"}
    return {**fields, "name": name, "weight": weight, "archives": [{"uri": f"file:{name}*.jsonl"}], **more}


def _config(*sources: dict, **more: object) -> ShardConfig:
    return ShardConfig.model_validate({**SIZES, "sources": list(sources), **more})


def _write(root: Path, name: str, rows: list[dict]) -> None:
    (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Three data sets with the columns of FineWeb-Edu, open-web-math and CodeSearchNet."""
    root = tmp_path_factory.mktemp("hub")
    fineweb = [{"text": _text("f", i, 60), "id": str(i), "url": f"http://f/{i}", "score": 3.0} for i in range(400)]
    maths = [{"url": f"http://m/{i}", "text": _text("m", i, 20), "date": "2023"} for i in range(600)]
    code = [
        {"repository_name": f"org/repo{i % 40}", "whole_func_string": _text("c", i, 10), "language": "python"}
        for i in range(1500)
    ]
    for name, rows in {"fineweb_edu": fineweb, "open_web_math": maths, "code_search_net": code}.items():
        half = len(rows) // 2
        pd.DataFrame(rows[:half]).to_parquet(root / f"{name}-00000-of-00002.parquet")
        pd.DataFrame(rows[half:]).to_parquet(root / f"{name}-00001-of-00002.parquet")
    return root


def _recipe() -> dict:
    return yaml.safe_load((ROOT / "recipes/data/qwen2.5-mixture.yaml").read_text())["shard"]


def _local_recipe() -> ShardConfig:
    """The recipe's own sources, options and weights; only where the bytes lie is changed."""
    hub_sources = [source for source in _recipe()["sources"] if source["loader"] == "dataset"]
    for source in hub_sources:
        source["archives"] = [{"uri": f"file:{source['name']}*.parquet"}]
        source["options"].pop("config", None)
    return _config(*hub_sources)


def test_the_three_source_recipe_streams_in_its_token_shares(hub, tmp_path, tokenizer):
    config = _local_recipe()
    ledger = build(config, tokenizer, 7, tmp_path / "shards", hub)
    tokens = {source: splits["train"] for source, splits in ledger["tokens"].items()}
    total = sum(tokens.values())
    assert total >= 20000 * 0.99
    shares = {source: count / total for source, count in tokens.items()}
    wanted = {"fineweb_edu": 0.45, "open_web_math": 0.20, "code_search_net": 0.35}
    assert shares == pytest.approx(wanted, abs=0.04)
    train, heldout = read_split(tmp_path / "shards", "train"), read_split(tmp_path / "shards", "heldout")
    assert set(train.domain) == {"prose", "maths", "code"}
    assert train.id.is_unique
    # repositories stay whole, though their functions come in any order
    assert not set(train.group) & set(heldout.group)
    assert any(group.startswith("repository_name/org/repo") for group in heldout.group)
    for source, splits in ledger["records"].items():
        for split, count in splits.items():
            rows = read_split(tmp_path / "shards", split)
            assert (rows.source == source).sum() == count


def test_the_recipe_runs_against_a_hub(hub, tmp_path):
    """The recipe as it is but for revisions and sizes: names, configurations and columns, over HTTP."""
    files = {
        "HuggingFaceFW/fineweb-edu": ("fineweb_edu", "sample/10BT/*", "sample-10BT"),
        "open-web-math/open-web-math": ("open_web_math", "data/*", "default"),
        "code-search-net/code_search_net": ("code_search_net", "all/*", "all"),
    }
    for repository, (name, pattern, configuration_name) in files.items():
        folder = (tmp_path / "hub" / repository / pattern).parent
        folder.mkdir(parents=True)
        for path in hub.glob(f"{name}*"):
            shutil.copy(path, folder)
        card = {"configs": [{"config_name": configuration_name, "data_files": [{"split": "train", "path": pattern}]}]}
        (tmp_path / "hub" / repository / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["backbone"] |= {"uri": f"file:{tiny.save(tmp_path / 'backbone')}", "member": None, "sha256": None}
    raw["shard"] |= SIZES | {
        "max_train_tokens": 60000,
        "sources": [s for s in _recipe()["sources"] if s["loader"] == "dataset"],
    }
    for source in raw["shard"]["sources"]:
        source["archives"][0]["revision"] = COMMIT
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw))
    with serve(tmp_path / "hub") as (endpoint, log):
        run = _stage(tmp_path, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "home"))
    assert run.returncode == 0, run.stderr
    ledger = json.loads((tmp_path / "reports" / "ledger.json").read_text())
    tokens = {source: splits["train"] for source, splits in ledger["tokens"].items()}
    shares = {source: count / sum(tokens.values()) for source, count in tokens.items()}
    assert shares == pytest.approx({"fineweb_edu": 0.45, "open_web_math": 0.20, "code_search_net": 0.35}, abs=0.04)
    assert ledger["revisions"]["open_web_math"] == [f"hf:open-web-math/open-web-math@{COMMIT}"]
    assert any("resolve" in line and line.endswith(".parquet") for line in log)
    assert not list((tmp_path / "home").rglob("*.parquet"))  # streamed, not downloaded


def _stage(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the shard stage in ``folder`` as `dvc repro` does, less the pause of `_no_pause`."""
    code = (
        "import datasets, runpy; datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0; "
        "runpy.run_module('stages.shard', run_name='__main__', alter_sys=True)"
    )
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "0", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def test_the_recipe_is_pinned_and_holds_out_what_the_default_does():
    default = yaml.safe_load((ROOT / "params.yaml").read_text())
    held = [source for source in _recipe()["sources"] if source["split"] == "heldout"]
    assert held == [source for source in default["shard"]["sources"] if source["split"] == "heldout"]
    raw = {**default, "shard": {**default["shard"], **_recipe()}}
    weights = [source.weight for source in configuration.parse(raw).shard.sources]
    assert weights == [0.45, 0.2, 0.35, 0, 0, 0, 0]
    for source in raw["shard"]["sources"][:3]:
        source["archives"][0]["revision"] = None
    with pytest.raises(ConfigError) as error:
        configuration.parse(raw)
    assert str(error.value).count("revision: got null; allowed: a commit sha of hf:") == 3


def test_the_default_catalogue_is_coherent():
    shard = configuration.load(ROOT / "params.yaml").shard
    assert sum(source.weight for source in shard.sources) == pytest.approx(1.0)
    for domain in ("chat", "maths", "code"):
        assert sum(s.domain == domain and s.weight > 0 for s in shard.sources) >= 2
        assert any(s.domain == domain and s.split == "heldout" for s in shard.sources)
    templates = {s.name: s.options["templates"] for s in shard.sources if s.loader == "gsm_symbolic"}
    assert templates == {"gsm_symbolic": [0, 79], "gsm_symbolic_heldout": [80, 99]}


def test_same_parameters_same_bytes(hub, tmp_path, tokenizer):
    def digest(folder: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.*"))}

    for name, seed in {"first": 7, "second": 7, "other": 8}.items():
        write(build(_local_recipe(), tokenizer, seed, tmp_path / name / "shards", hub), tmp_path / name / "ledger.json")
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    assert digest(tmp_path / "first") != digest(tmp_path / "other")
    split = {row["group"]: "train" for row in iter_split(tmp_path / "first" / "shards", "train")}
    assert not set(split) & set(read_split(tmp_path / "other" / "shards", "heldout").group)  # seeds leave splits alone
    assert len(list((tmp_path / "first" / "shards").glob("train-*.parquet"))) >= 3


def test_an_exhausted_source_stops_no_other_and_is_not_repeated(tmp_path, tokenizer):
    _write(tmp_path, "small", [{"text": _text("s", i, 10)} for i in range(6)])
    _write(tmp_path, "large", [{"text": _text("l", i, 10)} for i in range(200)])
    mixture = Mixture(_config(_source("small", 0.5), _source("large", 0.5)), tokenizer, 0, tmp_path)
    assert mixture.probabilities == pytest.approx([0.5, 0.5], abs=0.05)
    ids = [record.id for record in mixture]
    assert len(ids) == len(set(ids)) == 206
    assert all(identifier.startswith("large/") for identifier in ids[-50:])


def test_duplicates_and_overlap_are_dropped_and_counted(tmp_path, tokenizer):
    held = [{"prompt": f"{_text('h', i, 20)}?"} for i in range(4)]
    rows = [{"text": _text("t", i, 20)} for i in range(80)]
    rows += [{"text": rows[0]["text"].upper()}, {"text": f"  {rows[1]['text']}"}]  # exact duplicates
    rows += [{"text": f"as asked: {_text('h', 2, 13)} and so on"}, {"text": f"short: {_text('h', 3, 12)}"}]
    _write(tmp_path, "corpus", rows)
    _write(tmp_path, "questions", held)
    config = _config(
        _source("corpus", 1.0, split="train"),
        _source("questions", 0.0, split="heldout", kind="prompt", options={"text": "prompt"}),
        heldout_fraction=0.0,
        validation_fraction=0.0,
    )
    ledger = build(config, tokenizer, 0, tmp_path / "shards", tmp_path)
    assert ledger["exact_duplicates"] == 2
    assert ledger["dropped_overlap"] == {"corpus": 1}
    assert ledger["records"] == {"corpus": {"train": 81}, "questions": {"heldout": 4}}
    ((found,), after) = (ledger["heldout"], ledger["max_overlap_after"])
    assert (found["shared_ngrams_before"], found["shared_ngrams_after"], after) == (1, 0, 0)
    assert ledger["heldout_in_training"] == []
    heldout = read_split(tmp_path / "shards", "heldout")
    assert {json.loads(messages)[0]["content"] for messages in heldout.messages} == {row["prompt"] for row in held}
    assert list(read_split(tmp_path / "shards", "validation").columns) == list(shards.FIELDS)  # empty, but there
    index = HeldoutIndex.from_shards(tmp_path / "shards", 13)
    assert shared_ngrams(f"So: {held[2]['prompt']}", index) == 8
    assert not any(shared_ngrams(text, index) for text in read_split(tmp_path / "shards", "train").text)


def test_held_out_groups_are_dropped_from_prompts_over_the_same_documents(tmp_path, tokenizer):
    rows = [{"text": _text("d", i, 12), "page": f"p{i % 30}"} for i in range(120)]
    _write(tmp_path, "pages", rows)
    _write(tmp_path, "asked", [{"text": f"Q {_text('q', i, 12)}", "page": f"p{i % 30}"} for i in range(120)])
    options = {"group": "page"}
    config = _config(
        _source("pages", 0.5, options=options), _source("asked", 0.5, kind="prompt", split="train", options=options)
    )
    build(config, tokenizer, 0, tmp_path / "shards", tmp_path)
    groups = {split: set(read_split(tmp_path / "shards", split).group) for split in configuration.SPLITS}
    assert len(groups["heldout"]) >= 1
    assert not groups["heldout"] & (groups["train"] | groups["validation"])
    assert not groups["validation"] & groups["train"]
    assert set(read_split(tmp_path / "shards", "heldout").source) == {"pages"}


def test_interleaved_pools_alternate_between_sources():
    def record(source: str, number: int) -> Record:
        return Record(f"{source}/{number}", source, "prompt", "maths", "g", "", "[]", "MIT")

    pools = {name: [record(name, i) for i in range(size)] for name, size in {"a": 3, "b": 30, "c": 9}.items()}
    found = interleaved(pools, seed=1)
    assert Counter(row.source for row in found[:9]) == {"a": 3, "b": 3, "c": 3}
    assert Counter(row.source for row in found) == {"a": 3, "b": 30, "c": 9}
    assert found == interleaved(pools, seed=1) != interleaved(pools, seed=2)


def test_conversations_end_with_the_last_user_turn(tmp_path, tokenizer):
    turns = [{"role": role, "content": f"{role} says {role}"} for role in ("user", "assistant", "user", "assistant")]
    _write(tmp_path, "talk", [{"turns": turns}, {"turns": turns[1:2]}])
    config = _config(_source("talk", 1.0, kind="prompt", options={"messages": "turns"}))
    (record,) = Mixture(config, tokenizer, 0, tmp_path)
    assert [turn["role"] for turn in json.loads(record.messages)] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_source("absent", 1.0), r"file:absent\*\.jsonl: 0 files at .*; allowed: a pattern that matches \.parquet"),
        (_source("rows", 1.0, options={"text": "body"}), r"rows\.options: .* has no column 'body'; it has text, page"),
        (_source("rows", 1.0, archives=[{"uri": "hf:o/n", "revision": "0" * 40}]), r"hf:o/n at revision 0{40}: cannot"),
        (_source("rows", 1.0, loader="webdataset"), r"shard\.sources\.rows\.loader: got 'webdataset', allowed: "),
        (_source("rows", 1.0, options={"group": "text"}), r"no training record is left"),
    ],
)
def test_faults_are_one_line_and_leave_the_old_shards(tmp_path, tokenizer, source, message):
    _write(tmp_path, "rows", [{"text": "a few words of text", "page": "p"}] * 4)
    old = tmp_path / "shards"
    old.mkdir()
    (old / "train-00000.parquet").write_text("old")
    config = _config(source, heldout_fraction=0.99, validation_fraction=0.005)
    with pytest.raises((CorpusError, ResourceError), match=message) as error:
        build(config, tokenizer, 0, old, tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in old.iterdir()] == ["train-00000.parquet"]
    assert not list(tmp_path.glob(".shards*"))


def test_reading_shards_that_are_not_there(tmp_path):
    with pytest.raises(CorpusError, match=r"no train-\*\.parquet; run `dvc repro shard`"):
        read_split(tmp_path, "train")


def test_the_stage_ends_in_one_line_and_exit_code_2(tmp_path):
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    backbone = tiny.save(tmp_path / "backbone")
    raw["backbone"] |= {"uri": f"file:{backbone}", "member": None, "sha256": None}
    raw["shard"]["sources"] = [_source("absent", 1.0)]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw))
    run = _stage(tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: file:absent*.jsonl: 0 files")
    assert "Traceback" not in run.stderr
