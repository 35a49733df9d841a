"""Tiny models that ship an MTP head, made of ``transformers``' own ``MtpLayer`` and named by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from selfspec.backbones.block import full_attention_layers
from tests.unit import tiny
from tests.unit.tiny_families import norm_range

# Families in `tiny_families` that ship heads: the format they are in.
FORMS = {"mimo": "mimo", "qwen3_5-attention": "qwen3_5", "qwen3_5": "qwen3_5", "qwen3_next": "qwen3_5"}
# By format: the names of MtpLayer's parts, and the prefix of its decoder layer's.
PARTS = {
    "mimo": {
        "enorm.weight": "model.mtp_layers.0.token_layernorm.weight",
        "hnorm.weight": "model.mtp_layers.0.hidden_layernorm.weight",
        "eh_proj.weight": "model.mtp_layers.0.input_proj.weight",
        "post_norm.weight": "model.mtp_layers.0.final_layernorm.weight",
        "mtp_block.": "model.mtp_layers.0.",
    },
    "qwen3_5": {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "post_norm.weight": "mtp.norm.weight",
        "mtp_block.": "mtp.layers.0.",
    },
}


def stock(model: PreTrainedModel, form: str, dtype: torch.dtype = torch.float32) -> MtpLayer:
    """``transformers``' layer in the column order of ``form``; random values that ``dtype`` holds."""
    decoder: Any = model.get_decoder()
    layer = full_attention_layers(model)[0]
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    config.mtp_hidden_states_first = form == "mimo"
    mtp = MtpLayer(config, type(decoder.layers[layer]), type(decoder.norm), layer)
    generator = torch.Generator().manual_seed(3)
    for name, weight in mtp.named_parameters():
        drawn = torch.rand(weight.shape, generator=generator) - 0.5
        middle = norm_range(model)[0] + 0.5 if "norm" in name else 0.0
        weight.data = (middle + drawn).to(dtype).float()
    return mtp.requires_grad_(False).eval()


def named(mtp: MtpLayer, form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Its tensors under the names that models of ``form`` ship them."""
    parts, tensors = PARTS[form], {}
    for name, tensor in mtp.state_dict().items():
        native = parts[name] if name in parts else parts["mtp_block."] + name.removeprefix("mtp_block.")
        tensors[native] = tensor.to(dtype)
    return tensors


def ship(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], how: str = "single") -> Path:
    """Write model, tokenizer and head to ``folder``.

    Args:
        how: ``single``: one file; ``beside``: the head in mtp.safetensors; ``sharded``: several files and an
            index; ``indexed``: the head in mtp.safetensors, which the index names.
    """
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if how == "sharded" else {}))
    tiny.tokenizer().save_pretrained(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if how == "single":
        save_file(load_file(single) | tensors, single, {"format": "pt"})
    elif how == "sharded":
        listed = json.loads(index.read_text())
        half = len(tensors) // 2
        for number, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
            file = sorted(set(listed["weight_map"].values()))[number]
            save_file(
                load_file(folder / file) | {name: tensors[name] for name in names}, folder / file, {"format": "pt"}
            )
            listed["weight_map"] |= dict.fromkeys(names, file)
        index.write_text(json.dumps(listed))
    else:
        save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
        if how == "indexed":
            places = dict.fromkeys(load_file(single), single.name) | dict.fromkeys(tensors, "mtp.safetensors")
            index.write_text(json.dumps({"weight_map": places}))
    return folder
