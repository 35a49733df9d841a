"""A tree of tokens in one forward: every branch as if it were the text alone."""

import pytest
import torch

from selfspec.backbones.decoder import Branches, Decoder
from tests.unit import tiny_heads
from tests.unit.tiny_families import CLASSES, FAMILIES, family, rounding

# Parents by number, 0 is the pending token: two branches below it, one of them forked at its end.
PARENTS = [0, 0, 1, 2, 3, 3]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 1, 3, 6]]
ATTENDING = [name for name in CLASSES if "linear_attention" not in FAMILIES[name][1].get("layer_types", [])]
PROMPTS = [tiny_heads.prompt(length, seed=length) for length in (11, 1, 23)]


def _branches():
    seen = torch.zeros(1, len(PATHS), len(PATHS), dtype=torch.bool)
    for number, path in enumerate(PATHS):
        assert [*path[-2:-1], number] == [*PARENTS[number - 1 : number], path[-1]]
        seen[0, number, path] = True
    return Branches(seen, torch.tensor([[len(path) - 1 for path in PATHS]]))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ATTENDING)
def test_a_branch_is_what_the_text_alone_would_be(name, rows):
    model = family(name)
    decoder = Decoder(model)
    prompts = PROMPTS[:rows]
    cache, _ = decoder.prefill(prompts, 40, spare=len(PATHS))
    tokens = torch.tensor([tiny_heads.prompt(len(PATHS), seed=50 + row) for row in range(rows)])
    hidden = decoder.forward(tokens, cache, branches=_branches())
    for row, prompt in enumerate(prompts):
        for number, path in enumerate(PATHS):
            text = prompt + tokens[row, path].tolist()
            _, (alone,) = decoder.prefill([text], 40)
            torch.testing.assert_close(hidden[row, number], alone[-1], atol=rounding(model), rtol=1e-3)


@pytest.mark.parametrize("name", ATTENDING)
def test_the_path_that_is_kept_is_all_the_cache_holds(name):
    decoder = Decoder(family(name))
    for rows in (1, 3):
        prompts, kept = PROMPTS[:rows], [[0, 2, 4], [0], [0, 1, 3, 6]][:rows]
        cache, _ = decoder.prefill(prompts, 40, spare=len(PATHS))
        tokens = torch.tensor([tiny_heads.prompt(len(PATHS), seed=50 + row) for row in range(rows)])
        decoder.forward(tokens, cache, branches=_branches())
        longest = max(map(len, kept))
        cache.compact(torch.tensor([path + [0] * (longest - len(path)) for path in kept]))
        cache.advance([len(path) for path in kept])
        for row, (prompt, path) in enumerate(zip(prompts, kept, strict=True)):
            text = prompt + tokens[row, path].tolist()
            assert cache.lengths[row] == len(text)
            fresh, _ = decoder.prefill([text], 40)
            for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
                torch.testing.assert_close(ours[row, :, : len(text)], theirs[0, :, : len(text)], atol=1e-4, rtol=1e-3)


def test_linear_attention_follows_one_branch_only():
    decoder = Decoder(family("qwen3_5"))
    assert (decoder.recurrent, Decoder(family("llama")).recurrent) == (True, False)
    cache, _ = decoder.prefill(PROMPTS[:1], 40, spare=8)
    with pytest.raises(ValueError, match="follow one branch only"):
        decoder.forward(torch.zeros(1, 7, dtype=torch.long), cache, branches=_branches())
    with pytest.raises(ValueError, match="follow one branch only"):
        cache.compact(torch.zeros(1, 1, dtype=torch.long))


def test_spare_slots_are_not_positions():
    decoder = Decoder(family("llama", max_position_embeddings=20))
    assert decoder.new_cache(1, 20, spare=5).limit == 25
    with pytest.raises(ValueError, match="21 positions asked"):
        decoder.new_cache(1, 21)
