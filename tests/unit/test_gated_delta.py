"""Linear attention: our closed forms against the token-by-token recurrence, and what is kept of a draft."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.gated_delta import DeltaStates, Steps, gated_delta, written
from tests.unit import tiny_heads
from tests.unit.tiny_families import family

FAMILIES = ("qwen3_5", "qwen3_5-tied-no-groups", "qwen3_next")


def _inputs(time, rows=3, heads=2, key_dim=8, value_dim=6, decay=1.0):
    """Queries, keys, values, log decays and strengths of `gated_delta`, and a state to start from."""
    generator = torch.Generator().manual_seed(time)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(noise(rows, heads, time, key_dim), dim=-1) for _ in range(2))
    v, state = noise(rows, heads, time, value_dim), noise(rows, heads, key_dim, value_dim)
    g = -decay * noise(rows, heads, time).exp()
    return q, k, v, g, noise(rows, heads, time).sigmoid(), state


def _recurrence(q, k, v, g, beta, state):
    """Outputs and last state of transformers' loop over tokens, which takes time before heads and scales queries."""
    by_time = [tensor.transpose(1, 2) for tensor in (q * q.shape[-1] ** 0.5, k, v, g, beta)]
    out, last = torch_recurrent_gated_delta_rule(
        *by_time[:3], g=by_time[3], beta=by_time[4], initial_state=state, output_final_state=True
    )
    return out.transpose(1, 2), last


@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("time", [1, 2, 5, 63, 64, 65, 200])
def test_the_rule_equals_the_recurrence(time, decay):
    *inputs, state = _inputs(time, decay=decay)
    before = state.clone()
    expected, last = _recurrence(*inputs, state)
    out, u = gated_delta(*inputs, state)
    assert torch.equal(state, before)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(written(state, inputs[1], u, inputs[3]), last, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("time", [1, 4, 100])
def test_each_row_commits_its_own_count(time):
    *inputs, state = _inputs(time, rows=time + 1)
    counts = torch.arange(time + 1)
    _, u = gated_delta(*inputs, state)
    convolved = torch.arange(3 + time).expand(time + 1, -1)[..., None].float()
    states = DeltaStates(state, torch.zeros(time + 1, 3, 1))
    states.pending = Steps(inputs[1], u, inputs[3], convolved)
    states.commit(counts)
    for row in range(time + 1):
        _, last = _recurrence(*(part[row : row + 1, :, :row] for part in inputs), state[row : row + 1])
        torch.testing.assert_close(states.memory[row : row + 1], last, atol=1e-5, rtol=1e-4)
        assert states.window[row, :, 0].tolist() == [row, row + 1, row + 2]
    assert torch.equal(states.memory[0], state[0])
    memory = states.memory
    states.commit(counts)  # nothing is written twice
    assert states.memory is memory


@pytest.mark.parametrize("name", FAMILIES)
def test_long_ragged_prompts_and_long_drafts_equal_transformers(name):
    """Texts of several chunks, in one forward pass and in two, of which each row keeps another part."""
    model = family(name)
    decoder = Decoder(model)
    texts = [tiny_heads.prompt(length, seed=length) for length in (230, 131, 3)]
    expected = [model.model(torch.tensor([text + tiny_heads.prompt(10)])).last_hidden_state[0] for text in texts]
    cache, hidden = decoder.prefill(texts, 256)
    for states, wanted in zip(hidden, expected, strict=True):
        torch.testing.assert_close(states, wanted[: len(states)], atol=2e-4, rtol=1e-4)
    split = decoder.new_cache(3, 256)
    kept = [100, 64, 2]
    decoder.forward(torch.tensor([(text * 100)[:100] for text in texts]), split)
    split.advance(kept)
    rest = [text[count:] for text, count in zip(texts, kept, strict=True)]
    padded = torch.tensor([text + [0] * (130 - len(text)) for text in rest])
    decoder.forward(padded, split, [len(text) for text in rest])
    assert split.lengths == cache.lengths == [230, 131, 3]
    for ours, theirs in zip(split.recurrent, cache.recurrent, strict=True):
        torch.testing.assert_close(ours.memory, theirs.memory, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(ours.window, theirs.window, atol=1e-4, rtol=1e-3)
    following = torch.tensor([tiny_heads.prompt(10)] * 3)
    for continued in (cache, split):
        for states, wanted in zip(decoder.forward(following, continued), expected, strict=True):
            torch.testing.assert_close(states, wanted[-10:], atol=2e-4, rtol=1e-4)


def test_rows_can_be_dropped_replaced_and_cleared():
    model = family("qwen3_5")
    decoder = Decoder(model)
    texts = [tiny_heads.prompt(length, seed=length) for length in (9, 14, 11)]
    other = tiny_heads.prompt(13, seed=1)
    cache, _ = decoder.prefill([text[:-1] for text in texts], 32)
    fresh, _ = decoder.prefill([other[:-1]], 13)
    cache = cache.select([2, 0, 1])
    with torch.inference_mode():
        cache.copy_rows(fresh, [1])
    cache.clear(2)
    assert cache.lengths == [10, 12, 0]
    out = decoder.forward(torch.tensor([[texts[2][-1]], [other[-1]], [7]]), cache)
    for states, text in zip(out, (texts[2], other, [7]), strict=True):
        wanted = model.model(torch.tensor([text])).last_hidden_state[0, -1]
        torch.testing.assert_close(states[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_the_stock_model(name):
    text = tiny_heads.prompt(40)
    exact = family(name).model(torch.tensor([text])).last_hidden_state[0]
    rounded = family(name).to(torch.bfloat16)
    stock = rounded.model(torch.tensor([text])).last_hidden_state[0]
    _, (ours,) = Decoder(rounded).prefill([text], 64)
    assert ours.dtype == torch.bfloat16
    errors = [(states.float() - exact).square().mean().sqrt() for states in (ours, stock)]
    assert errors[0] < 1.25 * errors[1]
