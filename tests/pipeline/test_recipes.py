"""Every recipe beside the default runs the whole chain, on a tiny random backbone of its class."""

import json

import pytest

from tests.pipeline import project as projects
from tools import recipe

pytestmark = pytest.mark.pipeline


@pytest.mark.parametrize("name", [name for name in recipe.names() if name != recipe.DEFAULT])
def test_a_recipe_trains_accepts_benchmarks_and_reports(name, tmp_path):
    project = projects.make(tmp_path, name)
    ran = projects.stages_run(project.dvc("repro"))
    assert sorted(ran) == sorted(["shard", "distill", "train_ce", "train_kl", "accept", "bench", "report"])
    asked, head = project.params()["head"], project.json("models/head/head.json")
    assert head["type"] == asked["type"]
    assert {key: asked[key] for key in head["options"]} == head["options"]
    metrics = json.loads((project.root / "reports/metrics.json").read_text())
    assert metrics["accept.lossless.identical"] == metrics["accept.lossless.prompts"] > 0
    assert 1 <= metrics["accept.all.greedy.tokens_per_round"] <= project.params()["accept"]["num_drafts"] + 1
    assert asked["type"] in (project.root / "reports/MODEL_CARD.md").read_text()
