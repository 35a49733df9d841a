"""Random shared heads for the tiny models, and prompts for them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from selfspec.backbones.decoder import Decoder
from selfspec.decoding.drafter import SharedDrafter
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab


def random_head(model: PreTrainedModel, depths: int = 4, *, seed: int = 0, std: float = 0.2) -> SharedHead:
    """A head without gradients whose every weight matters (norms are not ones); the random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = SharedHead(model, depths).requires_grad_(False)
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            else:
                torch.nn.init.normal_(weight, std=std)
    return head


def trained(model: PreTrainedModel, head: SharedHead, ids: torch.Tensor | None = None) -> TrainedHead:
    """``head`` with the draft vocabulary ``ids`` (default: every token)."""
    size = model.config.vocab_size
    return TrainedHead(head, DraftVocab(torch.arange(size) if ids is None else ids, size), {})


def drafter(decoder: Decoder, model: PreTrainedModel, ids: torch.Tensor | None = None, **options) -> SharedDrafter:
    """A drafter with a random head; ``options`` as in `random_head`."""
    return SharedDrafter(decoder, trained(model, random_head(model, **options), ids))


def prompt(length: int, vocab_size: int = 280, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
