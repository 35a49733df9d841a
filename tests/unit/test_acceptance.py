"""Figures by hand, their intervals and identities, and the measurements that feed them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from selfspec import acceptance
from selfspec.acceptance import Estimate, IdentityError
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import heldout, lossless, machine, table, teacher_forced
from selfspec.benchmark.timing import (
    BenchError,
    Method,
    Run,
    interleave,
    orders,
    our_runner,
    stock_runner,
    timed_prompts,
)
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Greedy, Sampling, rule_for
from selfspec.distill.records import Completion
from selfspec.heads.alignment import pack
from selfspec.heads.checkpoint import TrainedHead
from selfspec.heads.vocab import DraftVocab
from tests.unit import tiny, tiny_heads

# Rounds

COUNTS = np.array([[2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0]])  # 8 full rounds of K = 3 on two prompts


def test_only_full_rounds_count():
    rounds = [[(3, 3), (3, 0), (2, 2), (3, 3), (0, 0)], [(1, 0)], [(3, 1)]]
    expected = [[1, 0, 0, 2], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert acceptance.outcome_counts(rounds, 3).tolist() == expected
    assert acceptance.outcome_counts([], 3).shape == (0, 4)


def test_round_figures_by_hand():
    figures = acceptance.round_statistics(COUNTS, 200, 0)
    values = {key: estimate.value for key, estimate in figures.items()}
    assert values == pytest.approx(
        {
            ("outcome", 0): 2 / 8,
            ("outcome", 1): 1 / 8,
            ("outcome", 2): 3 / 8,
            ("outcome", 3): 2 / 8,
            ("cumulative", 1): 6 / 8,
            ("cumulative", 2): 5 / 8,
            ("cumulative", 3): 2 / 8,
            ("accept", 1): 6 / 8,
            ("accept", 2): 5 / 6,
            ("accept", 3): 2 / 5,
            ("tokens_per_round", 0): (2 * 1 + 1 * 2 + 3 * 3 + 2 * 4) / 8,
        }
    )
    assert {estimate.prompts for estimate in figures.values()} == {2}
    assert figures["accept", 3].count == 5  # rounds in which draft 3 was judged
    assert figures["cumulative", 3].count == 8


def test_without_a_full_round_nothing_is_claimed():
    figures = acceptance.round_statistics(np.zeros((3, 3)), 50, 0)
    assert all(math.isnan(estimate.value) and estimate.count == 0 for estimate in figures.values())


def test_a_depth_never_reached_is_no_zero():
    figures = acceptance.round_statistics(np.array([[4.0, 0.0, 0.0]]), 50, 0)
    assert figures["accept", 1].value == 0
    assert math.isnan(figures["accept", 2].value)


# Intervals


def test_a_figure_is_a_ratio_of_sums():
    weights = acceptance.resample_weights(2, 100, 0)
    estimate = acceptance.ratio(np.array([1.0, 90.0]), np.array([1.0, 100.0]), weights)
    assert estimate.value == pytest.approx(91 / 101)  # the mean of the ratios is 0.95
    assert estimate.low == pytest.approx(0.9)  # the second prompt drawn twice
    assert estimate.high == pytest.approx(1.0)  # the first one


def test_one_prompt_has_no_width():
    estimate = acceptance.ratio(np.array([3.0]), np.array([4.0]), acceptance.resample_weights(1, 100, 0))
    assert estimate == Estimate(0.75, 0.75, 0.75, 1, 4.0)


def test_resamples_draw_prompts_with_replacement():
    weights = acceptance.resample_weights(2, 4000, 7)
    assert (weights.sum(1) == 2).all()
    share = [(weights[:, 0] == times).mean() for times in (0, 1, 2)]
    assert share == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert np.array_equal(weights, acceptance.resample_weights(2, 4000, 7))
    assert not np.array_equal(weights, acceptance.resample_weights(2, 4000, 8))


def test_the_interval_holds_95_percent_of_the_resamples():
    hits, positions = np.arange(40.0), np.full(40, 40.0)
    weights = acceptance.resample_weights(40, 4000, 0)
    estimate = acceptance.ratio(hits, positions, weights)
    drawn = weights @ hits / (weights @ positions)
    assert (drawn < estimate.low).mean() == pytest.approx(0.025, abs=0.003)
    assert (drawn > estimate.high).mean() == pytest.approx(0.025, abs=0.003)
    # And agrees with the normal approximation of a mean of 40.
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * np.std(hits / 40) / math.sqrt(40), rel=0.1)


def test_resamples_that_say_nothing_are_left_out():
    weights = acceptance.resample_weights(2, 400, 0)
    assert (weights[:, 1] == 0).any()
    estimate = acceptance.ratio(np.array([0.0, 3.0]), np.array([0.0, 4.0]), weights)
    assert estimate == Estimate(0.75, 0.75, 0.75, 2, 4.0)


# Identities

HOLDING = {
    ("outcome", 0): 0.5,
    ("outcome", 1): 0.5,
    ("cumulative", 1): 0.5,
    ("tokens_per_round", 0): 1.5,
}


def test_contradicting_figures_raise():
    acceptance.check_rounds(HOLDING, 1)
    with pytest.raises(IdentityError, match=r"outcome shares sum to 1\.1"):
        acceptance.check_rounds(HOLDING | {("outcome", 1): 0.6}, 1)
    with pytest.raises(IdentityError, match=r"tokens per round 1\.6 is not 1 \+ sum of cumulative = 1\.5"):
        acceptance.check_rounds(HOLDING | {("tokens_per_round", 0): 1.6}, 1)


def test_a_speedup_beyond_tokens_per_round_raises():
    tau = Estimate(2.0, 1.8, 2.2, 9, 100.0)
    acceptance.check_speedup("here", Estimate(2.5, 2.2, 2.8, 9, 1.0), tau)  # intervals touch
    with pytest.raises(IdentityError, match=r"here: speedup 2\.500 .* exceeds tokens per round 2\.000"):
        acceptance.check_speedup("here", Estimate(2.5, 2.3, 2.8, 9, 1.0), tau)


# The benchmark's table

VANILLA, MTP = Method("selfspec", "vanilla", 0), Method("selfspec", "mtp", 3)
STOCK, LOOKUP = Method("transformers", "vanilla", 0), Method("transformers", "prompt_lookup", 10)


def _bench(mtp_seconds=(0.5, 1.5, 1.0)):
    rounds = [[(3, 3), (3, 0), (1, 1)], [(3, 2), (3, 2)], [(3, 3)]]
    mtp = [Run(10, seconds, 0.25 * seconds, 0.5 * seconds, of) for seconds, of in zip(mtp_seconds, rounds, strict=True)]
    vanilla = [Run(10, 1.0), Run(10, 3.0), Run(10, 1.0)]
    return {
        ("chat", "greedy", VANILLA): vanilla[:2],
        ("chat", "greedy", MTP): mtp[:2],
        ("chat", "greedy", STOCK): [Run(10, 2.0), Run(30, 2.0)],
        ("chat", "greedy", LOOKUP): [Run(10, 2.0), Run(30, 6.0)],
        ("code", "greedy", VANILLA): vanilla[2:],
        ("code", "greedy", MTP): mtp[2:],
    }


def _rows(runs):
    return {(row["domain"], row["method"], row["engine"]): row for row in table.rows(runs, 300, 0)}


def test_speeds_are_totals_over_totals():
    rows = _rows(_bench())
    assert rows["chat", "vanilla", "selfspec"]["tokens_per_second"] == 20 / 4  # mean of speeds: 6.67
    mtp = rows["chat", "mtp", "selfspec"]
    assert (mtp["prompts"], mtp["tokens"], mtp["seconds"]) == (2, 20, 2.0)
    assert (mtp["tokens_per_second"], mtp["speedup"]) == (10.0, 2.0)
    assert (mtp["draft_share"], mtp["verify_share"], mtp["rest_share"]) == (0.25, 0.5, 0.25)
    assert "speedup" not in rows["chat", "vanilla", "selfspec"]
    # All domains: 30 tokens in 3 s against 30 in 5 s.
    assert rows["all", "mtp", "selfspec"]["speedup"] == pytest.approx(5 / 3)
    assert rows["all", "mtp", "selfspec"]["prompts"] == 3


def test_acceptance_of_the_timed_runs():
    row = _rows(_bench())["chat", "mtp", "selfspec"]
    names = ("tokens_per_round", "first_accepted", "all_accepted", "none_accepted")
    assert [row[name] for name in names] == [(4 + 1 + 3 + 3) / 4, 3 / 4, 1 / 4, 1 / 4]


def test_time_to_first_token_is_a_mean_over_prompts_of_our_engine():
    runs = {
        ("chat", "greedy", VANILLA): [Run(9, 1.0, prefill_seconds=0.02), Run(1, 1.0, prefill_seconds=0.04)],
        ("chat", "greedy", STOCK): [Run(9, 1.0), Run(1, 1.0)],
    }
    rows = _rows(runs)
    ours = rows["chat", "vanilla", "selfspec"]
    found = [ours[f"first_token_ms{end}"] for end in ("", "_low", "_high")]
    assert found == pytest.approx([30.0, 20.0, 40.0])
    assert "first_token_ms" not in rows["chat", "vanilla", "transformers"]


def test_intervals_are_paired_by_prompt():
    """Both prompts run twice as fast, though one is three times slower than the other: no width."""
    row = _rows(_bench())["chat", "mtp", "selfspec"]
    assert (row["speedup_low"], row["speedup_high"]) == (2.0, 2.0)
    wide = table.speedup([Run(10, 1.0), Run(10, 1.0)], [Run(10, 1.0), Run(10, 3.0)], 300, 0)
    assert (wide.value, wide.low, wide.high) == (2.0, 1.0, 3.0)
    # Sampled texts differ in length: a speed is tokens a second, on both sides.
    longer = table.speedup([Run(30, 2.0)], [Run(10, 1.0)], 50, 0)
    assert (longer.value, longer.low, longer.high) == (1.5, 1.5, 1.5)


def test_a_rival_is_compared_with_its_own_engine():
    row = _rows(_bench())["chat", "prompt_lookup", "transformers"]
    assert row["tokens_per_second"] == 5.0
    assert row["speedup"] == pytest.approx(5 / 10)
    assert "draft_share" not in row
    assert "tokens_per_round" not in row


def test_an_impossible_speedup_stops_the_table():
    with pytest.raises(IdentityError, match="bench chat greedy K=3: speedup"):
        table.rows(_bench(mtp_seconds=(0.1, 0.3, 1.0)), 300, 0)  # 10 times as fast on 2.75 tokens a round


# Timing


def _methods(count):
    return [Method("selfspec", "mtp", number) for number in range(count)]


@pytest.mark.parametrize("count", range(1, 10))
def test_orders_balance_places_and_predecessors(count):
    methods = _methods(count)
    found = orders(methods)
    times = 1 if count % 2 == 0 else 2
    assert len(found) == times * count
    assert {tuple(sorted(order, key=methods.index)) for order in found} == {tuple(methods)}
    for place in range(count):
        assert [[order[place] for order in found].count(method) for method in methods] == [times] * count
    followed = [pair for order in found for pair in itertools.pairwise(order)]
    assert {followed.count(pair) for pair in itertools.permutations(methods, 2)} <= {times}


@pytest.mark.parametrize("count", [2, 5, 8])
def test_each_mode_sees_all_orders(count):
    calls = []

    def runner(method):
        def once(prompt, temperature, seed):
            calls.append((temperature, method))
            return Run(1, 1.0)

        return once

    methods = _methods(count)
    prompts = {"chat": [[number] for number in range(7)], "code": [[number] for number in range(count * 4 - 7)]}
    interleave({method: runner(method) for method in methods}, prompts, {"greedy": 0.0, "t0.5": 0.5}, seed=0)
    timed = calls[2 * count :]
    turns = [timed[start : start + count] for start in range(0, len(timed), count)]
    for temperature in (0.0, 0.5):
        seen = [[method for _, method in turn] for turn in turns if {mode for mode, _ in turn} == {temperature}]
        assert len(seen) == 4 * count
        cycles = 4 * count // len(orders(methods))
        assert sorted(map(repr, seen)) == sorted(map(repr, orders(methods) * cycles))
    # Turns included, none runs behind one method only, and with more than two none behind itself.
    before = {method: {a for (_, a), (_, b) in itertools.pairwise(timed) if b == method} for method in methods}
    for method, others in before.items():
        assert others >= set(methods) - {method}
        assert count == 2 or method not in others


@pytest.mark.parametrize("count", [2, 3])
def test_methods_are_interleaved(count):
    calls = []

    def runner(method):
        def once(prompt, temperature, seed):
            calls.append((method, tuple(prompt), temperature, seed))
            return Run(len(calls), 1.0)

        return once

    methods = _methods(count)
    prompts = {"chat": [[1], [2], [3]], "code": [[4], [5]]}
    modes = {"greedy": 0.0, "t0.5": 0.5}
    runs = interleave({method: runner(method) for method in methods}, prompts, modes, seed=40)

    warm, timed = calls[: 2 * count], calls[2 * count :]
    assert [(method, temperature) for method, _, temperature, _ in warm] == [
        (m, t) for m in methods for t in (0.0, 0.5)
    ]
    turns = [timed[start : start + count] for start in range(0, len(timed), count)]
    assert len(turns) == 5 * 2
    for turn in turns:  # each method once, on one prompt in one mode with one seed
        assert {call[0] for call in turn} == set(methods)
        assert len({call[1:] for call in turn}) == 1
    assert {tuple(rest) for (_, *rest), *_ in turns} == {
        ((number,), temperature, seed)
        for number, seed in ((1, 40), (2, 41), (3, 42), (4, 40), (5, 41))
        for temperature in (0.0, 0.5)
    }
    # Runs come back under their own key, in prompt order, without the warm-up.
    assert sum(map(len, runs.values())) == len(timed)
    for (domain, mode, method), of in runs.items():
        mine = [i for i, call in enumerate(calls) if i >= len(warm) and call[0] == method and call[2] == modes[mode]]
        mine = [i for i in mine if list(calls[i][1]) in prompts[domain]]
        assert [run.tokens for run in of] == [i + 1 for i in mine]


@pytest.fixture(scope="module")
def model():
    built = tiny.llama(vocab_size=24).requires_grad_(False)
    built.generation_config.eos_token_id = None
    return built


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model)


def test_a_domain_that_cannot_be_timed_is_named(capsys):
    texts = _texts()
    groups = {"code": texts[:1], "chat": texts[1:]}
    wanted = {"chat": [texts[1].prompt_ids, texts[2].prompt_ids]}
    assert timed_prompts(groups, ["maths", "chat"]) == wanted
    assert capsys.readouterr().out == "note: maths is not timed: distill found no held-out prompt of it\n"
    with pytest.raises(BenchError, match=r"^bench\.domains: got maths; allowed: code or chat, of which"):
        timed_prompts(groups, ["maths"])


def test_weights_are_counted_as_they_are_served(model, decoder):
    """Parameters and the copied output rows, in the backbone's dtype, whatever the arithmetic is."""
    ids = torch.arange(0, 24, 2)
    head = tiny_heads.random_head(model, ids=ids)
    weights = sum(parameter.numel() for parameter in head.parameters())
    for of, copied in ((ids, 12 * model.config.hidden_size), (None, 0)):
        drafter = drafter_for(decoder, tiny_heads.trained(model, head, of))
        count = drafter.nbytes() // decoder.dtype.itemsize
        assert count == weights + copied
        assert machine.weights_mib(count, torch.bfloat16) == (weights + copied) * 2 / 2**20


PROMPTS = [tiny_heads.prompt(length, 24, seed=length) for length in (7, 1, 12)]


def test_the_temperature_picks_the_rule():
    generator = torch.Generator()
    assert isinstance(rule_for(0.0, generator), Greedy)
    sampling = rule_for(0.7, generator)
    assert isinstance(sampling, Sampling)
    assert (sampling.temperature, sampling.generator) == (0.7, generator)
    with pytest.raises(ValueError, match=r"temperature: got -0\.7"):
        rule_for(-0.7, generator)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_runners_report_what_they_decoded(model, decoder, temperature):
    drafter = tiny_heads.drafter(decoder, model)
    ours = our_runner(decoder, drafter, 2, 15)(PROMPTS[0], temperature, 3)
    rule = Sampling(temperature, torch.Generator().manual_seed(3)) if temperature else Greedy()
    wanted = speculate(decoder, drafter, PROMPTS[:1], max_new_tokens=15, num_drafts=2, rule=rule)
    assert (ours.tokens, ours.rounds) == (15, wanted.rounds[0])
    assert ours.completion == wanted.completions[0]
    assert 0 < ours.draft_seconds + ours.verify_seconds < ours.seconds - ours.prefill_seconds
    assert ours.prefill_seconds > 0
    stock = stock_runner(model, 0, 15)(PROMPTS[0], temperature, 3)
    assert (stock.tokens, stock.rounds) == (15, [])
    assert stock.seconds > 0


def test_prompt_lookup_writes_as_many_tokens(model):
    assert stock_runner(model, 3, 15)(PROMPTS[0], 0.0, 3).tokens == 15


# Held-out prompts

LEDGER = {"heldout_in_training": [], "max_overlap_after": 2, "threshold": 2, "ngram": 13}


def test_leaks_are_refused():
    heldout.refuse_leaks(LEDGER, ["a", "b"], ["c"])
    with pytest.raises(heldout.LeakError, match=r"2 held-out prompts are in the training split \(b, x"):
        heldout.refuse_leaks(LEDGER | {"heldout_in_training": ["x"]}, ["a", "b"], ["b", "c"])
    with pytest.raises(heldout.LeakError, match="shares 3 13-grams with training text, allowed: 2"):
        heldout.refuse_leaks(LEDGER | {"max_overlap_after": 3}, ["a"], ["c"])


def test_greedy_text_is_compared_with_stock(model, decoder):
    drafter = tiny_heads.drafter(decoder, model)
    compared = lossless.check(model, decoder, drafter, PROMPTS, 14, 3)
    assert compared == lossless.Comparison(prompts=3, tokens=42, identical=3)


def test_a_tampered_decoder_is_found(model):
    tampered = Decoder(model)
    clean = lossless.stock_greedy(model, PROMPTS, 14)
    token = clean[1][5]  # a token that cannot be written any more
    score = tampered.logits
    tampered.logits = lambda hidden: score(hidden).index_fill(-1, torch.tensor([token]), -math.inf)
    first = next(number for number, text in enumerate(clean) if token in text)
    where = clean[first].index(token)
    with pytest.raises(lossless.LosslessError) as raised:
        lossless.check(model, tampered, tiny_heads.drafter(tampered, model), PROMPTS, 14, 3)
    assert f"prompt {first} differs from stock generate at new token {where}:" in str(raised.value)
    assert f"stock {clean[first][where : where + 3]}" in str(raised.value)


# Teacher-forced

DEPTHS = 3


def _texts():
    """Texts that the backbone would not have written: match is with its argmax, not with the text."""
    shapes = [(5, 7), (1, 6), (9, 2)]
    return [
        Completion(
            f"c{number}",
            f"s{number}",
            "corpus",
            "chat" if number else "code",
            tiny_heads.prompt(prompt, 24, seed=number),
            tiny_heads.prompt(new, 24, seed=100 + number),
            "length",
            1.0,
        )
        for number, (prompt, new) in enumerate(shapes)
    ]


def _brute_force(model, decoder, head, completion):
    """One anchor at a time through the drafter, probabilities by hand."""
    drafter, tokens = drafter_for(decoder, head), torch.tensor(completion.tokens)
    out = model.model(tokens[None]).last_hidden_state
    backbone = model.lm_head(out)[0]
    hits, overlap, positions = np.zeros(DEPTHS), np.zeros(DEPTHS), np.zeros(DEPTHS)
    chains = np.zeros(DEPTHS + 1)
    for anchor in range(len(tokens) - 2):
        right = []
        cache = drafter.new_cache(1, 64)
        state = drafter.observe(tokens[None, 1 : anchor + 2], out[:, : anchor + 1], [anchor + 1], cache)
        for depth in range(1, DEPTHS + 1):
            predicted = anchor + depth + 1
            if predicted >= len(tokens):
                break
            if depth > 1:
                state = drafter.deepen(tokens[anchor + depth][None], state, depth, cache)
            if predicted < len(completion.prompt_ids):
                continue
            q = torch.zeros(24)
            q[head.vocab.ids] = torch.softmax(drafter.logits(state, depth)[0], -1)
            p = torch.softmax(backbone[predicted - 1], -1)
            right.append(bool(q.argmax() == p.argmax()))
            hits[depth - 1] += right[-1]
            overlap[depth - 1] += float(torch.minimum(p, q).sum())
            positions[depth - 1] += 1
        if anchor >= len(completion.prompt_ids) - 1 and len(right) == DEPTHS:
            chains[(*right, False).index(False)] += 1
    return hits, overlap, positions, chains


@pytest.mark.parametrize("ids", [None, torch.arange(0, 24, 2)], ids=["whole", "cut"])
@pytest.mark.parametrize("name", ["shared", "cascade-encoder-own", "parallel-own-two-layers"])
def test_teacher_forced_equals_brute_force(model, decoder, ids, name, monkeypatch):
    monkeypatch.setattr(teacher_forced, "_CHUNK", 3)  # several chunks a text
    options = tiny_heads.VARIANTS[name]
    head = tiny_heads.trained(model, tiny_heads.random_head(model, DEPTHS, ids=ids, **options), ids)
    forced = teacher_forced.measure(decoder, head, _texts(), DEPTHS)
    expected = [_brute_force(model, decoder, head, completion) for completion in _texts()]
    for row, (hits, overlap, positions, chains) in enumerate(expected):
        assert forced.chains[row].tolist() == chains.tolist()
        assert forced.hits[row].tolist() == hits.tolist()
        assert forced.positions[row].tolist() == positions.tolist()
        assert forced.overlap[row] == pytest.approx(overlap, abs=1e-4)
    assert forced.positions.tolist() == [[7, 7, 7], [5, 4, 3], [2, 2, 2]]
    assert forced.hits.sum() > 0
    # Completions of 7, 6 and 2 tokens: one anchor less than tokens that all three drafts can follow.
    assert forced.chains.sum(1).tolist() == [7 - DEPTHS, 6 - DEPTHS, 0]


def test_chains_are_joined_along_their_anchors():
    """Token j is j: prompt 0..3, completion 4..9, so teachers 3..8; anchors 3, 4 and 5 have all three of theirs."""
    packed = pack([torch.arange(10)], [4], DEPTHS)
    assert packed.teachers.tolist() == [3, 4, 5, 6, 7, 8]

    def counts(*right):
        """``right``: (anchor, depth) pairs that hit."""
        hits = torch.zeros(DEPTHS, 6, dtype=torch.bool)
        for anchor, depth in right:
            hits[depth - 1, anchor + depth - 3] = True
        return teacher_forced.chain_counts(hits, packed, 4).tolist()

    assert counts() == [3, 0, 0, 0]
    assert counts((3, 1), (3, 2), (3, 3)) == [2, 0, 0, 1]
    assert counts((5, 1), (5, 2), (5, 3), (4, 1), (4, 3)) == [1, 1, 0, 1]  # a hit after a miss adds nothing
    assert counts((4, 1), (4, 2), (3, 2), (5, 3)) == [2, 0, 1, 0]
    # The prompt's anchors, and the last ones, whose chains are cut: they hit and do not count.
    assert counts((2, 1), (2, 2), (2, 3), (1, 2), (6, 1), (6, 2), (7, 1)) == [3, 0, 0, 0]


def test_chains_of_a_prompt_shorter_than_the_depths():
    packed = pack([torch.arange(4)], [1], DEPTHS)  # teachers 0, 1, 2; anchors -3..-1 do not exist
    everything = torch.ones(DEPTHS, 3, dtype=torch.bool)
    assert teacher_forced.chain_counts(everything, packed, 1).tolist() == [0, 0, 0, 0]
    packed = pack([torch.arange(5)], [1], DEPTHS)  # teachers 0..3: anchor 0 has 1, 2 and 3
    everything = torch.ones(DEPTHS, 4, dtype=torch.bool)
    assert teacher_forced.chain_counts(everything, packed, 1).tolist() == [0, 0, 0, 1]


def _oracle(shift):
    """A head that knows the backbone's state ``shift`` positions beside the teacher's."""

    def module(packed, hidden, embedding, rotary):
        return [hidden[(index + shift).clamp(0, len(hidden) - 1)] for index in packed.inputs]

    module.output_rows = lambda depth: None
    return TrainedHead(module, DraftVocab(torch.arange(24), 24), {})


def test_a_head_that_equals_the_backbone_matches_everywhere(decoder):
    forced = teacher_forced.measure(decoder, _oracle(0), _texts(), DEPTHS)
    assert np.array_equal(forced.hits, forced.positions)
    assert forced.chains.tolist() == [[0, 0, 0, 4], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert forced.overlap == pytest.approx(forced.positions, abs=1e-4)
    for shift in (-1, 1):
        shifted = teacher_forced.measure(decoder, _oracle(shift), _texts(), DEPTHS)
        assert shifted.hits.sum() < shifted.positions.sum() / 2
        assert shifted.overlap.sum() < 0.9 * shifted.positions.sum()


def _figures(rows):
    return {(row.domain, row.source, row.mode, row.metric, row.depth): row for row in rows}


# Domain and source of a row, and which of the texts it is about.
GROUPS = {
    ("code", "all"): [0],
    ("code", "s0"): [0],
    ("chat", "all"): [1, 2],
    ("chat", "s1"): [1],
    ("chat", "s2"): [2],
    ("all", "all"): [0, 1, 2],
}


def test_every_source_every_domain_and_all_are_groups():
    assert heldout.grouped(_texts()) == GROUPS
    # A source that is called "all" counts its prompts once.
    named_all = [replace(completion, source="all") for completion in _texts()]
    assert heldout.grouped(named_all) == {("code", "all"): [0], ("chat", "all"): [1, 2], ("all", "all"): [0, 1, 2]}


def test_forced_rows_by_domain_and_pooled(model, decoder):
    head = tiny_heads.trained(model, tiny_heads.random_head(model, DEPTHS))
    texts = _texts()
    forced = teacher_forced.measure(decoder, head, texts, DEPTHS)
    rows = _figures(heldout.forced_rows(decoder, head, {"code": texts[:1], "chat": texts[1:]}, DEPTHS, 50, 0))
    assert len(rows) == len(GROUPS) * (2 * DEPTHS + 3 * DEPTHS + 2)
    for group, of in GROUPS.items():
        for depth in range(DEPTHS):
            count = forced.positions[of, depth].sum()
            match = rows[*group, "teacher_forced", "match", depth + 1]
            assert match.value == pytest.approx(forced.hits[of, depth].sum() / count)
            assert (match.count, match.prompts) == (count, len(of))
            overlap = rows[*group, "teacher_forced", "overlap", depth + 1]
            assert overlap.value == pytest.approx(forced.overlap[of, depth].sum() / count, rel=1e-5)
        chains = forced.chains[of].sum(0)
        if chains.sum() == 0:
            assert math.isnan(rows[*group, "teacher_forced", "tokens_per_round", 0].value)
            continue
        for depth in range(1, DEPTHS + 1):
            cumulative = rows[*group, "teacher_forced", "cumulative", depth]
            assert cumulative.value == pytest.approx(chains[depth:].sum() / chains.sum())
            assert cumulative.count == chains.sum()
        tau = rows[*group, "teacher_forced", "tokens_per_round", 0]
        assert tau.value == pytest.approx(chains @ np.arange(1, DEPTHS + 2) / chains.sum())


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_running_rows_count_the_loop_s_rounds(model, decoder, batch_size):
    drafter, texts = tiny_heads.drafter(decoder, model), _texts()
    rows = _figures(
        heldout.running_rows(
            decoder,
            drafter,
            {"code": texts[:1], "chat": texts[1:]},
            {"greedy": Greedy()},
            num_drafts=2,
            max_new_tokens=18,
            batch_size=batch_size,
            samples=50,
            seed=0,
        )
    )
    # One prompt at a time: what is decoded beside a prompt must not show in its figures.
    rounds = [
        speculate(decoder, drafter, [c.prompt_ids], max_new_tokens=18, num_drafts=2, rule=Greedy()).rounds[0]
        for c in texts
    ]
    assert any(accepted for of_prompt in rounds for _, accepted in of_prompt)
    for group, of in GROUPS.items():
        figures = acceptance.round_statistics(acceptance.outcome_counts([rounds[number] for number in of], 2), 50, 0)
        row = rows[*group, "greedy", "tokens_per_round", 0]
        assert (row.value, row.count) == (figures["tokens_per_round", 0].value, figures["tokens_per_round", 0].count)
        assert row.prompts == len(of)
    assert len(rows) == len(GROUPS) * (3 + 2 * 2 + 1)


def test_batches_of_one_mode_draw_different_samples(model, decoder, monkeypatch):
    """One generator runs through a mode's batches, from the same seed in every run."""
    drafter, text = tiny_heads.drafter(decoder, model), _texts()[0]

    def written():
        results = []

        def recorded(*args, **options):
            results.append(speculate(*args, **options))
            return results[-1]

        monkeypatch.setattr(heldout, "speculate", recorded)
        modes = {mode: Sampling(1.0, torch.Generator().manual_seed(3)) for mode in ("t1.0", "again")}
        sizes = {"num_drafts": 2, "max_new_tokens": 18, "batch_size": 1, "samples": 5, "seed": 0}
        heldout.running_rows(decoder, drafter, {"code": [text, text, text]}, modes, **sizes)
        return [result.completions[0] for result in results]

    texts = written()
    assert len({tuple(ids) for ids in texts[:3]}) == 3  # the same prompt in three batches
    assert texts[3:] == texts[:3]  # each mode begins at its own seed
    assert written() == texts
