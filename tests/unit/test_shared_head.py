"""The shared head: training forward against a brute-force reference, and drafting against training."""

import pytest
import torch
import torch.nn.functional as F

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable, rotate
from selfspec.decoding.drafters.shared import SharedDrafter
from selfspec.heads.alignment import pack
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.vocab import DraftVocab
from tests.unit import tiny, tiny_heads

DEPTHS = 4


@pytest.fixture
def model():
    return tiny.llama().requires_grad_(False)


@pytest.fixture
def head(model):
    return tiny_heads.random_head(model, DEPTHS)


SHARED = {name: options for name, options in tiny_heads.VARIANTS.items() if options["kind"] == "shared"}


def _norm(x, module):
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


class Reference:
    """One anchor, one depth at a time, keys in a list: slow and plain."""

    def __init__(self, model, head):
        self.model, self.head = model, head
        self.table = RotaryTable(model, 128, torch.float32)
        self.embedding = model.get_input_embeddings().weight

    def _input(self, token, state, position):
        size = len(self.embedding[0])
        state, middle = state[:size], state[size:]
        embedding = torch.zeros_like(state) if position == 0 else self.embedding[token]
        if self.head.options["norms"] == "joint":
            x = _norm(self.head.eh_proj.weight @ torch.cat([embedding, state]), self.head.pre_norm)
        else:
            joined = torch.cat([_norm(embedding, self.head.enorm), _norm(state, self.head.hnorm)])
            x = self.head.eh_proj.weight @ joined
        return x + self.head.middle_proj.weight @ middle if len(middle) else x

    def _qkv(self, layer, x, position):
        attention, size = layer.self_attn, self.head.head_dim
        normed = _norm(x, layer.input_layernorm)
        q, k, v = ((p.weight @ normed).view(-1, size) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = self.table.at(torch.tensor(position))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def chain(self, tokens, hidden, anchor, depths):
        """States of depths 1..depths at ``anchor``, with x[i + d] as embeddings."""
        caches = [([], []) for _ in self.head.blocks]
        for i in range(anchor):
            self._layers(self._input(tokens[i + 1], hidden[i], i), i, caches)
        states = [hidden[anchor]]
        for depth in range(1, depths + 1):
            position = anchor + depth - 1
            x = self._input(tokens[anchor + depth], states[-1], position)
            states.append(_norm(self._layers(x, position, caches), self.head.post_norm))
        return states[1:]

    def _layers(self, x, position, caches):
        """Through the decoder layers one after the other, each over the keys it has seen and its new one."""
        for layer, (keys, values) in zip(self.head.blocks, caches, strict=True):
            q, k, v = self._qkv(layer, x, position)
            keys.append(k)
            values.append(v)
            group = q.shape[0] // k.shape[0]
            heads = []
            for number in range(q.shape[0]):
                of_head = torch.stack([key[number // group] for key in keys])
                weights = torch.softmax(of_head @ q[number] * self.head.scale, 0)
                heads.append(weights @ torch.stack([value[number // group] for value in values]))
            x = x + layer.self_attn.o_proj.weight @ torch.cat(heads)
            x = x + layer.mlp(_norm(x, layer.post_attention_layernorm))
        return x


def _text(length):
    return torch.randint(3, 280, (length,))


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED.keys())
def test_training_forward_equals_the_plain_definition(model, options):
    head = tiny_heads.random_head(model, DEPTHS, **options)
    texts, prompts = [_text(11), _text(7)], [4, 2]
    hidden = [tiny_heads.backbone_states(model, text, head.middle_layers) for text in texts]
    packed = pack(texts, prompts, DEPTHS)
    table = RotaryTable(model, 64, torch.float32)
    states = head(packed, torch.cat(hidden), model.get_input_embeddings().weight, table)
    reference = Reference(model, head)
    starts = [0, 11]
    checked = 0
    for depth in range(1, DEPTHS + 1):
        for column, teacher in enumerate(packed.teachers.tolist()):
            if not packed.mask[depth - 1, column]:
                continue
            document = int(packed.document[teacher])
            anchor = teacher - starts[document] - depth
            expected = reference.chain(texts[document].tolist(), hidden[document], anchor, depth)[-1]
            actual = states[depth - 1][packed.rows[depth - 1, column]]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked == int(packed.mask.sum()) > 30


def test_the_first_half_of_the_projection_reads_the_embedding(model, head):
    """Swapped halves, or a norm on the wrong branch, would still train: pin the order."""
    embedding, state = torch.randn(32), torch.randn(32)
    before = head.combine(embedding, state)
    head.eh_proj.weight[:, 32:] = 0
    assert torch.allclose(
        head.combine(embedding, state), head.eh_proj.weight[:, :32] @ _norm(embedding, head.enorm), atol=1e-5
    )
    assert not torch.allclose(before, head.combine(embedding, state))


@pytest.mark.parametrize("accepted", range(DEPTHS + 1))
def test_drafting_equals_training_after_every_accept_count(model, head, accepted):
    """Cached = uncached: whatever a round accepted, the next chain is the teacher-forced one."""
    decoder = Decoder(model)
    vocab = DraftVocab(torch.arange(0, 288, 2), 288)
    drafter = SharedDrafter(decoder, TrainedHead(head, vocab, {}))
    text = _text(24)
    hidden = model.model(text[None]).last_hidden_state
    cache = drafter.new_cache(1, 64)
    known = 9  # anchors 0..8 are verified
    state = drafter.observe(text[None, 1 : known + 1], hidden[:, :known], [known], cache)
    for _ in range(2):  # a round drafts wrong tokens, then `accepted` of the true ones are committed
        wrong, chain_state = _text(DEPTHS), state
        for depth in range(2, DEPTHS + 1):
            chain_state = drafter.deepen(wrong[depth - 2 : depth - 1], chain_state, depth, cache)
        count = accepted + 1
        state = drafter.observe(
            text[None, known + 1 : known + 1 + count], hidden[:, known : known + count], [count], cache
        )
        known += count
    expected = Reference(model, head).chain(text.tolist(), hidden[0], known - 1, DEPTHS)
    states = [state]
    for depth in range(2, DEPTHS + 1):
        states.append(drafter.deepen(text[known - 1 + depth][None], states[-1], depth, cache))
    for actual, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(actual[0], wanted, atol=1e-4, rtol=1e-3)
        scores = drafter.logits(actual)[0]
        torch.testing.assert_close(scores, (decoder.lm_head @ wanted)[::2], atol=1e-3, rtol=1e-3)


def test_ragged_rows_draft_as_they_would_alone(model, head):
    decoder = Decoder(model)
    drafter = SharedDrafter(decoder, TrainedHead(head, DraftVocab(torch.arange(288), 288), {}))
    texts = [_text(20), _text(20), _text(20)]
    hidden = torch.stack([model.model(text[None]).last_hidden_state[0] for text in texts])
    tokens = torch.stack(texts)
    counts = [3, 9, 6]
    cache = drafter.new_cache(3, 40)
    state = drafter.observe(tokens[:, 1:10], hidden[:, :9], counts, cache)
    after = torch.stack([text[count + 1] for text, count in zip(texts, counts, strict=True)])
    deeper = drafter.deepen(after, state, 2, cache)
    for row, count in enumerate(counts):
        expected = Reference(model, head).chain(texts[row].tolist(), hidden[row], count - 1, 2)
        torch.testing.assert_close(state[row], expected[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(deeper[row], expected[1], atol=1e-4, rtol=1e-3)
