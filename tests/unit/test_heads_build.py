"""How heads start, what params.yaml says of them, and how they come back from disk."""

import inspect
import json
from typing import get_args

import pytest
import torch

from selfspec.config import HEAD_OPTIONS, HeadConfig
from selfspec.heads import build, checkpoint
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.shared import SharedHead
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_heads import VARIANTS

EVEN = torch.arange(0, 288, 2)
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture
def model():
    return tiny.llama().requires_grad_(False)


# How heads start


def test_a_parallel_head_starts_as_the_backbone_s_state(model):
    head = ParallelHead(model, 3, tiny_heads.vocabulary(model), layers=2)
    hidden, states = tiny_heads.forced(model, head, torch.arange(3, 20), depths=3)
    for depth in range(3):
        assert torch.equal(states[depth], hidden[: len(states[depth])])


@pytest.mark.parametrize("kind", ["cascade", "parallel"])
def test_own_rows_start_as_the_backbone_s_and_train(model, kind):
    head = build.construct(kind, model, 2, tiny_heads.vocabulary(model, EVEN), {"output": "own"})
    for depth in range(2):
        rows = head.output_rows(depth)
        assert torch.equal(rows, model.get_output_embeddings().weight[EVEN])
        assert rows.requires_grad
    head.output_rows(0).data.zero_()
    assert head.output_rows(1).abs().sum() > 0  # copies of their own
    assert model.get_output_embeddings().weight[EVEN].abs().sum() > 0
    assert build.construct(kind, model, 2, tiny_heads.vocabulary(model, EVEN), {}).output_rows(1) is None


def _same(layer, other):
    return all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))


def test_last_layer_starts_as_the_backbone_s(model):
    layers = model.model.layers
    assert _same(SharedHead(model, 2, init="last_layer").mtp_block, layers[1])
    assert not _same(SharedHead(model, 2).mtp_block, layers[1])
    two = SharedHead(model, 2, init="last_layer", layers=2)
    assert _same(two.mtp_block, layers[0])
    assert _same(two.later_blocks[0], layers[1])
    cascade = CascadeHead(model, 2, tiny_heads.vocabulary(model), init="last_layer")
    assert all(_same(layer.mtp_block, layers[1]) for layer in cascade.by_depth())
    with pytest.raises(ValueError, match="layers: got 2, allowed: at most 1"):
        SharedHead(tiny.llama(num_hidden_layers=1), 2, init="last_layer", layers=2)


def test_the_canonical_form_keeps_its_names(model):
    names = {name.split(".")[0] for name in SharedHead(model, 2).state_dict()}
    assert names == {"enorm", "hnorm", "eh_proj", "mtp_block", "post_norm"}
    cascade = CascadeHead(model, 2, tiny_heads.vocabulary(model)).state_dict()
    assert {name.split(".")[2] for name in cascade} == names  # after layers.<depth>


def test_a_joint_head_projects_then_norms(model):
    head = tiny_heads.random_head(model, 2, norms="joint")
    embedding, state = torch.randn(32), torch.randn(32)
    projected = head.eh_proj.weight[:, :32] @ embedding + head.eh_proj.weight[:, 32:] @ state
    wanted = projected / (projected.square().mean() + head.pre_norm.variance_epsilon).sqrt() * head.pre_norm.weight
    torch.testing.assert_close(head.combine(embedding, state), wanted, atol=1e-5, rtol=1e-4)


# From params.yaml, and on disk


def _config(**changes):
    return HeadConfig.model_validate({"depths": 3, "draft_vocab_size": 0, "depth_decay": 1.0, **changes})


def test_the_schema_and_the_constructors_know_the_same_options():
    assert tuple(kind.kind for kind in build.KINDS) == get_args(HeadConfig.model_fields["type"].annotation)
    for head in build.KINDS:
        parameters = inspect.signature(head).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        assert own == {name: HeadConfig.model_fields[name].default for name in HEAD_OPTIONS[head.kind]}


@variants
def test_a_head_is_built_as_described_and_comes_back_as_it_went(model, tmp_path, options):
    vocab = tiny_heads.vocabulary(model, EVEN)
    changes = {name: value for name, value in options.items() if name != "kind"}
    head = build.build(_config(type=options["kind"], **changes), model, vocab)
    assert (head.kind, head.depths) == (options["kind"], 3)
    assert changes.items() <= head.options.items()
    head = tiny_heads.random_head(model, 3, ids=EVEN, **options)
    checkpoint.save(tmp_path, head, vocab, "tiny")
    loaded = checkpoint.load(tmp_path, model)
    assert type(loaded.module) is type(head)
    assert loaded.module.options == head.options
    assert loaded.facts["parameters"] == sum(p.numel() for p in head.parameters())
    text = torch.tensor(tiny_heads.prompt(12))
    assert torch.equal(tiny_heads.forced(model, loaded.module, text, 3)[1], tiny_heads.forced(model, head, text, 3)[1])
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name


def _edited(folder, **changes):
    facts = json.loads((folder / "head.json").read_text()) | changes
    facts = {name: value for name, value in facts.items() if value is not None}
    (folder / "head.json").write_text(json.dumps(facts))


def test_a_head_from_before_options_loads(model, tmp_path):
    head = tiny_heads.random_head(model, 3)
    checkpoint.save(tmp_path, head, tiny_heads.vocabulary(model), "tiny")
    _edited(tmp_path, options=None)
    assert torch.equal(checkpoint.load(tmp_path, model).module.eh_proj.weight, head.eh_proj.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "tree"}, "has type 'tree'; allowed: shared, cascade, parallel"),
        ({"options": {"output": "own"}}, "has type shared with .*unexpected keyword argument 'output'"),
        ({"options": {"layers": 2}}, "does not hold what head.json says .*later_blocks"),
        ({"type": "cascade", "options": {}}, "does not hold what head.json says .*layers.0.enorm"),
    ],
)
def test_files_that_contradict_each_other_are_refused(model, tmp_path, changes, message):
    checkpoint.save(tmp_path, tiny_heads.random_head(model, 3), tiny_heads.vocabulary(model), "tiny")
    _edited(tmp_path, **changes)
    with pytest.raises(checkpoint.HeadError, match=message):
        checkpoint.load(tmp_path, model)
