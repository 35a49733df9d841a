"""Tiny random causal LMs in Hugging Face layout, so that tests run the real loading code offline."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Printable pairs that English has most of: enough merges that a token is not just a byte.
_MERGES = ["Ġ t", "h e", "Ġ a", "i n", "o n", "e r", "Ġt he", "r e", "a t", "Ġ s", "e s", "o r", "Ġ w", "i s", "l e"]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 274 tokens with ChatML turns: it writes any text and reads it back."""
    pieces = [END_OF_TEXT, TURN_START, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [tuple(merge.split(" ")) for merge in _MERGES]
    pieces += ["".join(pair) for pair in pairs]
    inner = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=TURN_END,
        unk_token=END_OF_TEXT,
        chat_template=CHATML,
        model_max_length=512,
    )


def llama_config(*, tied: bool = True, kv_heads: int = 2, vocab_size: int = 288, **changes: object) -> LlamaConfig:
    """Two layers, four heads of eight; ``vocab_size`` is padded beyond the tokenizer's, as real ones are."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.2,  # wide enough for argmaxes that do not depend on rounding
    }
    return LlamaConfig(**{**sizes, **changes})


def llama(*, seed: int = 0, **options: object) -> LlamaForCausalLM:
    """A random model in float32 and eval mode; ``options`` as in `llama_config`.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama_config(**options))
        # Fresh norms are all ones: a norm applied twice, or not at all, would go unseen.
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def save(folder: Path, **options: object) -> Path:
    """Write model and tokenizer to ``folder``, fit for ``backbone.uri: file:<folder>``."""
    llama(**options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
