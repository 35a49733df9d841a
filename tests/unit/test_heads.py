"""What every head type has to keep: training sees what drafting sees, and drafting never changes the text."""

import pytest
import torch

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable
from selfspec.benchmark.lossless import stock_greedy
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.drafters.parallel import ParallelDrafter
from selfspec.decoding.loop import DraftingError, speculate
from selfspec.decoding.rules import Greedy
from selfspec.errors import SelfspecError
from selfspec.heads import build, checkpoint
from selfspec.heads.alignment import pack
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
    decoder = tiny_heads.decoder_for(model, options)
    drafter = drafter_for(decoder, tiny_heads.trained(model, head, EVEN))
    text = torch.tensor(tiny_heads.prompt(30, seed=accepted))
    hidden, expected = tiny_heads.forced(model, head, text, DEPTHS)
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
    drafter = drafter_for(tiny_heads.decoder_for(model, options), tiny_heads.trained(model, head))
    texts = [torch.tensor(tiny_heads.prompt(30, seed=seed)) for seed in range(4)]
    hidden, expected = zip(*(tiny_heads.forced(model, head, text, DEPTHS) for text in texts), strict=True)
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
    hidden = [tiny_heads.backbone_states(model, text, head.middle_layers) for text in texts]
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
    decoder = tiny_heads.decoder_for(model, options)
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
        tiny_heads.forced(model, head, torch.arange(3, 12), depths=3)


@pytest.mark.parametrize("options", [VARIANTS["shared"], VARIANTS["shared-joint-two-layers"]], ids=["one", "two"])
def test_a_shared_head_recurses_beyond_its_depths(model, options):
    head = tiny_heads.random_head(model, 2, **options)
    drafter = drafter_for(Decoder(model), tiny_heads.trained(model, head))
    text = torch.tensor(tiny_heads.prompt(20))
    hidden, expected = tiny_heads.forced(model, head, text, depths=6)
    cache = drafter.new_cache(1, 64)
    state = drafter.observe(text[None, 1:8], hidden[None, :7], [7], cache)
    for depth, actual in enumerate(_chain(drafter, state, text[None, 8:13], cache, depths=6)):
        torch.testing.assert_close(actual[0], expected[depth, 6], atol=1e-4, rtol=1e-3)


# Middle layers


def test_a_head_with_middle_layers_starts_as_one_without():
    model = tiny.llama(num_hidden_layers=4).requires_grad_(False)
    plain, wide = (
        build.construct("shared", model, DEPTHS, tiny_heads.vocabulary(model), options)
        for options in _seeded([{}, {"middle_layers": [1, 3]}])
    )
    assert wide.middle_proj.weight.shape == (32, 64)
    assert {name for name, _ in wide.named_parameters()} - {name for name, _ in plain.named_parameters()} == {
        "middle_proj.weight"
    }
    text = torch.tensor(tiny_heads.prompt(20))
    states = [tiny_heads.forced(model, head, text, DEPTHS)[1] for head in (wide, plain)]
    assert torch.equal(*states)


def _seeded(items):
    """Each item with the same random state."""
    for item in items:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield item


def test_middle_states_join_at_depth_1_and_reach_deeper_ones_through_it_alone():
    """By hand: what the projection adds at depth 1; deeper, the block's input has no part of it."""
    model = tiny.llama(num_hidden_layers=4).requires_grad_(False)
    head = tiny_heads.random_head(model, DEPTHS, middle_layers=[1, 3])
    text = torch.tensor(tiny_heads.prompt(12))
    hidden = tiny_heads.backbone_states(model, text, [1, 3])
    embedding = torch.randn(12, 32)
    weight = head.middle_proj.weight
    added = hidden[:, 32:64] @ weight[:, :32].T + hidden[:, 64:] @ weight[:, 32:].T
    torch.testing.assert_close(head.first_input(embedding, hidden), head.combine(embedding, hidden[:, :32]) + added)
    inputs = []
    combine = head.combine
    head.combine = lambda embedding, state: inputs.append(state) or combine(embedding, state)
    _, states = tiny_heads.forced(model, head, text, DEPTHS)
    assert torch.equal(inputs[0], hidden[:, :32])
    for depth in range(1, DEPTHS):
        assert torch.equal(inputs[depth], states[depth - 1])


def test_a_decoder_that_gives_other_layers_than_the_head_reads_is_refused(model):
    head = tiny_heads.trained(model, tiny_heads.random_head(model, middle_layers=[1]))
    with pytest.raises(ValueError, match=r"middle_layers: got \(\) of the decoder, allowed: \(1,\), which the head"):
        drafter_for(Decoder(model), head)
    with pytest.raises(ValueError, match=r"got \(1,\) of the decoder, allowed: \(\)"):
        tiny_heads.drafter(Decoder(model, middle_layers=[1]), model, kind="cascade")


# The gate: a head that learned one text by heart drafts all of it


@pytest.mark.parametrize(
    "name", ["shared-joint-two-layers", "shared-middle", "cascade", "cascade-encoder-own", "parallel-own-two-layers"]
)
def test_overfitting_one_text_accepts_full_blocks(name):
    """Any shift between states, embeddings, labels, rows or caches of training and serving breaks this."""
    model = tiny.llama(tied=False, seed=2).requires_grad_(False)
    model.generation_config.eos_token_id = None
    prompt = tiny_heads.prompt(8, seed=17)
    (completion,) = stock_greedy(model, [prompt], 37)
    text = torch.tensor(prompt + completion)
    options = {**VARIANTS[name]}
    vocab = tiny_heads.vocabulary(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build.construct(options.pop("kind"), model, 3, vocab, options)
    trained = checkpoint.TrainedHead(head, vocab, {})
    packed = pack([text], [len(prompt)], 3)
    hidden = tiny_heads.backbone_states(model, text, head.middle_layers)
    table, embedding = RotaryTable(model, 64, torch.float32), model.get_input_embeddings().weight
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(150):
        states = head(packed, hidden, embedding, table)
        rows = trained.output_rows(model.lm_head.weight, 3)
        loss = sum(
            torch.nn.functional.cross_entropy((state[packed.rows[depth]] @ rows[depth].T), packed.targets)
            for depth, state in enumerate(states)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in head.parameters())
    decoder = tiny_heads.decoder_for(model, VARIANTS[name])
    result = speculate(decoder, drafter_for(decoder, trained), [prompt], max_new_tokens=37, num_drafts=3, rule=Greedy())
    assert result.completions == [completion]
    assert result.rounds == [[(3, 3)] * 9]  # one token of the prefill, then 9 rounds of K + 1
