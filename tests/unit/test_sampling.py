"""Sampled drafting keeps the backbone's distribution: chi-square on a model small enough to enumerate."""

import functools
import itertools

import pytest
import torch

from selfspec.backbones.decoder import Decoder
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Sampling, Verdict
from tests.unit import tiny, tiny_heads

VOCAB, NEW, DRAFTS = 6, 3, 2
PROMPT = [3, 4, 1, 5]
BATCH, BATCHES = 4000, 5
CUT = torch.tensor([0, 2, 5])  # half of what the backbone may say can never be drafted


@functools.cache
def _model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "initializer_range": 0.3}
    return tiny.llama(vocab_size=VOCAB, kv_heads=1, num_hidden_layers=1, **sizes).requires_grad_(False)


def _exact(temperature, ends=()):
    """Probability of every text of ``NEW`` tokens (shorter where it ends), by stock forward passes."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], dim=1)
    logits = _model()(ids).logits[:, len(PROMPT) - 1 : -1].double()
    steps = torch.softmax(logits / temperature, dim=-1).gather(2, texts[..., None])[..., 0]
    exact = {}
    for text, chances in zip(texts.tolist(), steps.tolist(), strict=True):
        stop = next((i for i, token in enumerate(text) if token in ends), NEW - 1) + 1
        exact[tuple(text[:stop])] = float(torch.tensor(chances[:stop], dtype=torch.float64).prod())
    assert sum(exact.values()) == pytest.approx(1)
    return exact


def _counts(rule, vocab, ends=(), batches=BATCHES, **head):
    decoder = Decoder(_model())
    drafter = tiny_heads.drafter(decoder, _model(), vocab, seed=5, **head)
    counts, outcomes = {}, torch.zeros(DRAFTS + 1)
    for _ in range(batches):
        # One token more than is counted: the first round then offers all DRAFTS.
        result = speculate(
            decoder,
            drafter,
            [PROMPT] * BATCH,
            max_new_tokens=NEW + 1,
            num_drafts=DRAFTS,
            rule=rule,
            end_tokens=ends,
        )
        for completion, rounds in zip(result.completions, result.rounds, strict=True):
            text = tuple(completion[:NEW])
            counts[text] = counts.get(text, 0) + 1
            if rounds and rounds[0][0] == DRAFTS:
                outcomes[rounds[0][1]] += 1
    assert (outcomes > 20).all()  # every accept count took part
    return counts


def _p_value(counts, exact):
    """Pearson's chi-square; cells that expect fewer than 5 are pooled."""
    total = sum(counts.values())
    assert set(counts) <= set(exact)
    large = [text for text, chance in exact.items() if chance * total >= 5]
    observed = [counts.get(text, 0) for text in large]
    expected = [exact[text] * total for text in large]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    assert len(large) > 30
    if expected[-1] < 5:  # too small even together: joins the last one
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    observed, expected = (torch.tensor(cells, dtype=torch.float64) for cells in (observed, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


class PlainResidual(Sampling):
    """The classic mistake: after a rejection, sample from p instead of max(0, p - q)."""

    def verify(self, logits, drafts, vocab):
        verdict = super().verify(logits, drafts, vocab)
        p = self._distribution(logits)[torch.arange(len(drafts)), verdict.accepted]
        return Verdict(verdict.accepted, self._sample(p))


class AlwaysRenormalised(Sampling):
    """Another: p re-normalised over the draft vocabulary when a draft is judged."""

    def verify(self, logits, drafts, vocab):
        outside = torch.ones(logits.shape[-1], dtype=torch.bool)
        outside[vocab.ids] = False
        inside = torch.softmax(logits / self.temperature, -1).masked_fill(outside, 0)
        judged = super().verify((inside / inside.sum(-1, keepdim=True)).log() * self.temperature, drafts, vocab)
        p = self._distribution(logits)[torch.arange(len(drafts)), judged.accepted]
        return Verdict(judged.accepted, torch.where(judged.accepted < drafts.shape[1], judged.added, self._sample(p)))


def _seeded(kind, temperature, seed=0):
    return kind(temperature, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [None, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_committed_tokens_follow_the_backbone(temperature, vocab):
    counts = _counts(_seeded(Sampling, temperature), vocab)
    assert _p_value(counts, _exact(temperature)) > 1e-4


@pytest.mark.parametrize("name", ["shared-joint-two-layers", "cascade-encoder-own", "parallel-own-two-layers"])
def test_whatever_the_head_committed_tokens_follow_the_backbone(name):
    counts = _counts(_seeded(Sampling, 1.0), CUT, **tiny_heads.VARIANTS[name])
    assert _p_value(counts, _exact(1.0)) > 1e-4


def test_texts_that_end_early_follow_the_backbone():
    counts = _counts(_seeded(Sampling, 1.0), None, ends=[2])
    exact = _exact(1.0, ends=[2])
    assert {len(text) for text in counts} == {1, 2, 3}
    assert _p_value(counts, exact) > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_test_sees_a_wrong_residual(temperature):
    assert _p_value(_counts(_seeded(PlainResidual, temperature), None, batches=2), _exact(temperature)) < 1e-6


def test_the_test_sees_a_renormalised_backbone():
    assert _p_value(_counts(_seeded(AlwaysRenormalised, 1.0), CUT, batches=2), _exact(1.0)) < 1e-6


def test_a_head_that_equals_the_backbone_is_always_accepted():
    rule = _seeded(Sampling, 1.0)
    vocab = tiny_heads.trained(_model(), tiny_heads.random_head(_model())).vocab
    logits = torch.randn(500, DRAFTS + 1, VOCAB)
    drafts = torch.stack([rule.propose(logits[:, depth], vocab) for depth in range(DRAFTS)], dim=1)
    assert rule.verify(logits, drafts, vocab).accepted.tolist() == [DRAFTS] * 500


def test_the_generator_decides_the_text():
    decoder = Decoder(_model())
    drafter = tiny_heads.drafter(decoder, _model(), CUT)

    def text(seed):
        return speculate(
            decoder,
            drafter,
            [PROMPT] * 3,
            max_new_tokens=12,
            num_drafts=2,
            rule=_seeded(Sampling, 1.0, seed),
        ).completions

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_no_sampling_is_refused(temperature):
    with pytest.raises(ValueError, match="allowed: above 0"):
        _seeded(Sampling, temperature)
