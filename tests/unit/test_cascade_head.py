"""The cascade's training pass against a plain definition, and its encoder layer against torch's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import MtpLayer

from selfspec.backbones.rotary import RotaryTable, rotate
from selfspec.heads.alignment import pack
from selfspec.heads.attention import attend_causal, layout
from selfspec.heads.encoder import EncoderLayer
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_heads import VARIANTS

DEPTHS = 3
CASCADES = {name: options for name, options in VARIANTS.items() if options["kind"] == "cascade"}


@pytest.fixture
def model():
    return tiny.llama().requires_grad_(False)


def _norm(x, module):
    """By hand, whatever the class: LayerNorm subtracts the mean, RMSNorm does not."""
    if isinstance(module, nn.LayerNorm):
        return (x - x.mean()) / (x.var(unbiased=False) + module.eps).sqrt() * module.weight + module.bias
    return x / (x.square().mean() + module.variance_epsilon).sqrt() * module.weight


class Reference:
    """One anchor, one depth at a time, keys in a list: slow and plain."""

    def __init__(self, model, head):
        self.head = head
        self.table = RotaryTable(model, 64, torch.float32)
        self.embedding = model.get_input_embeddings().weight

    def states(self, tokens, hidden, depths):
        """By depth, the state of every anchor i with x[i + d] in the text."""
        previous, result = list(hidden), []
        for depth, layer in enumerate(self.head.layers[:depths], start=1):
            keys, values, states = [], [], []
            for i in range(len(tokens) - depth):
                e, h = _norm(self.embedding[tokens[i + depth]], layer.enorm), _norm(previous[i], layer.hnorm)
                x = layer.eh_proj.weight @ torch.cat([e, h])
                run = self._encoder if isinstance(layer.mtp_block, EncoderLayer) else self._decoder
                y = run(layer.mtp_block, layer.head_dim, x, i + depth - 1, keys, values)
                states.append(_norm(y, layer.post_norm))
            result.append(states)
            previous = states
        return result

    def _decoder(self, block, size, x, position, keys, values):
        attention, normed = block.self_attn, _norm(x, block.input_layernorm)
        q, k, v = ((p.weight @ normed).view(-1, size) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = self.table.at(torch.tensor(position))
        keys.append(rotate(k, cos, sin))
        values.append(v)
        y = x + attention.o_proj.weight @ _attend(rotate(q, cos, sin), keys, values)
        return y + block.mlp(_norm(y, block.post_attention_layernorm))

    def _encoder(self, block, size, x, position, keys, values):
        q, k, v = (block.in_proj.weight @ _norm(x, block.norm1) + block.in_proj.bias).view(3, -1, size)
        keys.append(k)
        values.append(v)
        y = x + block.out_proj(_attend(q, keys, values))
        return y + block.linear2(F.gelu(block.linear1(_norm(y, block.norm2))))


def _attend(q, keys, values):
    group = q.shape[0] // keys[0].shape[0]
    heads = []
    for number in range(q.shape[0]):
        k = torch.stack([key[number // group] for key in keys])
        v = torch.stack([value[number // group] for value in values])
        heads.append(torch.softmax(k @ q[number] / q.shape[1] ** 0.5, 0) @ v)
    return torch.cat(heads)


@pytest.mark.parametrize("options", CASCADES.values(), ids=CASCADES.keys())
@pytest.mark.parametrize("depths", [1, 2, DEPTHS])
def test_training_forward_equals_the_plain_definition(model, options, depths):
    head = tiny_heads.random_head(model, DEPTHS, **options)
    texts, prompts, starts = [torch.tensor(tiny_heads.prompt(n, seed=n)) for n in (11, 7)], [4, 2], [0, 11]
    hidden = [model.model(text[None]).last_hidden_state[0] for text in texts]
    packed = pack(texts, prompts, depths)
    states = head(packed, torch.cat(hidden), model.get_input_embeddings().weight, RotaryTable(model, 64, torch.float32))
    plain = Reference(model, head)
    expected = [plain.states(text.tolist(), states, depths) for text, states in zip(texts, hidden, strict=True)]
    checked = 0
    for depth in range(1, depths + 1):
        for column, teacher in enumerate(packed.teachers.tolist()):
            if not packed.mask[depth - 1, column]:
                continue
            document = int(packed.document[teacher])
            wanted = expected[document][depth - 1][teacher - starts[document] - depth]
            actual = states[depth - 1][packed.rows[depth - 1, column]]
            torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-3)
            checked += 1
    assert checked == int(packed.mask.sum()) > 10 * depths


def test_each_depth_is_the_layer_that_transformers_runs_under_use_mtp(model):
    """Same names, same concatenation, same state handed on: an export is a renaming."""
    head = tiny_heads.random_head(model, DEPTHS, kind="cascade")
    text = torch.tensor(tiny_heads.prompt(12))
    state, expected = tiny_heads.forced(model, head, text, DEPTHS)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    for depth, layer in enumerate(head.layers, start=1):
        stock = MtpLayer(config, type(model.model.layers[0]), type(model.model.norm), layer_idx=0)
        stock.load_state_dict(layer.state_dict())
        embedded = model.get_input_embeddings()(text[depth:])[None]
        positions = torch.arange(depth, len(text))[None]
        length = len(text) - depth
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        state = stock(
            embedded,
            state[None, :length],
            position_embeddings=model.model.rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )[0]
        reached = min(length, expected.shape[1])
        torch.testing.assert_close(expected[depth - 1, :reached], state[:reached], atol=1e-4, rtol=1e-3)


def test_the_encoder_layer_is_torch_s():
    torch.manual_seed(0)
    layer = EncoderLayer(32, 4, 48)
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    stock = nn.TransformerEncoderLayer(32, 4, 48, **options)
    for norm in (layer.norm1, layer.norm2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    names = {"self_attn.in_proj_": "in_proj.", "self_attn.out_proj": "out_proj"}
    weights = layer.state_dict()
    for name, tensor in stock.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensor.copy_(weights.pop(name))
    assert not weights
    x = torch.randn(9, 32)
    packed = pack([torch.arange(9)], [1], 1)
    q, k, v, gate = layer.qkv(x, x, x)
    actual = layer.finish(x, attend_causal(q, k, v, layout(packed), 8**-0.5), gate)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(actual, stock(x[None], src_mask=mask, is_causal=True)[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.kv(x, x, x), (k, v), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="its 5 heads divide, got 32"):
        EncoderLayer(32, 5, 48)
