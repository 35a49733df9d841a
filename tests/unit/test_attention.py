"""Chain attention of the training passes against its definition: a mask over all keys and a plain softmax."""

import pytest
import torch

from selfspec.heads.alignment import pack
from selfspec.heads.attention import attend_causal, attend_chains, layout


def chain_mask(anchors, keys, depth):
    """What serving sees: depth-1 keys of positions up to the anchor, and of later depths its own chain's."""
    first = torch.arange(keys) <= anchors[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool)
    return torch.cat([first] + [own] * (depth - 1), dim=1)


def test_the_definition_on_a_case_by_hand():
    depth_one = [[True, True, False, False], [True, True, True, False]]
    own = [[True, False], [False, True]]
    expected = [a + b + b for a, b in zip(depth_one, own, strict=True)]
    assert chain_mask(torch.tensor([1, 2]), keys=4, depth=3).tolist() == expected


def plain(q, keys, values, mask, scale):
    """``[A, heads, dim]`` queries over ``[M, kv_heads, dim]`` keys, one query head at a time."""
    group = q.shape[1] // keys.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:, head // group].T * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        heads.append(weights @ values[:, head // group])
    return torch.stack(heads, 1).flatten(1)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_chains_attend_as_defined_and_so_do_their_gradients(heads, kv_heads, depth):
    torch.manual_seed(0)
    packed = pack([torch.arange(9), torch.arange(2), torch.arange(14)], [3, 1, 12], depths=4)
    documents = layout(packed)
    dim, scale = 8, 0.4
    anchors = len(packed.anchors)
    rows = [len(packed.tokens)] + [anchors] * (depth - 1)
    q = torch.randn(anchors, heads, dim, dtype=torch.float64, requires_grad=True)
    keys = [torch.randn(n, kv_heads, dim, dtype=torch.float64, requires_grad=True) for n in rows]
    values = [torch.randn(n, kv_heads, dim, dtype=torch.float64, requires_grad=True) for n in rows]
    expected = []
    for document in documents:
        positions = packed.position[packed.anchors[document.anchors]]
        parts = [[part[0][document.tokens], *(p[document.anchors] for p in part[1:])] for part in (keys, values)]
        mask = chain_mask(positions, document.tokens.stop - document.tokens.start, depth)
        expected.append(plain(q[document.anchors], torch.cat(parts[0]), torch.cat(parts[1]), mask, scale))
    wanted = torch.cat(expected)
    got = attend_chains(q, keys, values, documents, scale)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # softmax is float32
    weight = torch.randn_like(wanted)
    inputs = [q, *keys, *values]
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_tokens_attend_to_their_own_document_only():
    torch.manual_seed(0)
    packed = pack([torch.arange(5), torch.arange(7)], [2, 3], depths=2)
    q = torch.randn(12, 4, 8)
    k, v = torch.randn(2, 12, 2, 8)
    same = packed.document[:, None] == packed.document
    mask = same & (packed.position[:, None] >= packed.position)
    torch.testing.assert_close(attend_causal(q, k, v, layout(packed), 0.4), plain(q, k, v, mask, 0.4))
