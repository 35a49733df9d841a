"""Co-trained against post-hoc heads: the student, what each row trains, the figures, the command line."""

import csv
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from selfspec import config
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import heldout
from selfspec.distill import records
from selfspec.heads import checkpoint
from selfspec.training.loop import Trainer
from tests.unit import tiny, tiny_families, training_data
from tools import cotraining, tables
from tools.cotraining import CotrainingError, Experiment, Settings, Texts, cut, kept_layers
from tools.cotraining_costs import Pass
from tools.recipe import ROOT, merge

LAYERS, KEPT = 4, [0, 3]
DOMAINS = ("chat", "maths")
OPTIONS = {
    "student_layers": 2,
    "fraction": 0.5,
    "epochs": 1.5,
    "head_weight": 0.5,
    "backbone_learning_rate": 1e-2,
    "seed": 3,
}
ARGUMENTS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A project's folder: a tiny teacher of four layers, its completions, params.yaml; for all tests to read."""
    root = tmp_path_factory.mktemp("project")
    tiny.save(root / "teacher", num_hidden_layers=LAYERS)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    merge(params, yaml.safe_load((ROOT / "tests/pipeline/tiny_params.yaml").read_text()))
    merge(params, {"backbone": {"uri": "file:teacher", "dtype": "float32"}, "train_ce": {"dtype": "float32"}})
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    model = tiny.llama(num_hidden_layers=LAYERS)
    model.generation_config.eos_token_id = None
    shapes = [(4 + number % 3, 6 + number % 5) for number in range(36)]
    texts = [
        dataclasses.replace(text, domain=DOMAINS[number % 2])
        for number, text in enumerate(training_data.completions(model, shapes))
    ]
    for split, part in (("train", texts[:24]), ("validation", texts[24:28]), ("heldout", texts[28:])):
        (root / "data/distill" / split).mkdir(parents=True)
        records.write(root / "data/distill" / split / "00000.parquet", part)
    (root / "reports").mkdir()
    ledger = {"heldout_in_training": [], "max_overlap_after": 0, "threshold": 0, "ngram": 13}
    (root / "reports/ledger.json").write_text(json.dumps(ledger))
    return root


@pytest.fixture
def project(written, tmp_path, monkeypatch):
    """The same, where a test may change files: the large ones are links."""
    (tmp_path / "teacher").symlink_to(written / "teacher")
    (tmp_path / "params.yaml").write_text((written / "params.yaml").read_text())
    for path in written.glob("data/distill/*/*"):
        (tmp_path / path.relative_to(written)).parent.mkdir(parents=True)
        (tmp_path / path.relative_to(written)).symlink_to(path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/ledger.json").write_text((written / "reports/ledger.json").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def experiment(project):
    return _experiment()


def _experiment(**changes):
    cfg = config.load()
    return Experiment(cfg, Settings(**(OPTIONS | changes)), Texts.read(cfg.accept.prompts))


def _change(root, changes):
    params = yaml.safe_load((root / "params.yaml").read_text())
    merge(params, changes)
    (root / "params.yaml").write_text(yaml.safe_dump(params))


def _copy(module):
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


# The student


def test_layers_are_spaced_evenly():
    assert kept_layers(30, 15) == [0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29]
    assert (kept_layers(4, 2), kept_layers(5, 3), kept_layers(6, 1)) == ([0, 3], [0, 2, 4], [0])
    # Of a backbone with linear attention, one layer without is always kept.
    assert kept_layers(3, 2, [1]) == [1, 2]
    assert kept_layers(8, 3, [3, 7]) == [0, 4, 7]
    assert kept_layers(8, 1, [3, 7]) == [3]
    for total in range(2, 40):
        for count in range(1, total):
            kept = kept_layers(total, count)
            gaps = [after - before for before, after in itertools.pairwise(kept)]
            assert (len(kept), kept[0]) == (count, 0)
            assert count == 1 or kept[-1] == total - 1
            assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


def test_a_student_has_the_teachers_weights_in_the_layers_it_keeps():
    teacher = tiny.llama(num_hidden_layers=LAYERS).requires_grad_(False)
    before = _copy(teacher)
    student = cut(teacher, 2)
    assert student.config.num_hidden_layers == len(student.model.layers) == 2
    own = _copy(student)
    for number, layer in enumerate(KEPT):
        taken = {name for name in before if f"layers.{layer}." in name}
        assert len(taken) == 9
        for name in taken:
            assert torch.equal(own.pop(name.replace(f"layers.{layer}.", f"layers.{number}.")), before[name])
    assert own.keys() == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(torch.equal(weight, before[name]) for name, weight in own.items())
    with torch.no_grad():
        for weight in student.parameters():
            weight.zero_()
    assert teacher.config.num_hidden_layers == LAYERS
    assert _equal(_copy(teacher), before)  # a copy, not a view


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_a_student_of_any_family_runs_as_a_model_that_was_built_so(family):
    teacher = tiny_families.family(family).requires_grad_(False)
    student = cut(teacher, 2)
    built = type(student)(student.config).eval()
    built.load_state_dict(student.state_dict())
    text = torch.tensor([list(range(5, 25))])
    wanted = built(text).logits
    torch.testing.assert_close(student(text, use_cache=True).logits, wanted)
    decoder = Decoder(student)
    _, (hidden,) = decoder.prefill([text[0].tolist()], 20)
    torch.testing.assert_close(decoder.logits(hidden), wanted[0], atol=1e-4, rtol=1e-3)


# What is trained


def test_both_rows_start_from_the_same_head_and_leave_the_embeddings(experiment, tmp_path, monkeypatch):
    seen = []
    plain = Trainer.run

    def run(trainer):
        embedding = trainer.model.get_input_embeddings().weight
        seen.append(
            (trainer.shared, _copy(trainer.head), trainer, embedding.detach().clone(), list(trainer.train.usable))
        )
        return plain(trainer)

    monkeypatch.setattr(Trainer, "run", run)
    together = experiment.co_train(tmp_path / "a")
    after = experiment.post_hoc(tmp_path / "b")
    assert [(shared.unfrozen_layers, shared.head_weight) for shared, *_ in seen] == [(2, 0.5), (2, 0.0), (0, 0.5)]
    assert [trainer.backbone is None for _, _, trainer, *_ in seen] == [False, False, True]
    for _, head, trainer, embedding, usable in seen:
        assert _equal(head, _copy(experiment.initial))
        assert torch.equal(trainer.model.get_input_embeddings().weight, embedding)
        assert torch.equal(embedding, experiment.teacher.get_input_embeddings().weight)
        assert usable == seen[0][4]
    (_, _, first, *_), (_, _, distilled, *_), (_, _, last, *_) = seen
    assert not _equal(_copy(first.head), _copy(last.head))
    assert _equal(_copy(distilled.head), _copy(experiment.initial))  # weight 0: it learnt nothing
    # The heads have a say in one student and none in the other.
    assert not _equal(_copy(first.model), _copy(distilled.model))
    assert last.model is distilled.model
    assert (together.head_tokens, together.student_tokens) == (after.head_tokens, after.student_tokens)
    assert after.student_tokens_forward_only == after.student_tokens
    assert (together.student_tokens_forward_only, after.optimiser_steps) == (0, 2 * together.optimiser_steps)


def test_heads_of_weight_0_do_not_change_how_a_student_is_distilled(experiment):
    one = experiment.distil(experiment.student(), 0.0)
    with torch.no_grad():
        for weight in experiment.initial.parameters():
            weight.mul_(-3.0)
    assert _equal(_copy(experiment.distil(experiment.student(), 0.0).model), _copy(one.model))


def test_a_student_stays_as_it_is_while_heads_are_trained_on_it(experiment):
    student = experiment.student()
    experiment.distil(student, 0.0)
    before = _copy(student)
    trainer = experiment.train_heads(student)
    assert _equal(_copy(student), before)
    assert all(weight.grad is None and not weight.requires_grad for weight in student.parameters())
    assert not _equal(_copy(trainer.head), _copy(experiment.initial))


def test_what_a_training_read_is_what_it_was_given(experiment, monkeypatch):
    read = []
    plain = Trainer.step

    def step(trainer, indices, *arguments):
        read.extend(trainer.train.completions[i].length for i in indices)
        return plain(trainer, indices, *arguments)

    monkeypatch.setattr(Trainer, "step", step)
    trainer = experiment.distil(experiment.student(), 0.5)
    passed = experiment.passed(trainer)
    assert passed.tokens == sum(read)
    assert passed.steps == 4  # 12 texts, 4 a step, 1.5 epochs: round(1.5 * 3)
    assert len(read) == 16


def test_context_is_the_mean_number_of_positions_attended_over():
    passed = Pass.of(2, [(2, 1), (1, 1)])
    assert (passed.tokens, passed.scored) == (5, 2)
    assert passed.context == (1 + 2 + 3 + 1 + 2) / 5


# The whole tool


@pytest.fixture
def ran(project, capsys):
    cotraining.main(ARGUMENTS)
    return capsys.readouterr().out


def _cells(root):
    with (root / "reports/cotraining.csv").open() as stream:
        return {
            (line["row"], line["domain"], line["metric"], int(line["depth"])): line for line in csv.DictReader(stream)
        }


def test_the_table_has_the_figures_of_what_was_saved(project, ran):
    cells = _cells(project)
    experiment = _experiment()
    teacher, groups = experiment.teacher, experiment.texts.heldout
    samples = experiment.cfg.accept.bootstrap_samples
    assert {domain: len(group) for domain, group in groups.items()} == {"chat": 2, "maths": 2}  # accept.prompts
    compared = 0
    for name in cotraining.ROWS:
        student = experiment.student()
        head = checkpoint.load(cotraining.MODELS / name, student)
        for row in heldout.forced_rows(Decoder(student), head, groups, 2, samples, OPTIONS["seed"]):
            if row.source == "all" and row.metric in ("match", "tokens_per_round"):
                cell = cells[name, row.domain, row.metric, row.depth]
                assert [float(cell[end]) for end in ("value", "low", "high")] == pytest.approx(
                    [row.value, row.low, row.high]
                )
                assert int(cell["prompts"]) == row.prompts
                compared += 1
        for domain in (*groups, "all"):
            texts = [text for group in groups.values() for text in group if domain in (text.domain, "all")]
            same, loss, count = 0, 0.0, 0
            for text in texts:
                ids = torch.tensor([text.tokens])
                own, its = (model(ids).logits[0, len(text.prompt_ids) - 1 : -1] for model in (student, teacher))
                same += int((own.argmax(-1) == its.argmax(-1)).sum())
                loss += float(F.cross_entropy(own, torch.tensor(text.completion_ids), reduction="sum"))
                count += len(text.completion_ids)
            assert float(cells[name, domain, "agreement", 0]["value"]) == pytest.approx(same / count)
            perplexity = float(cells[name, domain, "perplexity", 0]["value"])
            assert perplexity == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert compared == 2 * 3 * (2 + 1)  # rows, domains and all, depths and tokens per round
    assert ("teacher", "all", "perplexity", 0) in cells
    assert ("teacher", "all", "match", 1) not in cells
    for name in cotraining.ROWS:
        steps = cells[name, "training", "optimiser_steps", 0]
        assert (steps["value"], steps["low"]) == ({"co-trained": "4", "post-hoc": "8"}[name], "")


def test_the_page_says_what_was_compared(project, ran):
    page = (project / "reports/cotraining.md").read_text()
    assert page in ran
    assert "| row | match 1 | match 2 | tokens per round | agreement | perplexity |" in page
    for name in cotraining.ROWS:
        shown = tables.interval(_cells(project)[name, "all", "match", 1])
        assert f"| {name} | {shown} |" in page
    for said in ("12 of 24 in data/distill/train", "its layers 1, 4 of 4", "| --seed | 3 |", "One seed was run"):
        assert said in page
    titles = [line for line in page.splitlines() if line.startswith("**")]
    assert titles == ["**chat** (2 prompts)", "**maths** (2 prompts)", "**all** (4 prompts)"]
    assert "| teacher | – | – | – | – | " in page
    assert (project / "reports/cotraining.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "head",
    [
        {"type": "parallel", "output": "own"},
        {"type": "cascade", "init": "last_layer"},
        {"middle_layers": [1], "draft_vocab_size": 0},
    ],
    ids=lambda head: head.get("type", "middle"),
)
def test_any_head_of_params_yaml_is_compared(project, capsys, head):
    _change(project, {"head": head})
    cotraining.main([*ARGUMENTS, "--epochs", "0.4"])
    cells = _cells(project)
    assert all(0 <= float(cells[name, "all", "match", 1]["value"]) <= 1 for name in cotraining.ROWS)
    assert float(cells["post-hoc", "training", "operations", 0]["value"]) > float(
        cells["co-trained", "training", "operations", 0]["value"]
    )


def test_no_stage_owns_what_the_tool_writes():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    kinds = ("outs", "metrics", "plots")
    named = [out for stage in stages for kind in kinds for out in stage.get(kind, [])]
    outs = [Path(out if isinstance(out, str) else next(iter(out))) for out in named]
    assert Path("reports/accept.csv") in outs
    written = [cotraining.REPORTS / f"cotraining.{ending}" for ending in ("csv", "md", "png")]
    for path in (*written, *(cotraining.MODELS / name for name in cotraining.ROWS)):
        assert not any(path.is_relative_to(out) for out in outs)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs: got 0.0, allowed: a finite number above 0; change it"),
        (["--epochs", "nan"], "--epochs: got nan, allowed: a finite number above 0; change it"),
        (["--fraction", "1.5"], "--fraction: got 1.5, allowed: a number above 0, at most 1; change it"),
        (["--head-weight", "0"], "--head-weight: got 0.0, allowed: a finite number above 0; change it"),
        (["--backbone-learning-rate", "inf"], "--backbone-learning-rate: got inf, allowed: a finite number above 0; "),
        (["--student-layers", "0"], "--student-layers: got 0, allowed: a whole number of at least 1; change it"),
        (["--student-layers", "4"], "--student-layers: got 4, allowed: 1 to 3, fewer than the teacher's 4; change it"),
        (["--seed", "-1"], "--seed: got -1, allowed: a whole number from 0 to 2^32 - 1; change it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "=".join(value),
)
def test_an_option_that_cannot_be_is_named_in_one_line(project, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        cotraining.main([*ARGUMENTS, *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not cotraining.MODELS.exists()


@pytest.mark.parametrize("name", ["data/distill/train", "data/distill/heldout", "reports/ledger.json"])
def test_texts_that_are_not_there_are_named_with_what_makes_them(project, capsys, name):
    path = project / name
    (next(path.iterdir()) if path.is_dir() else path).unlink()
    with pytest.raises(SystemExit):
        cotraining.main(ARGUMENTS)
    assert (
        capsys.readouterr().err == f"error: {name}: not there, and the default run makes it; run `make repro` first\n"
    )


def test_held_out_texts_that_were_trained_on_are_refused(project):
    train = project / "data/distill/train/00000.parquet"
    train.rename(project / "data/distill/heldout/00001.parquet")
    train.symlink_to(project / "data/distill/heldout/00001.parquet")
    with pytest.raises(heldout.LeakError, match="24 held-out prompts are in the training split"):
        Texts.read(2)


def test_texts_of_another_backbone_are_refused(project):
    path = project / "data/distill/validation/00000.parquet"
    texts = records.read_shard(path)
    path.unlink()
    records.write(path, [dataclasses.replace(texts[0], completion_ids=[5, 288])])
    with pytest.raises(
        CotrainingError, match=r"^data/distill: holds token 288, allowed: below 288, .*run `make repro`"
    ):
        _experiment()


def test_a_middle_layer_that_the_student_lacks_is_named(project):
    _change(project, {"head": {"middle_layers": [2]}})
    with pytest.raises(Exception, match=r"^head\.middle_layers: got \[2\]; allowed: "):
        _experiment()
