"""The drafting loop: stock greedy text whatever is drafted, exact accounting, clean caches after every round."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.backbones.decoder import Decoder
from selfspec.benchmark.lossless import stock_greedy
from selfspec.decoding.drafters.shared import SharedDrafter
from selfspec.decoding.loop import DraftingError, check_context, speculate
from selfspec.decoding.rules import Greedy
from selfspec.errors import SelfspecError
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_families import CLASSES, FAMILIES, family

RAGGED = [tiny_heads.prompt(length, seed=length) for length in (17, 1, 9, 30)]


def _model(*, ends=None, **options):
    """A tiny backbone that ends on ``ends`` only (default: never)."""
    model = tiny.llama(**options).requires_grad_(False)
    model.generation_config.eos_token_id = ends
    return model


def _committed(rounds):
    """Tokens by the accounting: one from the prefill, then accepted + 1 a round."""
    return 1 + sum(accepted + 1 for _, accepted in rounds)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_drafts", range(8))
def test_greedy_equals_stock_generate(num_drafts, tied):
    model = _model(tied=tied)
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model, torch.arange(0, 288, 2))
    expected = stock_greedy(model, RAGGED, 20)
    for prompts, wanted in [(RAGGED, expected), (RAGGED[:1], expected[:1]), (RAGGED[1:2], expected[1:2])]:
        result = speculate(decoder, drafter, prompts, max_new_tokens=20, num_drafts=num_drafts, rule=Greedy())
        assert result.completions == wanted
        assert result.tokens == 20 * len(prompts)
        assert [_committed(rounds) for rounds in result.rounds] == [20] * len(prompts)


@pytest.mark.parametrize("kind", ["shared", "cascade"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_stock_generate_for_every_family(name, kind):
    """Prompts on both sides of the windows, and texts that leave them."""
    model = family(name)
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model, torch.arange(0, 288, 2), depths=3, kind=kind)
    expected = stock_greedy(model, RAGGED, 20)
    for prompts, wanted, num_drafts in [(RAGGED, expected, 3), (RAGGED[1:2], expected[1:2], 2), (RAGGED, expected, 0)]:
        result = speculate(decoder, drafter, prompts, max_new_tokens=20, num_drafts=num_drafts, rule=Greedy())
        assert result.completions == wanted


class Script(Greedy):
    """Proposes the true continuation for exactly ``accepts[row][round]`` drafts of a round, then a wrong token.

    ``truths`` must reach beyond the limit by the number of drafts. ``seen`` is the loop's callback.
    """

    def __init__(self, truths, accepts, limit, ends=()):
        self.truths, self.accepts, self.limit, self.ends = truths, accepts, limit, ends
        self.written = [[] for _ in truths]
        self.rounds = [0] * len(truths)
        self.depth = 0

    def seen(self, row, tokens):
        if self.written[row]:
            self.rounds[row] += 1
        self.written[row] += tokens

    def running(self):
        return [
            row
            for row, tokens in enumerate(self.written)
            if len(tokens) < self.limit and not (tokens and tokens[-1] in self.ends)
        ]

    def propose(self, logits, vocab):
        self.depth += 1
        drafts = []
        for row in self.running():
            true = self.truths[row][len(self.written[row]) + self.depth - 1]
            follow = self.depth <= self.accepts[row][self.rounds[row] % len(self.accepts[row])]
            drafts.append(true if follow else (true + 1) % len(vocab.index))
        return torch.tensor(drafts)

    def verify(self, logits, drafts, vocab):
        self.depth = 0
        return super().verify(logits, drafts, vocab)


class WatchedDecoder(Decoder):
    """Remembers the cache it wrote last."""

    def forward(self, tokens, cache, counts=None):
        self.cache = cache
        return super().forward(tokens, cache, counts)


class WatchedDrafter(SharedDrafter):
    """After each round, holds both caches against a fresh prefill of the same tokens."""

    def watch(self, prompts, script, plain):
        self.prompts, self.script, self.plain, self.checked = prompts, script, plain, []

    def observe(self, tokens, states, counts, cache):
        out = super().observe(tokens, states, counts, cache)
        if self.script.written[0]:  # not the prefill
            for position, row in enumerate(self.script.running()):
                self._check(position, row, cache, out[position])
        return out

    def _check(self, position, row, cache, state):
        backbone = self.decoder.cache
        length = backbone.lengths[position]
        assert cache.lengths[position] == length  # anchors 0..n-2, tokens x[0..n-1)
        text = self.prompts[row] + self.script.truths[row]
        fresh, (hidden,) = self.plain.prefill([text[:length]], length)
        for ours, theirs in zip(backbone.keys + backbone.values, fresh.keys + fresh.values, strict=True):
            torch.testing.assert_close(ours[position, :, :length], theirs[0], atol=1e-4, rtol=1e-3)
        for ours, theirs in zip(backbone.recurrent, fresh.recurrent, strict=True):
            torch.testing.assert_close(ours.memory[position], theirs.memory[0], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(ours.window[position], theirs.window[0], atol=1e-4, rtol=1e-3)
        head_cache = self.new_cache(1, length)
        fresh_state = super().observe(torch.tensor([text[1 : length + 1]]), hidden[None], [length], head_cache)
        for ours, theirs in zip(cache.keys + cache.values, head_cache.keys + head_cache.values, strict=True):
            torch.testing.assert_close(ours[position, :, :length], theirs[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(state, fresh_state[0], atol=1e-4, rtol=1e-3)
        self.checked.append((row, length))


def _scripted(prompts, accepts, limit, num_drafts, model=None):
    model = model or _model()
    truths = stock_greedy(model, prompts, limit + num_drafts + 1)
    decoder = WatchedDecoder(model)
    drafter = WatchedDrafter(decoder, tiny_heads.trained(model, tiny_heads.random_head(model)))
    script = Script(truths, accepts, limit)
    drafter.watch(prompts, script, Decoder(model))
    result = speculate(
        decoder,
        drafter,
        prompts,
        max_new_tokens=limit,
        num_drafts=num_drafts,
        rule=script,
        on_tokens=script.seen,
    )
    assert result.completions == [truth[:limit] for truth in truths]
    return result, drafter


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("accepted", range(6))
def test_every_accept_count_leaves_clean_caches(accepted, name):
    num_drafts, prompt = 5, RAGGED[2]
    limit = 1 + 3 * (accepted + 1)  # the prefill's token, then three such rounds
    result, drafter = _scripted([prompt], [[accepted]], limit, num_drafts, family(name))
    wanted, left = [], limit - 1
    while left:
        drafted = min(num_drafts, left - 1)
        wanted.append((drafted, min(accepted, drafted)))
        left -= wanted[-1][1] + 1
    assert result.rounds == [wanted]
    assert drafter.checked == [(0, len(prompt) + (accepted + 1) * number) for number in range(1, 4)]


@pytest.mark.parametrize("name", CLASSES)
def test_rows_that_accept_different_counts_leave_clean_caches(name):
    accepts = [[0, 3, 1, 2], [3], [0], [2, 0]]
    result, drafter = _scripted(RAGGED, accepts, 16, 3, family(name))
    assert {row for row, _ in drafter.checked} == {0, 1, 2, 3}
    for rounds, script in zip(result.rounds, accepts, strict=True):
        assert _committed(rounds) == 16
        for number, (drafted, accepted) in enumerate(rounds):
            if drafted == 3:
                assert accepted == script[number % len(script)]
    # Rows end in the middle of a round while others go on: full acceptance three times, then a cut.
    assert result.rounds[1] == [(3, 3), (3, 3), (3, 3), (2, 2)]
    assert [accepted for _, accepted in result.rounds[2]] == [0] * 15


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_max_new_tokens_is_exact(max_new_tokens):
    model = _model()
    truths = stock_greedy(model, RAGGED[:2], 20)
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model)
    script = Script(truths, [[3], [0, 1]], max_new_tokens)
    result = speculate(
        decoder,
        drafter,
        RAGGED[:2],
        max_new_tokens=max_new_tokens,
        num_drafts=3,
        rule=script,
        on_tokens=script.seen,
    )
    assert result.completions == [truth[:max_new_tokens] for truth in truths]
    for rounds in result.rounds:
        assert _committed(rounds) == max_new_tokens
    # Row 0 accepts all it can: one token of the prefill, then fours; the rest is cut or drafted shorter.
    full = (max_new_tokens - 1) // 4
    assert result.rounds[0][:full] == [(3, 3)] * full
    assert all(drafted < 3 for drafted, _ in result.rounds[0][full:])


def _first_seen(tokens, start):
    """A place from ``start`` on whose token was not written before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("start", range(6))
def test_an_end_token_inside_the_drafts_ends_the_text_there(start):
    truth = stock_greedy(_model(), [RAGGED[0]], 24)[0]
    where = _first_seen(truth, start)
    end = truth[where]
    model = _model(ends=end)
    decoder = Decoder(model)
    assert decoder.end_tokens == (end,)
    script = Script([truth], [[4]], 12, ends=(end,))
    result = speculate(
        decoder,
        tiny_heads.drafter(decoder, model),
        [RAGGED[0]],
        max_new_tokens=12,
        num_drafts=4,
        rule=script,
        end_tokens=decoder.end_tokens,
        on_tokens=script.seen,
    )
    assert result.completions == stock_greedy(model, [RAGGED[0]], 12) == [truth[: where + 1]]
    # Rounds of five tokens after the prefill's one. A full round keeps all five, the end token last or absent.
    full, rest = divmod(where, 5)
    assert result.rounds[0] == [(4, 4)] * full + ([(rest - 1, rest - 1)] if rest else [])


def test_a_finished_row_leaves_the_others_as_they_were():
    truths = stock_greedy(_model(), RAGGED, 24)
    end = truths[2][_first_seen(truths[2], 3)]
    model = _model(ends=[end, 2])
    decoder = Decoder(model)
    expected = stock_greedy(model, RAGGED, 24)
    assert len({len(tokens) for tokens in expected}) > 1
    result = speculate(
        decoder,
        tiny_heads.drafter(decoder, model),
        RAGGED,
        max_new_tokens=24,
        num_drafts=3,
        rule=Greedy(),
        end_tokens=decoder.end_tokens,
    )
    assert result.completions == expected


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_the_context_is_used_to_its_last_position(num_drafts):
    model = _model(max_position_embeddings=40)
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model)
    prompts = [RAGGED[3], RAGGED[2]]  # 30 and 9 tokens
    script = Script(stock_greedy(_model(max_position_embeddings=60), prompts, 20), [[9], [1, 9]], 10)
    result = speculate(
        decoder,
        drafter,
        prompts,
        max_new_tokens=10,
        num_drafts=num_drafts,
        rule=script if num_drafts else Greedy(),
        on_tokens=script.seen,
    )
    assert result.completions == stock_greedy(model, prompts, 10)
    with pytest.raises(DraftingError, match="need 41 positions, the backbone has 40"):
        speculate(decoder, drafter, prompts, max_new_tokens=11, num_drafts=num_drafts, rule=Greedy())


def test_what_cannot_be_decoded_is_refused():
    model = _model()
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model)

    def attempt(prompts, used=drafter, tokens=4, drafts=2):
        speculate(decoder, used, prompts, max_new_tokens=tokens, num_drafts=drafts, rule=Greedy())

    for prompts in ([], [[]], [[5], []]):
        with pytest.raises(DraftingError, match="every prompt needs at least one token"):
            attempt(prompts)
    with pytest.raises(DraftingError, match="num_drafts: got 2, allowed: 0, or more with a head"):
        attempt([[5]], used=None)
    with pytest.raises(DraftingError, match="num_drafts: got -1"):
        attempt([[5]], drafts=-1)
    with pytest.raises(DraftingError, match="max_new_tokens: got 0"):
        attempt([[5]], tokens=0)
    assert issubclass(DraftingError, SelfspecError)  # one line, no traceback


def test_a_length_that_the_longest_prompt_leaves_no_room_for_is_named():
    check_context("accept.lossless_tokens", 10, 30, 40)
    expected = (
        r"^accept\.lossless_tokens: got 11; allowed: at most 10: the longest prompt has 30 tokens and the "
        r"backbone 40 positions; lower it, or distill\.max_prompt_tokens$"
    )
    with pytest.raises(DraftingError, match=expected):
        check_context("accept.lossless_tokens", 11, 30, 40)


def test_streamed_tokens_add_up_to_the_completions():
    model = _model()
    decoder = Decoder(model)
    truths = stock_greedy(model, RAGGED, 20)
    script = Script(truths, [[2, 0], [1], [3], [0]], 15)
    calls = []

    def stream(row, tokens):
        script.seen(row, tokens)
        calls.append((row, list(tokens)))

    result = speculate(
        decoder,
        tiny_heads.drafter(decoder, model),
        RAGGED,
        max_new_tokens=15,
        num_drafts=3,
        rule=script,
        on_tokens=stream,
    )
    for row, completion in enumerate(result.completions):
        pieces = [tokens for of_row, tokens in calls if of_row == row]
        assert list(itertools.chain(*pieces)) == completion == truths[row][:15]
        assert [len(piece) for piece in pieces] == [1] + [accepted + 1 for _, accepted in result.rounds[row]]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 9),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    num_drafts=st.integers(0, 7),
    limit=st.integers(1, 24),
    end=st.integers(3, 11),
    cut=st.booleans(),
)
def test_no_head_changes_the_text(seed, lengths, num_drafts, limit, end, cut):
    # A vocabulary of 12, so that random heads are right now and then.
    model = _model(seed=seed, vocab_size=12, ends=end)
    decoder = Decoder(model)
    drafter = tiny_heads.drafter(decoder, model, torch.tensor([0, 3, 4, 7, 8, 11]) if cut else None, seed=seed + 1)
    prompts = [tiny_heads.prompt(length, 12, seed=seed + length) for length in lengths]
    result = speculate(
        decoder,
        drafter,
        prompts,
        max_new_tokens=limit,
        num_drafts=num_drafts,
        rule=Greedy(),
        end_tokens=decoder.end_tokens,
    )
    assert result.completions == stock_greedy(model, prompts, limit)
    for completion, rounds in zip(result.completions, result.rounds, strict=True):
        assert _committed(rounds) == len(completion)
        assert all(0 <= accepted <= drafted <= num_drafts for drafted, accepted in rounds)
