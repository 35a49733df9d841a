"""A head's weights arranged for drafting: norms as functions, output rows, and what they occupy."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from selfspec.backbones.block import BlockLike, Function, FusedBlock, norm_function
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.linear import Linear
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.encoder import EncoderLayer


def norm(module: nn.Module, dtype: torch.dtype) -> Function:
    """``module`` (an RMSNorm of the backbone's class, or a LayerNorm) as a function of the state alone."""
    if isinstance(module, nn.LayerNorm):
        weight, bias = module.weight.detach().to(dtype), module.bias.detach().to(dtype)
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=module.eps)
    return norm_function(module, dtype)


def block(layer: nn.Module, head_dim: int, dtype: torch.dtype) -> BlockLike:
    """A decoder layer with merged projections, or an encoder layer in ``dtype``."""
    if isinstance(layer, EncoderLayer):
        return copy.deepcopy(layer).requires_grad_(False).to(dtype)
    return FusedBlock(layer, head_dim, dtype)


def scorers(decoder: Decoder, head: TrainedHead) -> list[Function]:
    """By depth, what gives ``[..., draft_vocab]`` scores of states: own rows, or the backbone's for all depths."""
    own = [head.module.output_rows(depth) for depth in range(head.module.depths)]
    rows = [tensor for tensor in own if tensor is not None]
    if rows:
        return [Linear(tensor.detach().to(decoder.dtype)) for tensor in rows]
    shared: Function = decoder.logits if head.vocab.whole else Linear(head.vocab.rows(decoder.lm_head))
    return [shared] * len(own)


def nbytes(decoder: Decoder, head: TrainedHead) -> int:
    """Memory a head adds: its weights, and its copy of the backbone's output rows where it needs one."""
    size = decoder.dtype.itemsize
    weights = sum(parameter.numel() for parameter in head.module.parameters())
    copied = 0
    if head.module.output_rows(0) is None and not head.vocab.whole:
        copied = len(head.vocab) * decoder.lm_head.shape[1]
    return (weights + copied) * size
