"""Heads of every family: training against the stock layer's own forward, drafting against training, past the window."""

import pytest
import torch

from selfspec.backbones.decoder import Decoder
from selfspec.decoding.drafter import drafter_for
from selfspec.heads import parts
from tests.unit import tiny_heads
from tests.unit.tiny_families import CLASSES, FAMILIES, WINDOW, family

DEPTHS = 3
KINDS = ("shared", "shared-joint-two-layers", "cascade", "cascade-layernorm")
kinds = pytest.mark.parametrize("kind", KINDS)
TEXT = torch.tensor(tiny_heads.prompt(3 * WINDOW, seed=5))


def _head(model, kind):
    return tiny_heads.random_head(model, DEPTHS, **tiny_heads.VARIANTS[kind])


class Stock:
    """Heads by the backbone's own modules: its embedding and rotary modules, and ``forward`` of the heads' layers."""

    def __init__(self, model):
        self.model = model

    def embed(self, index):
        return self.model.get_input_embeddings()(TEXT[index])

    def run(self, layer, x, positions):
        """``layer`` over the sequence ``x [T, H]`` at ``positions``, each seeing itself and all before it."""
        kind = ("full_attention",) if self.model.config.model_type == "gemma3_text" else ()
        embeddings = self.model.model.rotary_emb(x, positions[None], *kind)
        mask = torch.full((len(x), len(x)), torch.finfo(x.dtype).min).triu(1)[None, None]
        out = layer(x[None], position_embeddings=embeddings, attention_mask=mask)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def cascade(self, head, hidden):
        states, state = [], hidden
        for depth, layer in enumerate(head.layers, start=1):
            anchors = torch.arange(len(TEXT) - depth)
            x = layer.combine(self.embed(anchors + depth), state[: len(anchors)])
            state = layer.post_norm(self.run(layer.mtp_block, x, anchors + depth - 1))
            states.append(state)
        return states

    def shared(self, head, hidden):
        anchors = torch.arange(len(TEXT) - 1)
        first = self.embed(anchors + 1)
        first[0] = 0
        first = head.combine(first, hidden[:-1])
        states = [[] for _ in range(DEPTHS)]
        for anchor in range(len(TEXT) - 1):
            sequence = first[: anchor + 1]
            for depth in range(1, min(DEPTHS, len(TEXT) - 1 - anchor) + 1):
                if depth > 1:
                    x = head.combine(self.embed(torch.tensor([anchor + depth])), states[depth - 2][-1][None])
                    sequence = torch.cat([sequence, x])
                x = sequence
                for layer in head.blocks:
                    x = self.run(layer, x, torch.arange(len(x)))
                states[depth - 1].append(head.post_norm(x[-1]))
        return [torch.stack(of_depth) for of_depth in states]


@kinds
@pytest.mark.parametrize("name", FAMILIES)
def test_training_equals_the_stock_layer(name, kind):
    model = family(name)
    head = _head(model, kind)
    hidden, actual = tiny_heads.forced(model, head, TEXT, DEPTHS)
    expected = getattr(Stock(model), head.kind)(head, hidden)
    for depth, (ours, stock) in enumerate(zip(actual, expected, strict=True), start=1):
        anchors = len(TEXT) - 1 - depth  # the last anchor of depth 1 gives no loss and is not run
        torch.testing.assert_close(ours[:anchors], stock[:anchors], atol=3e-5, rtol=1e-5)


@kinds
@pytest.mark.parametrize("name", CLASSES)
def test_drafting_equals_training(name, kind):
    """One row and ragged rows, whatever was accepted before, from within the window to beyond it."""
    model = family(name)
    head = _head(model, kind)
    drafter = drafter_for(Decoder(model), tiny_heads.trained(model, head))
    hidden, expected = tiny_heads.forced(model, head, TEXT, DEPTHS)
    for known in ([1], [WINDOW - 1], [1, WINDOW, 4]):
        cache = drafter.new_cache(len(known), 64)
        rows = len(known)
        state = drafter.observe(TEXT[1:9].expand(rows, -1), hidden[:8].expand(rows, -1, -1), known, cache)
        for number, accepted in enumerate([0, 3, 1, 2]):
            wrong, chain = state, [state]
            for depth in range(2, DEPTHS + 1):
                wrong = drafter.deepen(torch.full((rows,), 7 + number), wrong, depth, cache)
            for depth in range(2, DEPTHS + 1):
                true = TEXT[[anchors + depth - 1 for anchors in known]]
                chain.append(drafter.deepen(true, chain[-1], depth, cache))
            for depth, states in enumerate(chain):
                wanted = expected[depth, [anchors - 1 for anchors in known]]
                torch.testing.assert_close(states, wanted, atol=3e-5, rtol=1e-5)
            counts = [1 + (accepted + row) % 4 for row in range(rows)]
            index = torch.tensor(known)[:, None] + torch.arange(max(counts))
            state = drafter.observe(TEXT[index + 1], hidden[index], counts, cache)
            known = [anchors + count for anchors, count in zip(known, counts, strict=True)]
        assert max(known) > WINDOW


@pytest.mark.parametrize("name", CLASSES)
def test_a_head_s_layer_is_the_backbone_s_with_full_attention(name):
    """Also its start: the rotary base of a layer with a window would not fit the table that heads read."""
    model = family(name)
    layers, types = model.model.layers, getattr(model.config, "layer_types", None)
    layer = parts.new_layer(model)
    assert type(layer) is type(layers[0])
    if types is not None and "sliding_attention" in types:
        assert layer.self_attn.sliding_window is None
    full = len(layers) if types is None else types.count("full_attention")
    into = [parts.new_layer(model) for _ in range(full)]
    parts.copy_last_layers(model, into)
    sources = [index for index in range(len(layers)) if types is None or types[index] == "full_attention"]
    for copied, source in zip(into, sources, strict=True):
        assert torch.equal(copied.mlp.up_proj.weight, layers[source].mlp.up_proj.weight)
    with pytest.raises(ValueError, match=f"layers: got {full + 1}, allowed: at most {full}, .* full attention"):
        parts.copy_last_layers(model, [*into, layer])


def test_heads_of_gemma_read_scaled_embeddings():
    """As its first layer does: what a norm without a weight of its own would hide is seen behind a projection."""
    model = family("gemma3")
    decoder = Decoder(model)
    torch.testing.assert_close(decoder.embed(TEXT), decoder.embedding[TEXT] * 32**0.5)
    assert _head(model, "shared").embedding_scale == pytest.approx(32**0.5)
    assert _head(family("llama"), "cascade").embedding_scale == 1.0
