"""Random heads of every type for the tiny models, and prompts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable
from selfspec.decoding.drafter import Drafter, drafter_for
from selfspec.heads.alignment import pack
from selfspec.heads.build import construct
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.vocab import DraftVocab
from tests.unit.tiny_families import norm_range

# Every type, and every option away from its default at least once: `kind` and options of `random_head`.
VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {"kind": "shared"},
    "shared-joint": {"kind": "shared", "norms": "joint"},
    "shared-two-layers": {"kind": "shared", "layers": 2},
    "shared-joint-two-layers": {"kind": "shared", "norms": "joint", "layers": 2},
    "shared-middle": {"kind": "shared", "middle_layers": [1]},
    "shared-joint-middle": {"kind": "shared", "norms": "joint", "layers": 2, "middle_layers": [1]},
    "cascade": {"kind": "cascade"},
    "cascade-layernorm": {"kind": "cascade", "branch_norm": "layernorm"},
    "cascade-encoder-own": {"kind": "cascade", "branch_norm": "layernorm", "block": "encoder", "output": "own"},
    "parallel": {"kind": "parallel"},
    "parallel-own-two-layers": {"kind": "parallel", "layers": 2, "output": "own"},
}


def random_head(
    model: PreTrainedModel,
    depths: int = 4,
    *,
    seed: int = 0,
    std: float = 0.2,
    kind: str = "shared",
    ids: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """A head without gradients whose every weight matters (norms are not ones); the random state is left as it was.

    Own output rows are for the draft vocabulary ``ids``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = construct(kind, model, depths, vocabulary(model, ids), options).requires_grad_(False)
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, *norm_range(model))
            elif "lm_heads" in name:
                weight.add_(torch.randn_like(weight), alpha=std / 4)
            else:
                torch.nn.init.normal_(weight, std=std)
    return head


def vocabulary(model: PreTrainedModel, ids: torch.Tensor | None = None) -> DraftVocab:
    """The draft vocabulary ``ids`` (default: every token)."""
    size = model.config.vocab_size
    return DraftVocab(torch.arange(size) if ids is None else ids, size)


def trained(model: PreTrainedModel, head: Any, ids: torch.Tensor | None = None) -> TrainedHead:
    """``head`` with the draft vocabulary ``ids`` (default: every token)."""
    return TrainedHead(head, vocabulary(model, ids), {})


def drafter(decoder: Decoder, model: PreTrainedModel, ids: torch.Tensor | None = None, **options: Any) -> Drafter:
    """A drafter with a random head; ``options`` as in `random_head`."""
    return drafter_for(decoder, trained(model, random_head(model, ids=ids, **options), ids))


def decoder_for(model: PreTrainedModel, options: dict[str, Any]) -> Decoder:
    """A decoder that gives what a head of ``options`` reads."""
    return Decoder(model, middle_layers=options.get("middle_layers", ()))


def backbone_states(model: PreTrainedModel, text: torch.Tensor, middle_layers: Sequence[int] = ()) -> torch.Tensor:
    """``[T, W]`` states of ``text [T]`` as stock transformers has them, those of middle layers normalised beside."""
    out = model.get_decoder()(text[None], output_hidden_states=True)
    middle = [out.hidden_states[layer][0] for layer in middle_layers]
    unit = [state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt() for state in middle]
    return torch.cat([out.last_hidden_state[0], *unit], dim=-1)


def forced(model: PreTrainedModel, head: Any, text: torch.Tensor, depths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The backbone's states ``[T, W]`` of ``text`` and training's ``[K, T - 2, H]``, by depth and anchor."""
    hidden = backbone_states(model, text, head.middle_layers)
    packed = pack([text], [1], depths)  # a prompt of one token: every anchor is active
    assert packed.anchors.tolist() == list(range(len(text) - 2))
    states = head(packed, hidden, model.get_input_embeddings().weight, RotaryTable(model, 128, torch.float32))
    return hidden, torch.stack(states)


def prompt(length: int, vocab_size: int = 280, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
