"""Our forward pass against transformers' own, with caches of any raggedness."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.load import BackboneError
from tests.unit import tiny

SIZES = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": lambda: tiny.llama(),
    "llama_untied": lambda: tiny.llama(tied=False),
    "llama_no_gqa": lambda: tiny.llama(kv_heads=4),
    "llama_biases": lambda: tiny.llama(attention_bias=True, mlp_bias=True),
    "llama_scaled_rope": lambda: tiny.llama(
        rope_parameters={**SCALED, "original_max_position_embeddings": 64}, max_position_embeddings=512
    ),
    "qwen2": lambda: AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).eval(),
    "qwen3": lambda: AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16)).eval(),
}


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    torch.manual_seed(0)
    built = MODELS[request.param]().requires_grad_(False)
    for name, weight in built.named_parameters():
        if name.endswith("bias"):  # fresh biases are zeros: one left out would go unseen
            torch.nn.init.normal_(weight)
    return built


def _reference(model, ids):
    return model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]


def test_prefill_and_ragged_continuation_equal_transformers(model):
    decoder = Decoder(model)
    texts = [torch.randint(3, 280, (length,)).tolist() for length in (31, 12, 20)]
    cut = [20, 1, 9]
    cache, hidden = decoder.prefill([text[:n] for text, n in zip(texts, cut, strict=True)], 40)
    for text, n, states in zip(texts, cut, hidden, strict=True):
        torch.testing.assert_close(states, _reference(model, text)[:n], atol=2e-4, rtol=1e-3)
    # Rows of different lengths go on together, keep different counts, and go on again.
    decoder.forward(torch.tensor([text[n : n + 5] for text, n in zip(texts, cut, strict=True)]), cache)
    kept = [0, 5, 2]
    cache.advance(kept)
    start = [n + k for n, k in zip(cut, kept, strict=True)]
    again = decoder.forward(torch.tensor([text[s : s + 6] for text, s in zip(texts, start, strict=True)]), cache)
    for text, s, states in zip(texts, start, again, strict=True):
        expected = _reference(model, text)
        torch.testing.assert_close(states, expected[s : s + 6], atol=2e-4, rtol=1e-3)
        logits = decoder.logits(states)
        torch.testing.assert_close(logits, model.lm_head(expected[s : s + 6]), atol=1e-3, rtol=1e-3)


def test_rows_can_be_dropped_and_replaced():
    model = tiny.llama()
    decoder = Decoder(model)
    texts = [torch.randint(3, 280, (n,)).tolist() for n in (9, 14, 11)]
    cache, _ = decoder.prefill([text[:-1] for text in texts], 32)
    other = torch.randint(3, 280, (13,)).tolist()
    fresh, _ = decoder.prefill([other[:-1]], 13)
    cache = cache.select([2, 0])
    cache.copy_rows(fresh, [1])
    last = torch.tensor([[texts[2][-1]], [other[-1]]])
    out = decoder.forward(last, cache)
    for states, text in zip(out, (texts[2], other), strict=True):
        torch.testing.assert_close(states[0], _reference(model, text)[-1], atol=2e-4, rtol=1e-3)


def test_a_full_cache_says_so():
    decoder = Decoder(tiny.llama())
    cache, _ = decoder.prefill([[5, 6, 7]], 4)
    with pytest.raises(ValueError, match="cache holds 4 tokens a row, 5 needed"):
        decoder.forward(torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="9999 positions"):
        decoder.new_cache(1, 9999)


def test_an_unknown_family_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    with pytest.raises(BackboneError, match="'gpt2' has no block adapter; supported: llama"):
        Decoder(model)


def test_sliding_windows_are_refused_not_ignored():
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16)
    with pytest.raises(BackboneError, match="sliding-window"):
        Decoder(AutoModelForCausalLM.from_config(config))
