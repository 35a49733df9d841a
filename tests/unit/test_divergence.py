"""Greedy texts that part: where, by what gap of the backbone's logits, and which gap stops the stage."""

import math
from dataclasses import replace

import pytest
import torch

from selfspec.__main__ import _comparison
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import divergence
from selfspec.benchmark.divergence import Divergence, DivergenceError, Divergences
from selfspec.benchmark.timing import Method, Run
from tests.unit import tiny, tiny_heads

VOCAB = 24
VANILLA, STOCK = Method("selfspec", "vanilla", 0), Method("transformers", "vanilla", 0)
ONE, TWO = Method("selfspec", "mtp", 1), Method("selfspec", "mtp", 2)
PROMPTS = {"chat": [tiny_heads.prompt(5, VOCAB, seed=1), tiny_heads.prompt(9, VOCAB, seed=2)], "code": [[7]]}


@pytest.fixture(scope="module")
def model():
    return tiny.llama(vocab_size=VOCAB).requires_grad_(False)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model)


def _ranked(model, prefix):
    """Tokens and logits of stock code after ``prefix``, the highest first."""
    logits, tokens = model(torch.tensor([prefix])).logits[0, -1].sort(descending=True)
    return tokens.tolist(), logits.tolist()


def test_the_gap_is_of_the_two_tokens_after_the_common_text(model, decoder):
    prompt, shared = PROMPTS["chat"][0], [4, 9, 5]
    tokens, logits = _ranked(model, prompt + shared)
    best, second, third = tokens[:3]
    found = divergence.find(decoder, prompt, [*shared, second, 1, 1], [*shared, best, 2])
    assert (found.position, found.drafted, found.plain) == (3, second, best)
    assert found.gap == pytest.approx(logits[0] - logits[1], abs=1e-5)
    # Whichever of the two has the highest.
    assert divergence.find(decoder, prompt, [*shared, best], [*shared, second]).gap == found.gap
    # Two near-equal tokens that the backbone would not have written either are no tie.
    below = divergence.find(decoder, prompt, [*shared, second], [*shared, third])
    assert below.gap == pytest.approx(logits[0] - logits[2], abs=1e-5)


def test_at_the_first_token_the_prompt_is_the_common_text(model, decoder):
    tokens, logits = _ranked(model, [7])
    found = divergence.find(decoder, [7], [tokens[3]], [tokens[0]])
    assert found.position == 0
    assert found.gap == pytest.approx(logits[0] - logits[3], abs=1e-5)


def test_equal_texts_do_not_part_and_a_shorter_one_parts_without_a_tie(decoder):
    assert divergence.find(decoder, [7], [1, 2, 3], (1, 2, 3)) is None
    assert divergence.find(decoder, [7], [1, 2], [1, 2, 3]) == Divergence(2, None, 3, math.inf)
    assert divergence.find(decoder, [7], [1, 2], []) == Divergence(0, 1, None, math.inf)


def _run(*completion):
    return Run(len(completion), 1.0, completion=list(completion))


def _runs(model):
    """Plain texts of two tokens; with K = 2 the second chat prompt takes the backbone's second choice."""
    (best, second, *_), logits = _ranked(model, [*PROMPTS["chat"][1], 4])
    plain = [_run(3, 4), _run(4, best)]
    runs = {
        ("chat", "greedy", VANILLA): plain,
        ("chat", "greedy", STOCK): [Run(9, 1.0)] * 2,
        ("chat", "greedy", ONE): plain,
        ("chat", "greedy", TWO): [plain[0], _run(4, second)],
        ("chat", "t0.5", VANILLA): plain,
        ("chat", "t0.5", ONE): [_run(8), _run(9)],  # sampled texts may differ
        ("code", "greedy", VANILLA): [_run(5)],
        ("code", "greedy", ONE): [_run(5)],
        ("code", "greedy", TWO): [_run(5)],
    }
    return runs, logits[0] - logits[1], (best, second)


def test_divergences_are_counted_by_drafts(model, decoder):
    runs, gap, _ = _runs(model)
    found = divergence.check(decoder, runs, PROMPTS, "bfloat16", tolerance=gap + 0.01)
    assert (found.dtype, found.prompts, found.tolerance) == ("bfloat16", 3, gap + 0.01)
    assert found.identical_by_K == {"1": 3, "2": 2}
    assert found.gaps == [pytest.approx(gap, abs=1e-5)]
    assert found.largest_gap == found.gaps[0]
    same = {key: of for key, of in runs.items() if key[2] != TWO}
    assert divergence.check(decoder, same, PROMPTS, "float32", 0.5) == Divergences(
        "float32", 3, {"1": 3}, [], None, 0.5
    )


def test_a_gap_beyond_the_tolerance_stops_the_stage(model, decoder):
    runs, gap, (best, second) = _runs(model)
    tolerance = round(gap - 0.01, 4)
    with pytest.raises(DivergenceError) as raised:
        divergence.check(decoder, runs, PROMPTS, "bfloat16", tolerance)
    assert str(raised.value).startswith(
        "greedy check in bfloat16: chat prompt 1 with K = 2 differs from plain decoding at new token 1: "
        f"with drafts token {second}, without token {best}; the backbone's logits there are {gap:.4g} apart, "
        f"allowed: {tolerance:g} (bench.logit_gap_tolerance); "
    )


def test_a_text_that_ends_early_is_never_within_the_tolerance(model, decoder):
    runs, *_ = _runs(model)
    short = [replace(run, completion=run.completion[:1]) for run in runs["chat", "greedy", VANILLA]]
    with pytest.raises(DivergenceError, match=r"chat prompt 0 with K = 1 .* new token 1: with drafts the end, without"):
        divergence.check(decoder, runs | {("chat", "greedy", ONE): short}, PROMPTS, "float32", 1e6)


def test_the_command_line_says_where_and_by_how_much():
    tokenizer = tiny.tokenizer()
    a, b = tokenizer("ab").input_ids
    line = _comparison(Divergence(17, a, b, 0.125), tokenizer, "bfloat16")
    assert line == (
        "text parts from plain greedy decoding at new token 17: 'a' instead of 'b'; "
        "the backbone's bfloat16 logits there are 0.125 apart"
    )
    assert _comparison(None, tokenizer, "bfloat16") == "text identical to plain greedy decoding"
