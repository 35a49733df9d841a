"""The builders that other tests stand on: what they write, the real loaders read."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit import tiny


def test_the_tokenizer_reads_back_what_it_writes():
    text = "The other one is at 3 °C, λ = 0.5\n\tprint('häßlich')"
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_chat_turn_ends_in_the_end_of_sequence_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny.save(tmp_path / "model"))
    turn = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == 1
    assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"kv_heads": 4}, {"kv_heads": 1, "tied": False}])
def test_a_saved_model_loads_to_the_same_logits(tmp_path, options):
    model = tiny.llama(**options)
    loaded = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "model", **options), dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == options.get("tied", True)


def test_the_seed_decides_the_weights_and_nothing_else_does():
    first = tiny.llama(seed=1).model.embed_tokens.weight
    torch.rand(1)
    assert torch.equal(first, tiny.llama(seed=1).model.embed_tokens.weight)
    assert not torch.equal(first, tiny.llama(seed=2).model.embed_tokens.weight)
