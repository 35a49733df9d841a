"""The whole chain, run by dvc on a tiny random model: what it writes, what it skips, what an experiment reruns.

The fixtures build on each other in that order, so the pipeline runs once in full and once in part.
"""

import csv
import io
import json
import math
import time

import pytest
import yaml

from tests.pipeline import project as projects

pytestmark = pytest.mark.pipeline

CHAIN = list(yaml.safe_load((projects.ROOT / "dvc.yaml").read_text())["stages"])
AFTER_LOSS = ["train_kl", "accept", "bench", "report"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return projects.make(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def first(project):
    """The output of the first `dvc repro`; its results are committed, as a user would."""
    output = project.dvc("repro")
    project.run("git", "add", "--all")
    project.run("git", "commit", "--quiet", "--no-verify", "--message", "tiny run")
    return output


@pytest.fixture(scope="module")
def second(project, first):
    return project.dvc("repro")


@pytest.fixture(scope="module")
def experiment(project, second):
    return project.dvc("exp", "run", "--set-param", "loss.eta=0.5", "--name", "low-eta")


def _rows(project, path):
    with (project.root / path).open(newline="") as lines:
        return list(csv.DictReader(lines))


def _stages(project):
    return yaml.safe_load((project.root / "dvc.yaml").read_text())["stages"]


def _outputs(project):
    for stage in _stages(project).values():
        for out in [*stage.get("outs", ()), *stage.get("metrics", ())]:
            path, options = (out, {}) if isinstance(out, str) else next(iter(out.items()))
            yield path, options


@pytest.mark.usefixtures("first")
class TestFirstRun:
    def test_every_stage_ran_once_and_in_order(self, project, first):
        order = projects.stages_run(first)
        assert sorted(order) == sorted(CHAIN)
        # Each after the one before it, but for accept and bench, which do not depend on each other.
        assert [stage for stage in order if stage != "bench"] == [stage for stage in CHAIN if stage != "bench"]

    def test_every_declared_output_is_there_and_not_empty(self, project):
        for path, _ in _outputs(project):
            out = project.root / path
            files = [file for file in out.rglob("*") if file.is_file()] if out.is_dir() else [out]
            assert files, path
            assert all(file.stat().st_size for file in files), path

    def test_git_holds_the_small_outputs_and_none_of_the_large(self, project):
        tracked = project.run("git", "ls-files").stdout.splitlines()
        for path, options in _outputs(project):
            inside = [name for name in tracked if name == path or name.startswith(f"{path}/")]
            assert bool(inside) == (options.get("cache") is False), path
        assert project.run("git", "status", "--porcelain").stdout == ""

    def test_shards_are_few_files_and_the_splits_share_nothing(self, project):
        files = list((project.root / "data/shards").glob("*.parquet"))
        splits = {file.name.rsplit("-", 1)[0] for file in files}
        assert splits == {"train", "validation", "heldout"}
        assert len(files) < 20
        ledger = project.json("reports/ledger.json")
        assert ledger["heldout_in_training"] == []
        assert ledger["max_overlap_after"] <= project.params()["shard"]["max_shared_ngrams"]
        assert set(ledger["licenses"].values()) == {"CC0-1.0"}

    def test_completions_are_token_ids_of_every_domain(self, project):
        facts = project.json("reports/distill.json")
        assert set(facts["domains"]) == {"chat", "maths", "code", "prose"}
        assert facts["tokens"] == sum(domain["tokens"] for domain in facts["domains"].values()) > 0

    @pytest.mark.parametrize("name", ["train_ce", "train_kl"])
    def test_training_is_recorded_by_split_and_depth(self, project, name):
        rows = _rows(project, f"reports/{name}.csv")
        assert {row["split"] for row in rows} == {"train", "validation"}
        assert {int(row["depth"]) for row in rows} == {1, 2}
        assert all(math.isfinite(float(row["loss"])) for row in rows)

    def test_greedy_output_is_the_backbones_own(self, project):
        lossless = project.json("reports/accept.json")["lossless"]
        assert lossless["prompts"] > 0
        assert lossless["identical"] == lossless["prompts"]

    def test_acceptance_adds_up(self, project):
        drafts = project.params()["accept"]["num_drafts"]
        rows = _rows(project, "reports/accept.csv")
        value = {
            (row["domain"], row["mode"], row["metric"], int(row["depth"])): float(row["value"])
            for row in rows
            if row["value"] and row["source"] == "all"
        }
        assert {mode for _, mode, _, _ in value} == {"teacher_forced", "greedy", "t0.5"}
        for mode in ("greedy", "t0.5"):
            shares = [value["all", mode, "outcome", count] for count in range(drafts + 1)]
            cumulative = [value["all", mode, "cumulative", depth] for depth in range(1, drafts + 1)]
            assert sum(shares) == pytest.approx(1)
            assert value["all", mode, "tokens_per_round", 0] == pytest.approx(1 + sum(cumulative))
            assert cumulative == sorted(cumulative, reverse=True)

    def test_the_benchmark_has_every_rival(self, project):
        bench = project.params()["bench"]
        rows = [
            row for row in _rows(project, "reports/bench.csv") if row["domain"] == "all" and row["mode"] == "greedy"
        ]
        found = {(row["engine"], row["method"], int(row["num_drafts"])) for row in rows}
        expected = {("selfspec", "vanilla", 0), ("transformers", "vanilla", 0)}
        expected |= {("selfspec", "mtp", count) for count in bench["num_drafts"]}
        expected |= {("transformers", "prompt_lookup", count) for count in bench["lookup_tokens"]}
        assert found >= expected

    def test_every_metric_is_a_finite_number(self, project):
        metrics = list(_leaves(project.json("reports/metrics.json")))
        assert metrics
        for name, value in metrics:
            assert isinstance(value, int | float), name
            assert math.isfinite(value), name
        names = {name for name, _ in metrics}
        assert {"accept.all.greedy.tokens_per_round", "bench.all.greedy.speedup"} <= names

    def test_the_report_opens_without_a_network(self, project):
        page = (project.root / "reports/report.html").read_text()
        assert "<script src=" not in page
        assert 'src="http' not in page
        assert "tiny-random-llama" in page
        assert "tiny-random-llama" in (project.root / "reports/MODEL_CARD.md").read_text()


@pytest.mark.usefixtures("second")
class TestSecondRun:
    def test_nothing_runs(self, project, second):
        assert projects.stages_run(second) == []
        assert sorted(projects.stages_skipped(second)) == sorted(CHAIN)
        assert "Data and pipelines are up to date." in second

    def test_nothing_changed(self, project):
        assert project.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.usefixtures("experiment")
class TestExperiment:
    """`dvc exp run -S loss.eta=0.5`"""

    def test_only_stage_two_and_what_follows_run(self, experiment):
        assert sorted(projects.stages_run(experiment)) == sorted(AFTER_LOSS)
        assert sorted(projects.stages_skipped(experiment)) == sorted(set(CHAIN) - set(AFTER_LOSS))

    def test_the_metrics_differ_from_the_committed_ones(self, project):
        diff = json.loads(project.dvc("metrics", "diff", "--json"))
        changed = set(diff["reports/metrics.json"])
        assert any(name.startswith("train.kl.") for name in changed), diff
        assert not any(name.startswith(("train.ce.", "data.")) for name in changed)

    def test_params_and_name_are_kept(self, project):
        assert project.params()["loss"]["eta"] == 0.5
        assert "low-eta" in project.dvc("exp", "list", "--name-only")


@pytest.mark.usefixtures("experiment")
def test_ablation_rows_run_once_and_are_collected(project):
    """`make ablations`, two rows of it; the first is what has run already."""
    rows = ("--rows", "lk_hybrid", "kl")
    ablations = ("python", "-m", "tools.ablations")
    code = project.root / "src/selfspec/errors.py"
    kept = code.read_text()
    code.write_text(kept + "\n# an edit\n")
    edited = project.run(*ablations, "run", *rows, check=False)
    code.write_text(kept)
    assert (edited.returncode, edited.stdout.count("\n")) == (2, 1), edited.stdout
    assert "src/selfspec/errors.py' is not committed" in edited.stdout
    early = project.run(*ablations, "collect", *rows, check=False)
    assert early.returncode == 2
    assert early.stdout.startswith("error: rows: lk_hybrid, kl have not run under these parameters")
    ran = project.run(*ablations, "run", *rows).stdout
    assert "2 of 2 rows run: lk_hybrid, kl" in ran
    assert sorted(projects.stages_run(ran)) == ["accept", "accept", "train_kl"]  # accept is cut short
    assert "0 of 2 rows run: all had run before" in project.run(*ablations, "run", *rows).stdout
    project.run(*ablations, "collect", *rows)
    cells = {
        (row["row"], row["domain"], row["metric"], row["depth"]): row["value"]
        for row in _rows(project, "reports/ablations.csv")
    }
    assert {row for row, *_ in cells} == {"lk_hybrid", "kl"}
    measured = {
        (row["domain"], row["metric"], row["depth"]): row["value"]
        for row in _rows(project, "reports/accept.csv")
        if row["mode"] == "teacher_forced" and row["source"] == "all"
    }
    for (row, *cell), value in cells.items():
        assert row == "kl" or value == measured[tuple(cell)]  # the first row's are the workspace's own
    assert (project.root / "reports/ablations.png").stat().st_size > 1000
    assert "up to date" in project.dvc("status")  # no stage's output was touched
    assert "| kl | `loss.name=kl` |" in (project.root / "reports/ablations.md").read_text()


def test_a_copy_runs_its_own_code_and_not_the_installed_one(project):
    """`dvc exp run --temp` and `--queue` work in copies, while the environment points at the original."""
    done = project.run("python", "-c", "import stages, selfspec; print(selfspec.__file__)")
    assert done.stdout.startswith(str(project.root / "src"))


def test_a_killed_stage_goes_on_and_several_processes_train_the_same_head(project):
    """Stage 1 by hand: once through, killed by the system after its first kept steps, and in two processes."""
    path = project.root / "params.yaml"
    kept, resume = path.read_text(), project.root / ".cache/train/train_ce.pt"
    params = project.params()
    params["backbone"]["dtype"], params["train_ce"]["dtype"] = "float32", "float32"
    params["distill"]["states"] = "live"  # the stored ones are of another dtype
    params["train_ce"]["epochs"], params["train"]["resume_steps"] = 30.0, 5
    path.write_text(yaml.safe_dump(params))
    stage = ("python", "-m", "stages.train_ce")
    names = ("models/head_ce/head.safetensors", "reports/train_ce.csv")
    try:
        project.run(*stage)
        weights, curve = ((project.root / name).read_bytes() for name in names)
        running = project.start(*stage)
        deadline = time.monotonic() + 120
        while not resume.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        running.kill()
        running.wait()
        assert resume.exists()
        output = project.run(*stage).stdout
        assert "going on after an interrupted run:" in output
        assert ((project.root / names[0]).read_bytes(), (project.root / names[1]).read_bytes()) == (weights, curve)
        assert not resume.exists()
        output = project.run(*stage, env={"SELFSPEC_LAUNCH": "--standalone --nproc_per_node 2"}).stdout
        assert "training on 2 processes" in output
        losses = [
            [float(row["loss"]) for row in csv.DictReader(io.StringIO(text.decode()))]
            for text in (curve, (project.root / names[1]).read_bytes())
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)  # hundreds of steps apart, rounding has grown
        assert losses[1][:4] == pytest.approx(losses[0][:4], rel=1e-4)
    finally:
        path.write_text(kept)
        project.dvc("checkout", "--force", "train_ce")
        project.run("git", "checkout", "--", "reports")


def test_a_wrong_parameter_stops_a_stage_at_once_in_one_line(project):
    path = project.root / "params.yaml"
    kept = path.read_text()
    path.write_text(kept.replace("backbone_learning_rate", "backbone_learning_rat", 1))
    done = project.run("python", "-m", "stages.train_ce", check=False)
    path.write_text(kept)
    assert done.returncode == 2, done.stdout
    (line,) = done.stdout.splitlines()
    assert line.startswith("error: train.backbone_learning_rat: got ")
    assert "did you mean train.backbone_learning_rate?" in line


@pytest.mark.usefixtures("experiment")
def test_a_head_that_reads_a_middle_layer_reruns_distill_and_another_head_does_not(project):
    """Its states are written by distill; whatever else the head is made of is none of that stage's business."""
    other = project.dvc("exp", "run", "--set-param", "head.norms=joint", "train_ce")
    assert projects.stages_run(other) == ["train_ce"]
    wide = project.dvc("exp", "run", "--set-param", "head.middle_layers=[1]", "accept", "bench")
    assert sorted(projects.stages_run(wide)) == ["accept", "bench", "distill", "train_ce", "train_kl"]
    assert project.json("models/head/head.json")["options"]["middle_layers"] == [1]
    lossless = project.json("reports/accept.json")["lossless"]
    assert lossless["identical"] == lossless["prompts"] > 0


def _leaves(node, prefix=""):
    if not isinstance(node, dict):
        yield prefix.removesuffix("."), node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{prefix}{key}.")
