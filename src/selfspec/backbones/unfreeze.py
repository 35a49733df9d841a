"""A backbone whose last layers are trained too: which weights those are, and how they are kept.

Only what was trained is written (``save``): the backbone itself stays where it is, and ``apply`` lays the
trained weights over a freshly loaded one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.backbones.load import BackboneError, input_embeddings
from selfspec.resources import atomic_path

FILE = "backbone.safetensors"
"""Beside a head's own files."""


def unfreeze(model: PreTrainedModel, layers: int) -> dict[str, nn.Parameter]:
    """Let the last ``layers`` decoder layers, the final norm and the lm_head be trained.

    A tied lm_head becomes a copy of its own: the embeddings, which the frozen layers read, stay as they are.

    Returns:
        The parameters by their names in the model.

    Raises:
        BackboneError: more layers than there are.
    """
    inner: Any = model.get_decoder()
    if layers > len(inner.layers):
        raise BackboneError(
            f"train.unfrozen_layers: got {layers}; allowed: at most {len(inner.layers)}, the layers that the "
            "backbone has; lower it"
        )
    untie(model)
    chosen: list[Any] = [*inner.layers[len(inner.layers) - layers :], inner.norm, model.get_output_embeddings()]
    for module in chosen:
        module.requires_grad_(True)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def untie(model: PreTrainedModel) -> None:
    """Give a tied lm_head weights of its own."""
    head: Any = model.get_output_embeddings()
    if head.weight is input_embeddings(model):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def save(directory: Path, weights: dict[str, Tensor]) -> None:
    """Write trained backbone weights, float32, by their names in the model."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_path(directory / FILE) as partial:
        save_file({name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}, partial)


def changed(directory: Path) -> bool:
    """Whether the head in ``directory`` was trained together with its backbone."""
    return (directory / FILE).is_file()


def apply(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Lay the weights kept in ``directory`` over the model, in its dtype; nothing where there are none.

    Returns:
        The float32 weights as they were kept.

    Raises:
        BackboneError: they are of another model.
    """
    if not changed(directory):
        return {}
    kept = load_file(directory / FILE)
    untie(model)
    own = dict(model.named_parameters())
    for name, weight in kept.items():
        if name not in own or own[name].shape != weight.shape:
            raise BackboneError(f"{directory / FILE}: {name} does not fit this backbone; train it again")
        with torch.no_grad():
            own[name].copy_(weight)
    return kept
