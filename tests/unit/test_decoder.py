"""Our forward pass against transformers' own, with caches of any raggedness."""

import re

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from selfspec.backbones import middle
from selfspec.backbones.block import SUPPORTED_MODEL_TYPES, check_supported, norm_function
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.load import BackboneError, load_model
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import BackboneConfig
from selfspec.heads.shared import SharedHead
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_families import CLASSES, FAMILIES, WINDOW, family, rounding

WINDOWED = [name for name, (_, options) in FAMILIES.items() if options.get("sliding_window")]


@pytest.fixture(params=FAMILIES, ids=str)
def model(request):
    return family(request.param)


def _reference(model, ids):
    return model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]


def _close(actual, expected, model):
    torch.testing.assert_close(actual, expected, atol=rounding(model), rtol=1e-5)


def test_prefill_and_ragged_continuation_equal_transformers(model):
    """Texts and steps on both sides of the window, and across it."""
    decoder = Decoder(model)
    texts = [tiny_heads.prompt(length, seed=length) for length in (31, 12, 20)]
    cut = [20, 1, 9]
    cache, hidden = decoder.prefill([text[:n] for text, n in zip(texts, cut, strict=True)], 40)
    for text, n, states in zip(texts, cut, hidden, strict=True):
        _close(states, _reference(model, text)[:n], model)
    # Rows of different lengths go on together, keep different counts, and go on again.
    decoder.forward(torch.tensor([text[n : n + 5] for text, n in zip(texts, cut, strict=True)]), cache)
    kept = [0, 5, 2]
    cache.advance(kept)
    start = [n + k for n, k in zip(cut, kept, strict=True)]
    again = decoder.forward(torch.tensor([text[s : s + 6] for text, s in zip(texts, start, strict=True)]), cache)
    for text, s, states in zip(texts, start, again, strict=True):
        expected = _reference(model, text)
        _close(states, expected[s : s + 6], model)
        logits = decoder.logits(states)
        torch.testing.assert_close(logits, model.lm_head(expected[s : s + 6]), atol=5 * rounding(model), rtol=1e-5)


@pytest.mark.parametrize("steps", [[1] * 30, [3] * 10, [WINDOW - 1, WINDOW, WINDOW + 1, 6]], ids=["1", "3", "window"])
@pytest.mark.parametrize("prompt", [1, WINDOW, 2 * WINDOW])
def test_steps_of_one_row_equal_transformers(model, prompt, steps):
    decoder = Decoder(model)
    text = tiny_heads.prompt(prompt + sum(steps))
    expected = _reference(model, text)
    cache, (states,) = decoder.prefill([text[:prompt]], len(text))
    _close(states, expected[:prompt], model)
    for count in steps:
        done = cache.lengths[0]
        states = decoder.forward(torch.tensor([text[done : done + count]]), cache)[0]
        _close(states, expected[done : done + count], model)
        cache.advance([count])


@pytest.mark.parametrize("name", WINDOWED)
def test_the_windows_under_test_hide_something(name):
    text = tiny_heads.prompt(WINDOW + 1)
    wide = family(name, sliding_window=64)
    difference = (_reference(family(name), text) - _reference(wide, text)).abs().amax(-1)
    assert difference[:WINDOW].max() < 1e-5
    assert difference[WINDOW] > 1e-2


@pytest.mark.parametrize("layers", [[1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_middle_states_are_transformers_own_over_their_root_mean_square(name, layers):
    """hidden_states[n] of transformers is what layer n gave, counted from 1; ragged rows, cached steps."""
    model = family(name)
    plain, decoder = Decoder(model), Decoder(model, middle_layers=layers)
    assert (plain.state_width, decoder.state_width) == (32, 32 * (1 + len(layers)))
    texts = [torch.tensor(tiny_heads.prompt(length, seed=length)) for length in (20, 12)]
    cut = [15, 3]
    cache, hidden = decoder.prefill([text[:n].tolist() for text, n in zip(texts, cut, strict=True)], 40)
    steps = decoder.forward(torch.stack([text[n : n + 5] for text, n in zip(texts, cut, strict=True)]), cache)
    for text, n, before, after in zip(texts, cut, hidden, steps, strict=True):
        expected = tiny_heads.backbone_states(model, text, layers)
        _close(torch.cat([before, after]), expected[: n + 5], model)
        beside = expected[:, 32:].unflatten(-1, (len(layers), 32))
        torch.testing.assert_close(beside.square().mean(-1), torch.ones(len(text), len(layers)), atol=1e-4, rtol=0)
        assert torch.equal(decoder.logits(after), plain.logits(after[:, :32].contiguous()))
        torch.testing.assert_close(decoder.logits(after), model.lm_head(expected[n : n + 5, :32]), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_pass_through_normalised_middle_states(dtype):
    """Layers below a middle one may be trained."""
    x = (torch.randn(3, 8) * 5).to(dtype)
    x[2] = 0
    ours, plain = x.clone().requires_grad_(), x.float().requires_grad_()
    slope = torch.randn(3, 8)
    normalised = middle.normalised(ours)
    expected = plain / (plain.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    assert normalised.dtype == dtype
    torch.testing.assert_close(normalised.float(), expected, **close)
    (normalised * slope.to(dtype)).sum().backward()
    (expected * slope.to(dtype).float()).sum().backward()
    torch.testing.assert_close(ours.grad[:2].float(), plain.grad[:2], **close)
    assert ours.grad.isfinite().all()


@pytest.mark.parametrize("layers", [[0], [4], [1, 4], [2, 1], [2, 2]], ids=str)
def test_middle_layers_that_the_backbone_lacks_are_refused(layers):
    expected = (
        rf"^head\.middle_layers: got {re.escape(str(layers))}; allowed: ascending numbers from 1, below 4, the last "
        r"layer of this backbone, after which comes the final state; choose others, or \[\] for none$"
    )
    model = tiny.llama(num_hidden_layers=4)
    with pytest.raises(BackboneError, match=expected):
        Decoder(model, middle_layers=layers)
    with pytest.raises(BackboneError, match=expected):
        SharedHead(model, 2, middle_layers=layers)


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
    with pytest.raises(BackboneError, match=r"'gpt2' is not supported: .* no MLPs without a gate; allowed: gemma3"):
        Decoder(model)


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        ("Qwen3NextConfig", "no mixture-of-experts MLPs"),
        ("Qwen3_5MoeTextConfig", "no mixture-of-experts MLPs"),
        ("Qwen3_5Config", "no encoder of images or sounds around a text model of type 'qwen3_5_text'"),
        ("MambaConfig", "no state-space layers"),
        ("MixtralConfig", "no mixture-of-experts MLPs"),
        ("Qwen3MoeConfig", "no mixture-of-experts MLPs"),
        ("DeepseekV3Config", r"no latent attention \(MLA\)"),
        ("BloomConfig", "no alibi positions"),
        ("PhiConfig", "no MLPs without a gate"),
        ("Gemma2Config", "no soft-capped scores"),
        ("Gemma3Config", "no encoder of images or sounds around a text model of type 'gemma3_text'"),
        ("Olmo2Config", "no layer of its kind"),
    ],
)
def test_an_unsupported_family_is_refused_with_what_it_lacks_here(config, lacking):
    config = getattr(transformers, config)()
    with pytest.raises(
        BackboneError, match=f"model type '{config.model_type}' is not supported: .*{lacking}"
    ) as caught:
        check_supported(config)
    line = str(caught.value)
    assert line.endswith("allowed: " + ", ".join(SUPPORTED_MODEL_TYPES))
    assert "\n" not in line


@pytest.mark.parametrize(
    ("option", "lacking"),
    [
        ({"final_logit_softcapping": 30.0}, "soft-capped scores"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped scores"),
        ({"use_bidirectional_attention": True}, "attention to later positions"),
    ],
)
def test_options_of_a_supported_family_that_change_the_forward_are_refused(option, lacking):
    with pytest.raises(BackboneError, match=f"'gemma3_text' is not supported: this decoder has no {lacking}"):
        check_supported(Gemma3TextConfig(**option))


def test_any_experts_and_linear_attention_alone_are_refused():
    """Qwen3-Next is supported without experts, however a config says so, and linear attention beside full attention."""
    check_supported(Qwen3NextConfig(num_experts=0))
    check_supported(Qwen3NextConfig(num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3]))
    with pytest.raises(BackboneError, match=r"'qwen3_next' is not supported: .* no mixture-of-experts MLPs"):
        check_supported(Qwen3NextConfig(num_hidden_layers=4, mlp_only_layers=[0, 1, 2]))
    linear = Qwen3_5TextConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    with pytest.raises(BackboneError, match="no linear attention without a layer of full"):
        check_supported(linear)


def test_a_checkpoint_with_an_encoder_of_images_is_loaded_as_its_text_model(tmp_path):
    """As Qwen3.5 is published: the encoder stays on disk, and the text model is of a supported type."""
    text = family("qwen3_5").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path)
    model = load_model(BackboneConfig(uri=f"file:{tmp_path}", name="tiny", license="MIT", dtype="float32"))
    assert model.config.model_type == "qwen3_5_text"
    decoder, ids = Decoder(model), tiny_heads.prompt(20)
    _, (states,) = decoder.prefill([ids], 20)
    expected = whole(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(decoder.logits(states), expected, atol=5 * rounding(model), rtol=1e-5)


# Rotary tables


def test_a_scaling_that_depends_on_the_length_is_refused():
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    with pytest.raises(BackboneError, match=r"rope_type 'longrope' of model type 'llama' .*allowed: default, dynamic"):
        check_supported(LlamaConfig(rope_parameters={**rope, "original_max_position_embeddings": 1024}))


def test_dynamic_scaling_is_static_up_to_the_trained_length():
    model = family("llama-rope-dynamic", max_position_embeddings=32)
    text = tiny_heads.prompt(32)
    expected = _reference(model, text)
    _reference(model, tiny_heads.prompt(60))  # the stock module rescales itself on the way
    decoder = Decoder(model)
    _, (states,) = decoder.prefill([text], 32)
    _close(states, expected, model)
    assert decoder.max_positions == 32
    with pytest.raises(BackboneError, match=r"'dynamic' .* max_position_embeddings = 32, 33 asked; shorten"):
        RotaryTable(model, 33, torch.float32)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cast_model_keeps_its_frequencies(name):
    exact = RotaryTable(family(name), 200, torch.float32)
    cast = RotaryTable(family(name).to(torch.bfloat16), 200, torch.float32)
    assert torch.equal(exact.cos, cast.cos)
    assert torch.equal(exact.sin, cast.sin)


def test_heads_read_the_positions_of_full_attention():
    model = family("gemma3")
    sliding, full, own = (RotaryTable(model, 64, torch.float32, layer) for layer in (0, 1, None))
    assert torch.equal(own.cos, full.cos)
    assert torch.equal(own.cos, Decoder(model).rotary.cos[:64])
    assert not torch.allclose(own.cos, sliding.cos, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_where_gemma_rounds_them(dtype):
    """1 + weight is not rounded and the norm's result is, once; the embedding scale is."""
    model = family("gemma3").to(dtype)
    x = torch.randn(500, 32).to(dtype)
    ours, stock = norm_function(model.model.norm, dtype)(x), model.model.norm(x)
    assert ours.dtype == dtype
    assert (ours != stock).float().mean() < 1e-3  # sums in another order are the only difference
    tokens = torch.arange(288)
    assert torch.equal(Decoder(model).embed(tokens), model.model.embed_tokens(tokens))
