"""Every recipe beside the default runs the whole chain, on a tiny random backbone and tiny data.

They share these, and one project: stages up to the completions run once for all that train on the same texts.
"""

import json

import pytest
import torch

from tests.pipeline import project as projects
from tests.unit import tiny, tiny_native
from tools import recipe

pytestmark = pytest.mark.pipeline

HEADS = ["train_ce", "train_kl", "accept", "bench", "report"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Its backbone ships a native head, which only a recipe that starts from one looks at."""
    made = projects.make(tmp_path_factory.mktemp("recipes"))
    model = tiny.llama()
    tensors = tiny_native.named(tiny_native.stock(model, "qwen3_5"), "qwen3_5", torch.float32)
    tiny_native.ship(made.root.parent / "backbone", model, tensors, "beside")
    return made


@pytest.mark.parametrize("name", [name for name in recipe.names() if name != recipe.DEFAULT])
def test_a_recipe_trains_accepts_benchmarks_and_reports(project, name):
    projects.take(project, name)
    assert set(HEADS) <= set(projects.stages_run(project.dvc("repro")))
    asked, head = project.params()["head"], project.json("models/head/head.json")
    assert (head["type"], head["depths"]) == (asked["type"], asked["depths"])
    assert {key: asked[key] for key in head["options"]} == head["options"]
    metrics = json.loads((project.root / "reports/metrics.json").read_text())
    assert metrics["accept.lossless.identical"] == metrics["accept.lossless.prompts"] > 0
    assert 1 <= metrics["accept.all.greedy.tokens_per_round"] <= project.params()["accept"]["num_drafts"] + 1
    assert asked["type"] in (project.root / "reports/MODEL_CARD.md").read_text()
    built = recipe.plain(recipe.build(name))
    taken = {section: project.params()[section] for section in ("head", "loss")}
    assert taken == {section: built[section] for section in taken}
    for stage in ("train_ce", "train_kl"):
        assert project.params()[stage]["optimizer"] == built[stage]["optimizer"]
