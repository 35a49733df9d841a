"""What every head type has to keep: training sees what drafting sees, and drafting never changes the text."""

import inspect
import json
from typing import get_args

import pytest
import torch

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable
from selfspec.benchmark.lossless import stock_greedy
from selfspec.config import HEAD_OPTIONS, HeadConfig
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.drafters.parallel import ParallelDrafter
from selfspec.decoding.loop import DraftingError, speculate
from selfspec.decoding.rules import Greedy
from selfspec.errors import SelfspecError
from selfspec.heads import build, checkpoint
from selfspec.heads.alignment import pack
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.shared import SharedHead
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_heads import VARIANTS

DEPTHS = 4
EVEN = torch.arange(0, 288, 2)
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture
def model():
    model = tiny.llama().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def _forced(model, head, text, depths=DEPTHS):
    """Training's states of one text by anchor and depth; a prompt of one token makes every anchor active."""
    hidden = model.model(text[None]).last_hidden_state[0]
    table = RotaryTable(model, 128, torch.float32)
    packed = pack([text], [1], depths)
    states = head(packed, hidden, model.get_input_embeddings().weight, table)
    assert packed.anchors.tolist() == list(range(len(text) - 2))
    return hidden, torch.stack(states)  # [K, anchors, H]


def _chain(drafter, state, drafts, cache, depths=DEPTHS):
    """States of depths 1..``depths`` after ``state`` of depth 1, with ``drafts [rows, depths - 1]`` as the drafts."""
    states = [state]
    for depth in range(2, depths + 1):
        states.append(drafter.deepen(drafts[:, depth - 2], states[-1], depth, cache))
    if isinstance(drafter, ParallelDrafter):  # passes the backbone's state on; its own come with the scores
        states = [drafter.state(state, depth) for depth, state in enumerate(states, start=1)]
    return states


@variants
@pytest.mark.parametrize("start", [1, 2, 9])
@pytest.mark.parametrize("accepted", range(DEPTHS + 1))
def test_drafting_equals_training_after_every_accept_count(model, options, accepted, start):
    """Cached = uncached: whatever a round accepted, a chain of true tokens is the teacher-forced one."""
    head = tiny_heads.random_head(model, DEPTHS, ids=EVEN, **options)
    decoder = Decoder(model)
    drafter = drafter_for(decoder, tiny_heads.trained(model, head, EVEN))
    text = torch.tensor(tiny_heads.prompt(30, seed=accepted))
    hidden, expected = _forced(model, head, text)
    known, cache = start, drafter.new_cache(1, 64)  # anchors 0..known-1 are verified
    state = drafter.observe(text[None, 1 : known + 1], hidden[None, :known], [known], cache)
    for number in range(3):
        wrong = torch.tensor([tiny_heads.prompt(DEPTHS, seed=50 + number)])
        _chain(drafter, state, wrong, cache, depths=1 + number)  # a round of wrong drafts, of any length
        true = text[None, known + 1 : known + DEPTHS]
        for depth, actual in enumerate(_chain(drafter, state, true, cache), start=1):
            wanted = expected[depth - 1, known - 1]
            torch.testing.assert_close(actual[0], wanted, atol=1e-4, rtol=1e-3)
            rows = head.output_rows(depth - 1)
            rows = decoder.lm_head[EVEN] if rows is None else rows
            passed = state if isinstance(drafter, ParallelDrafter) else actual
            torch.testing.assert_close(drafter.logits(passed, depth)[0], rows @ wanted, atol=1e-3, rtol=1e-3)
        count = accepted + 1
        tokens = text[None, known + 1 : known + 1 + count]
        state = drafter.observe(tokens, hidden[None, known : known + count], [count], cache)
        known += count


@variants
def test_ragged_rows_draft_as_they_would_alone(model, options):
    head = tiny_heads.random_head(model, DEPTHS, **options)
    drafter = drafter_for(Decoder(model), tiny_heads.trained(model, head))
    texts = [torch.tensor(tiny_heads.prompt(30, seed=seed)) for seed in range(4)]
    hidden, expected = zip(*(_forced(model, head, text) for text in texts), strict=True)
    tokens, states = torch.stack(texts), torch.stack(hidden)
    known, cache = [3, 9, 1, 2], drafter.new_cache(4, 64)

    def rows(of, starts, length):
        return torch.stack([row[start : start + length] for row, start in zip(of, starts, strict=True)])

    state = drafter.observe(tokens[:, 1:10], states[:, :9], known, cache)
    for counts in ([1, 3, 5, 2], [4, 1, 1, 5], [2, 2, 2, 2]):
        chain = _chain(drafter, state, rows(tokens, [k + 1 for k in known], DEPTHS - 1), cache)
        for row, anchor in enumerate(known):
            for depth, actual in enumerate(chain):
                torch.testing.assert_close(actual[row], expected[row][depth, anchor - 1], atol=1e-4, rtol=1e-3)
        following, fresh = rows(tokens, [k + 1 for k in known], max(counts)), rows(states, known, max(counts))
        state = drafter.observe(following, fresh, counts, cache)
        known = [k + count for k, count in zip(known, counts, strict=True)]
    cache = cache.select([3, 1])  # two rows end
    chain = _chain(drafter, state[[3, 1]], rows(tokens[[3, 1]], [known[3] + 1, known[1] + 1], DEPTHS - 1), cache)
    for position, row in enumerate([3, 1]):
        for depth, actual in enumerate(chain):
            torch.testing.assert_close(actual[position], expected[row][depth, known[row] - 1], atol=1e-4, rtol=1e-3)


@variants
def test_packed_documents_train_as_they_would_alone(model, options):
    head = tiny_heads.random_head(model, 3, **options)
    texts, prompts = [torch.tensor(tiny_heads.prompt(n, seed=n)) for n in (11, 2, 7)], [4, 1, 2]
    hidden = [model.model(text[None]).last_hidden_state[0] for text in texts]
    embedding, table = model.get_input_embeddings().weight, RotaryTable(model, 64, torch.float32)
    together = head(pack(texts, prompts, 3), torch.cat(hidden), embedding, table)
    alone = [
        head(pack([text], [prompt], 3), states, embedding, table)
        for text, prompt, states in zip(texts, prompts, hidden, strict=True)
    ]
    for depth, states in enumerate(together):
        torch.testing.assert_close(states, torch.cat([a[depth] for a in alone]), atol=1e-5, rtol=1e-4)


@variants
@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_greedy_text_stays_the_backbone_s(model, options, num_drafts):
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model, EVEN, depths=DEPTHS, **options)
    prompts = [tiny_heads.prompt(length, seed=length) for length in (17, 1, 2, 30)]
    expected = stock_greedy(model, prompts, 20)
    for chosen in ([0, 1, 2, 3], [1], [0]):
        result = speculate(
            decoder,
            drafter,
            [prompts[i] for i in chosen],
            max_new_tokens=20,
            num_drafts=num_drafts,
            rule=Greedy(),
        )
        assert result.completions == [expected[i] for i in chosen]
    assert drafter.nbytes() > 0


@pytest.mark.parametrize("options", [VARIANTS["cascade"], VARIANTS["parallel"]], ids=["cascade", "parallel"])
def test_depths_with_weights_of_their_own_end(model, options):
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model, depths=2, **options)
    with pytest.raises(DraftingError, match=r"num_drafts: got 3, allowed: at most 2, .*head\.depths") as caught:
        speculate(decoder, drafter, [[5, 6]], max_new_tokens=4, num_drafts=3, rule=Greedy())
    assert isinstance(caught.value, SelfspecError)  # a stage prints it without a traceback
    assert isinstance(caught.value, ValueError)
    head = tiny_heads.random_head(model, 2, **options)
    with pytest.raises(ValueError, match="depths: got 3, allowed: at most 2"):
        _forced(model, head, torch.arange(3, 12), depths=3)


@pytest.mark.parametrize("options", [VARIANTS["shared"], VARIANTS["shared-joint-two-layers"]], ids=["one", "two"])
def test_a_shared_head_recurses_beyond_its_depths(model, options):
    head = tiny_heads.random_head(model, 2, **options)
    drafter = drafter_for(Decoder(model), tiny_heads.trained(model, head))
    text = torch.tensor(tiny_heads.prompt(20))
    hidden, expected = _forced(model, head, text, depths=6)
    cache = drafter.new_cache(1, 64)
    state = drafter.observe(text[None, 1:8], hidden[None, :7], [7], cache)
    for depth, actual in enumerate(_chain(drafter, state, text[None, 8:13], cache, depths=6)):
        torch.testing.assert_close(actual[0], expected[depth, 6], atol=1e-4, rtol=1e-3)


# How heads start


def test_a_parallel_head_starts_as_the_backbone_s_state(model):
    head = ParallelHead(model, 3, tiny_heads.vocabulary(model), layers=2)
    hidden, states = _forced(model, head, torch.arange(3, 20), depths=3)
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
    assert torch.equal(_forced(model, loaded.module, text, 3)[1], _forced(model, head, text, 3)[1])
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
