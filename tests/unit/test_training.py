"""Training: chunked equals plain, the float32 masters, the schedule, and a head that learns one text by heart."""

import copy
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from selfspec import losses
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable
from selfspec.benchmark.lossless import stock_greedy
from selfspec.config import BackboneConfig, SharedTrainConfig
from selfspec.decoding.drafter import SharedDrafter
from selfspec.decoding.loop import speculate
from selfspec.decoding.rules import Greedy
from selfspec.distill import records, states
from selfspec.distill.records import Completion
from selfspec.errors import SelfspecError
from selfspec.heads import checkpoint
from selfspec.heads.alignment import pack
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab, choose
from selfspec.training import setup
from selfspec.training.chunked import Scorer, loss_and_gradient
from selfspec.training.data import Batch, Dataset
from selfspec.training.loop import Trainer, TrainingError, schedule
from selfspec.training.masters import MasterWeights
from selfspec.training.setup import Muon, build_optimizers, orthogonalised
from tests.unit import tiny, tiny_heads, training_data

DEPTHS = 3
WHOLE = DraftVocab(torch.arange(288), 288)
CUT = DraftVocab(torch.arange(0, 288, 2), 288)


@pytest.fixture(scope="module")
def model():
    built = tiny.llama().requires_grad_(False)
    built.generation_config.eos_token_id = None
    return built


_completions, _dataset, _config, _trainer = (
    training_data.completions,
    training_data.dataset,
    training_data.options,
    training_data.trainer,
)


# Loss and gradient

OBJECTIVES = {
    "ce": losses.Objective("ce"),
    "kl": losses.Objective("kl", temperature=2.0, ce_weight=0.5),
    "reverse_kl": losses.Objective("reverse_kl"),
    "js": losses.Objective("js"),
    "tv": losses.Objective("tv"),
    "lk_hybrid": losses.Objective("lk_hybrid", eta=3.0, ce_weight=0.25),
    "lk_hybrid_batch": losses.Objective("lk_hybrid", eta=3.0, lambda_scope="batch"),
    "lk_nll": losses.Objective("lk_nll"),
    "chain": losses.Objective("chain", ce_weight=0.1),
}


@pytest.fixture(scope="module")
def batch(model, tmp_path_factory):
    # A prompt of one token: its chains are cut short at the text's beginning.
    data = _dataset(model, _completions(model, [(6, 9), (1, 5), (4, 2), (9, 12)]), tmp_path_factory.mktemp("batch"))
    return data.batch(range(4))


def _head_and_states(model, batch, kind="shared", **options):
    head = tiny_heads.random_head(model, DEPTHS, kind=kind, **options).requires_grad_(True)
    table = RotaryTable(model, 64, torch.float32)
    return head, head(batch.packed, batch.hidden, model.get_input_embeddings().weight, table)


def _plain(objective, model, head, per_depth, batch, vocab, weights, dtype=torch.float32):
    """Loss, hits and alphas by depth with all logits at once and a full softmax as the teacher; back-propagates.

    Chains are assembled position by position from what the contract says, not from the chunked code's indices.
    """
    packed = batch.packed
    number = {int(teacher): n for n, teacher in enumerate(packed.teachers)}
    shape = DEPTHS, len(packed.anchors)
    taught, by = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    for row, anchor in enumerate(packed.anchors.tolist()):
        for depth in range(1, DEPTHS + 1):
            teacher = anchor + depth
            if teacher in number and packed.document[teacher] == packed.document[anchor]:
                taught[depth - 1, row], by[depth - 1, row] = True, number[teacher]
    rows = model.lm_head.weight[vocab.ids].to(dtype)
    logits = torch.stack(
        [
            F.linear(state.to(dtype), rows if own is None else own.to(dtype))
            for state, own in zip(per_depth, map(head.output_rows, range(DEPTHS)), strict=True)
        ]
    )
    teacher = model.lm_head(batch.hidden[packed.teachers]).to(dtype)
    soft = torch.softmax(teacher / objective.softening("kl"), -1)[:, vocab.ids][by]
    p = torch.softmax(teacher, -1)[:, vocab.ids][by]
    alpha = losses.acceptance(logits.detach(), p)
    counts = taught.sum(1)
    mean = (alpha * taught).sum(1) / counts
    target = packed.targets[by]
    given = mean[:, None] if objective.needs_mean_alpha else None
    each = objective.reference(logits, soft, vocab.index[target], taught, given)
    ((each * taught).sum(1) / counts * weights.to(dtype)).sum().backward()
    hits = (vocab.ids[logits.argmax(-1)] == target) & taught
    sums = [(each.detach() * taught).sum(1), hits.sum(1), (alpha * taught).sum(1), counts]
    return torch.stack([each.double() for each in sums]), mean


HEADS = {
    "shared": {"kind": "shared"},
    "cascade": {"kind": "cascade", "block": "encoder", "output": "own"},
    "parallel": {"kind": "parallel", "output": "own"},
}


@pytest.mark.parametrize("chunk_rows", [1, 10, 24, 10_000])
@pytest.mark.parametrize("vocab", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunked_equals_plain(model, batch, name, vocab, chunk_rows):
    _compare(model, batch, OBJECTIVES[name], vocab, chunk_rows, HEADS["shared"])


@pytest.mark.parametrize("head", ["cascade", "parallel"])
@pytest.mark.parametrize("vocab", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", ["ce", "lk_hybrid", "lk_hybrid_batch", "chain"])
def test_chunked_equals_plain_with_own_output_rows(model, batch, name, vocab, head):
    _compare(model, batch, OBJECTIVES[name], vocab, 24, HEADS[head])


def _compare(model, batch, objective, vocab, chunk_rows, options):
    weights = losses.depth_weights(DEPTHS, 0.8)
    plain, per_depth = _head_and_states(model, batch, ids=vocab.ids, **options)
    sums, mean = _plain(objective, model, plain, per_depth, batch, vocab, weights)
    head, per_depth = _head_and_states(model, batch, ids=vocab.ids, **options)
    scorer = Scorer.of(model.lm_head.weight, vocab, torch.float32)
    tally = loss_and_gradient(
        per_depth,
        batch,
        scorer,
        objective,
        weights,
        chunk_rows,
        output_rows=head.output_rows,
        mean_alpha=mean,
        measure=True,
    )
    measured = torch.stack([tally.loss, tally.match, tally.alpha, tally.count])
    torch.testing.assert_close(measured, sums, atol=1e-4, rtol=1e-5)
    assert tally.count.tolist() == [27, 26, 25]  # of 28 tokens, less one a depth behind the one-token prompt
    for (title, ours), theirs in zip(head.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad.abs().max() > 1e-5, title
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=title)


@pytest.mark.parametrize("vocab", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_float64_the_states_gradient_is_the_plain_one_to_the_last_digits(model, batch, name, vocab):
    wide = copy.deepcopy(model).double()
    exact = dataclasses.replace(batch, hidden=batch.hidden.double())
    lse = wide.lm_head(exact.hidden[exact.packed.teachers]).logsumexp(-1)
    exact = dataclasses.replace(exact, lse=lse)
    weights = losses.depth_weights(DEPTHS, 0.8).double()
    head, per_depth = _head_and_states(model, batch)
    leaves = [[state.detach().double().requires_grad_() for state in per_depth] for _ in range(2)]
    sums, mean = _plain(OBJECTIVES[name], wide, head, leaves[0], exact, vocab, weights, torch.float64)
    scorer = Scorer.of(wide.lm_head.weight, vocab, torch.float64)
    tally = loss_and_gradient(leaves[1], exact, scorer, OBJECTIVES[name], weights, 24, mean_alpha=mean)
    torch.testing.assert_close(tally.loss, sums[0], atol=1e-10, rtol=1e-10)
    for plain, ours in zip(*leaves, strict=True):
        assert plain.grad.abs().max() > 1e-5
        torch.testing.assert_close(ours.grad, plain.grad, atol=1e-11, rtol=1e-9)


def _most_bytes_alive(work):
    """Of what torch's CPU allocator handed out during ``work``, the most that was alive at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(("name", "buffers"), [("ce", 3), ("lk_hybrid", 6), ("js", 6)])
def test_memory_is_bounded_by_the_chunk_not_by_the_batch(name, buffers):
    vocabulary, hidden, chunk_rows = 150_000, 4, 12
    packed = pack([torch.arange(60), torch.arange(60)], [4, 4], DEPTHS)
    batch = Batch(packed, torch.randn(120, hidden), torch.full((len(packed.teachers),), 12.0), ["a", "b"])
    whole = DraftVocab(torch.arange(vocabulary), vocabulary)
    scorer = Scorer.of(torch.randn(vocabulary, hidden), whole, torch.float32)
    states = [torch.randn(len(packed.anchors), hidden, requires_grad=True) for _ in range(DEPTHS)]
    weights = losses.depth_weights(DEPTHS, 0.8)
    objective = losses.Objective(name, eta=3.0)
    most = _most_bytes_alive(lambda: loss_and_gradient(states, batch, scorer, objective, weights, chunk_rows))
    buffer = 4 * chunk_rows * vocabulary
    assert (buffers - 1) * buffer < most < buffers * buffer * 1.02  # 43 MB for lk_hybrid
    assert 20 * buffer < 4 * DEPTHS * len(packed.anchors) * vocabulary  # one tensor of all logits


def test_measuring_leaves_no_gradient(model, batch):
    head, per_depth = _head_and_states(model, batch)
    scorer = Scorer.of(model.lm_head.weight, CUT, torch.float32)
    weights = losses.depth_weights(DEPTHS, 0.8)
    loss_and_gradient(per_depth, batch, scorer, OBJECTIVES["ce"], weights, 16, backward=False, measure=True)
    assert all(parameter.grad is None for parameter in head.parameters())


@pytest.mark.parametrize("vocab", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_teacher_is_normalised_over_all_tokens(model, batch, vocab, temperature):
    scorer = Scorer.of(model.lm_head.weight, vocab, torch.float32)
    hidden = batch.hidden[batch.packed.teachers]
    full = torch.softmax(model.lm_head(hidden).double() / temperature, -1)[:, vocab.ids]
    p = scorer.teacher(hidden, batch.lse, temperature)
    torch.testing.assert_close(p.double(), full, atol=1e-6, rtol=1e-4)
    if not vocab.whole:
        assert (p.sum(-1) < 0.99).any()


@pytest.mark.parametrize("name", ["kl", "lk_hybrid_batch", "chain"])
def test_middle_states_beside_the_final_one_teach_nothing(model, batch, name):
    """The teacher, the losses and their gradients are those of the final states, bit for bit."""
    weights = losses.depth_weights(DEPTHS, 0.8)
    scorer = Scorer.of(model.lm_head.weight, CUT, torch.float32)
    wide = dataclasses.replace(batch, hidden=torch.cat([batch.hidden, torch.randn(len(batch.hidden), 64)], dim=1))
    for temperature in (1.0, 2.0):
        ours, plain = (scorer.teacher(each.hidden, torch.ones(len(each.hidden)), temperature) for each in (wide, batch))
        assert torch.equal(ours, plain)
    results = []
    for each in (wide, batch):
        head, per_depth = _head_and_states(model, batch)
        options = {"mean_alpha": torch.tensor([0.3, 0.2, 0.1]), "measure": True}
        tally = loss_and_gradient(per_depth, each, scorer, OBJECTIVES[name], weights, 24, **options)
        results.append([*vars(tally).values(), *(parameter.grad for parameter in head.parameters())])
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))


# Batches


@pytest.mark.parametrize("middle_layers", [[], [1]], ids=str)
def test_batches_carry_the_states_of_their_own_records(model, tmp_path, middle_layers):
    completions = _completions(model, [(5, 4), (3, 1), (7, 6)])
    data = _dataset(model, completions, tmp_path, middle_layers=middle_layers)
    got = data.batch([2, 0])
    assert got.ids == ["r2", "r0"]
    assert got.packed.tokens.tolist() == completions[2].tokens + completions[0].tokens
    assert got.hidden.shape == (sum(len(completions[i].tokens) for i in (2, 0)), 32 * (1 + len(middle_layers)))
    hidden = [
        tiny_heads.backbone_states(model, torch.tensor(completions[i].tokens), middle_layers)[:-1] for i in (2, 0)
    ]
    torch.testing.assert_close(got.hidden[:12], hidden[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.hidden[13:-1], hidden[1], atol=1e-4, rtol=1e-4)
    lse = model.lm_head(got.hidden[got.packed.teachers, :32]).logsumexp(-1)
    torch.testing.assert_close(got.lse, lse, atol=1e-4, rtol=1e-4)


def test_every_epoch_visits_every_usable_completion_once(model, tmp_path):
    data = _dataset(model, _completions(model, [(4, 3), (4, 1), (5, 3), (6, 3), (4, 2), (3, 5)]), tmp_path)
    assert data.batches_per_epoch(2) == 3
    batches = data.epochs(2, seed=1)
    epochs = [[name for _ in range(3) for name in data.batch(next(batches)).ids] for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == ["r0", "r2", "r3", "r4", "r5"]  # r1 is one token: it teaches nothing
    assert epochs[0] != epochs[1]
    again = data.epochs(2, seed=1)
    assert [name for _ in range(3) for name in data.batch(next(again)).ids] == epochs[0]
    assert [name for got in data.once(2) for name in got.ids] == ["r0", "r2", "r3", "r4", "r5"]


def test_states_of_other_completions_are_refused(model, tmp_path):
    completions = _completions(model, [(5, 4), (3, 3)])
    data = _dataset(model, completions, tmp_path)
    with pytest.raises(ValueError, match="15 hidden states for 9 tokens: rerun distill"):
        Dataset(completions[:1], data.states, DEPTHS)


def test_stages_refuse_states_that_their_head_cannot_read(model, tmp_path):
    completions = _completions(model, [(5, 4), (3, 3)])
    for split in ("train", "validation"):
        (tmp_path / "distill" / split).mkdir(parents=True)
        records.write(tmp_path / "distill" / split / "00000.parquet", completions)
        parts = [states.States(torch.randn(each.length, 64), torch.randn(each.length)) for each in completions]
        states.write(tmp_path / "hidden", split, parts, 15, 64, torch.float32)
    backbone = BackboneConfig(name="tiny", license="MIT", uri="file:x", dtype="float32")
    train, _ = setup.datasets(backbone, SharedTrainConfig(), "cached", 0, model, DEPTHS, (1,), tmp_path)
    assert train.batch([0]).hidden.shape == (9, 64)
    expected = r"^head\.middle_layers: got states of 64 columns in .*train\.npy; allowed: 32, .*; rerun distill$"
    with pytest.raises(SelfspecError, match=expected):
        setup.datasets(backbone, SharedTrainConfig(), "cached", 0, model, DEPTHS, (), tmp_path)


# Optimisation


def test_masters_collect_what_bfloat16_cannot_hold():
    module = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    exact = dict(module.named_parameters())
    masters = MasterWeights(dict(module.to(torch.bfloat16).named_parameters()), exact)
    optimizer = torch.optim.SGD(masters.masters.values(), lr=1.0)
    seen = []
    for _ in range(40):  # steps of 2^-12: a sixteenth of what bfloat16 resolves below 1
        module.weight.grad = torch.full_like(module.weight, 2.0**-12)
        norm = masters.take_gradients()
        assert module.weight.grad is None
        optimizer.step()
        masters.give_weights()
        seen.append(float(module.weight.detach()[0, 0]))
    assert float(norm) == pytest.approx(2 * 2.0**-12)  # four equal gradients
    assert module.weight.dtype == torch.bfloat16
    assert torch.allclose(masters.masters["weight"], torch.full((1, 4), 1 - 40 * 2.0**-12), atol=0)
    assert seen[0] == 1.0
    assert seen[-1] == float(torch.tensor(1 - 40 * 2.0**-12).bfloat16())


def test_schedule_by_hand():
    warm = schedule(_config(schedule="linear", warmup_fraction=0.2), 20)
    assert [warm(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [warm(step) for step in (8, 12, 19)] == pytest.approx([0.75, 0.5, 1 / 16])
    cosine = schedule(_config(schedule="cosine", warmup_fraction=0.2), 20)
    assert [cosine(step) for step in (3, 4, 12)] == pytest.approx([1.0, 1.0, 0.5])
    assert cosine(8) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine(20) == pytest.approx(0.0)
    flat = schedule(_config(schedule="constant", warmup_fraction=0.5), 4)
    assert [flat(step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule(_config(), 1)(0) == 1.0  # a single step is not a warm-up to nothing


def _weights(trainer):
    trainer.run()
    return {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}


def test_the_same_seed_gives_the_same_weights(model, tmp_path):
    data = _dataset(model, _completions(model, [(5, 6), (3, 5), (7, 4), (4, 4)]), tmp_path)
    first = _weights(_trainer(model, data, seed=1, epochs=2.0))
    again = _weights(_trainer(model, data, seed=1, epochs=2.0))
    other = _weights(_trainer(model, data, seed=2, epochs=2.0))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())  # another order of batches


def test_training_in_bfloat16_leaves_float32_weights(model, tmp_path):
    data = _dataset(model, _completions(model, [(5, 6), (3, 5)]), tmp_path)
    weights = _weights(_trainer(model, data, dtype="bfloat16", learning_rate=1e-5, epochs=4.0))
    start = _trainer(model, data).head.state_dict()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert 0 < (tensor - start[name]).abs().max() < 5e-5  # below bfloat16's resolution of most, kept all the same
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


def test_the_curve_says_what_happened(model, tmp_path):
    data = _dataset(model, _completions(model, [(5, 6), (3, 5), (7, 4), (4, 4)]), tmp_path)
    trainer = _trainer(model, data, epochs=11.0, eval_every=5.0, schedule="linear")
    rows = trainer.run().rows
    train = [row for row in rows if row["split"] == "train"]
    validation = [row for row in rows if row["split"] == "validation"]
    assert [(row["step"], row["depth"]) for row in train] == [(s, d) for s in (20, 22) for d in (1, 2, 3)]
    assert [row["step"] for row in validation[::3]] == [10, 20, 22]
    assert all(math.isnan(row["match"]) and row["grad_norm"] > 0 for row in train)
    assert all(0 <= row["match"] <= 1 and 0 < row["alpha"] < 1 for row in validation)
    assert train[-1]["learning_rate"] == pytest.approx(3e-3 / 21)
    # The last validation row is the plain loss of the trained head.
    tally = trainer.measure(data.batch(range(4)))
    for row, loss, match, count in zip(validation[-3:], tally.loss, tally.match, tally.count, strict=True):
        assert row["loss"] == pytest.approx(float(loss / count), rel=1e-4)
        assert row["match"] == pytest.approx(float(match / count))
    trainer.curve.write(tmp_path / "new" / "curve.csv")
    lines = (tmp_path / "new" / "curve.csv").read_text().splitlines()
    assert lines[0] == "step,epoch,split,depth,loss,match,alpha,learning_rate,grad_norm"
    assert len(lines) == 1 + len(rows)


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_nothing_to_learn_from_is_said_before_training(model, tmp_path, empty):
    data = _dataset(model, _completions(model, [(5, 6), (4, 7)]), tmp_path / "full")
    nothing = _dataset(model, _completions(model, [(5, 1), (4, 1)]), tmp_path / "ones")
    train, validation = (nothing, data) if empty == "train" else (data, nothing)
    head = SharedHead(model, DEPTHS)
    with pytest.raises(TrainingError, match=f"distill.prompts.{empty}: no completion of more than one token"):
        Trainer(model, head, WHOLE, losses.Objective("ce"), _config(), 0.8, train, validation, 3)


def test_a_depth_that_no_completion_reaches_has_a_curve_without_it(model, tmp_path):
    data = _dataset(model, _completions(model, [(1, 2), (1, 2)]), tmp_path)
    trainer = Trainer(model, SharedHead(model, DEPTHS), WHOLE, losses.Objective("ce"), _config(), 0.8, data, data, 3)
    rows = trainer.run().rows
    assert [row["loss"] for row in rows if row["depth"] == 3] == [0.0] * (len(rows) // DEPTHS)
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_training_gives_the_caller_its_threads_back(model, tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        data = _dataset(model, _completions(model, [(5, 6), (4, 7)]), tmp_path)
        Trainer(model, SharedHead(model, DEPTHS), WHOLE, losses.Objective("ce"), _config(), 0.8, data, data, 3).run()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_projection_of_middle_states_leaves_its_zero_start(model, tmp_path, optimizer):
    data = _dataset(model, _completions(model, [(5, 6), (4, 7)]), tmp_path, middle_layers=[1])
    trainer = _trainer(model, data, middle_layers=[1], optimizer=optimizer, epochs=4.0)
    assert not trainer.head.middle_proj.weight.any()
    before = trainer.measure(data.batch(range(2))).loss
    trainer.run()
    assert trainer.head.middle_proj.weight.abs().mean() > 1e-3
    assert bool((trainer.measure(data.batch(range(2))).loss < before).all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_record_is_named(model, tmp_path, value):
    completions = _completions(model, [(5, 4), (3, 3), (6, 4)])
    _dataset(model, completions, tmp_path)
    stored = np.load(tmp_path / "train.npy")
    stored[completions[0].length + 4] = value  # inside r1
    np.save(tmp_path / "train.npy", stored)
    data = Dataset(completions, states.StoredStates.open(tmp_path, "train", torch.float32), DEPTHS)
    with pytest.raises(TrainingError, match=r"not finite at step \d+ .* these records: r1$"):
        _trainer(model, data, batch_sequences=1).run()


# The gate: a head that learned one text by heart drafts all of it


@pytest.mark.parametrize("name", ["ce", "lk_hybrid"])
def test_overfitting_one_text_accepts_full_blocks(tmp_path, name):
    """Any shift between states, embeddings, labels, positions or caches of training and serving breaks this."""
    model = tiny.llama(tied=False, seed=2).requires_grad_(False)
    model.generation_config.eos_token_id = None
    prompt = tiny_heads.prompt(8, seed=17)
    (text,) = stock_greedy(model, [prompt], 41)
    assert len(set(text)) > 25  # nothing that a head without memory would get right
    data = _dataset(model, [Completion("r0", "s", "corpus", "chat", prompt, text, "length", 0.0)], tmp_path)
    objective = losses.Objective(name, eta=1.0, ce_weight=1.0)
    trainer = _trainer(model, data, objective=objective, epochs=200.0, learning_rate=1e-2, schedule="cosine")
    last = trainer.run().rows[-DEPTHS:]
    assert [(row["split"], row["depth"], row["match"]) for row in last] == [
        ("validation", depth, 1.0) for depth in (1, 2, 3)
    ]
    decoder = Decoder(model)
    drafter = SharedDrafter(decoder, checkpoint.TrainedHead(trainer.head, WHOLE, {}))
    result = speculate(decoder, drafter, [prompt], max_new_tokens=41, num_drafts=DEPTHS, rule=Greedy())
    assert result.completions == [text]
    assert result.rounds == [[(DEPTHS, DEPTHS)] * 10]  # one token of the prefill, then 10 rounds of K + 1


# Heads on disk


def test_a_head_comes_back_as_it_went(model, tmp_path):
    head = tiny_heads.random_head(model, DEPTHS)
    checkpoint.save(tmp_path / "deep" / "head", head, CUT, "tiny")
    loaded = checkpoint.load(tmp_path / "deep" / "head", model)
    assert torch.equal(loaded.vocab.ids, CUT.ids)
    assert loaded.module.depths == DEPTHS
    assert loaded.facts["parameters"] == sum(p.numel() for p in head.parameters())
    for (name, ours), theirs in zip(loaded.module.state_dict().items(), head.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    half = checkpoint.load(tmp_path / "deep" / "head", model, torch.bfloat16)
    assert torch.equal(half.module.eh_proj.weight, head.eh_proj.weight.bfloat16())


def test_a_bfloat16_head_is_stored_in_float32(model, tmp_path):
    head = tiny_heads.random_head(model, DEPTHS).bfloat16()
    checkpoint.save(tmp_path, head, WHOLE, "tiny")
    loaded = checkpoint.load(tmp_path, model)
    assert loaded.module.eh_proj.weight.dtype == torch.float32
    assert torch.equal(loaded.module.eh_proj.weight, head.eh_proj.weight.float())


def test_a_head_that_is_missing_or_another_backbone_s_is_refused(model, tmp_path):
    with pytest.raises(checkpoint.HeadError, match="no trained head here; run `"):
        checkpoint.load(tmp_path, model)
    checkpoint.save(tmp_path, tiny_heads.random_head(model, DEPTHS), WHOLE, "tiny")
    for other in (tiny.llama(hidden_size=64), tiny.llama(vocab_size=300)):
        with pytest.raises(checkpoint.HeadError, match=r"head of tiny .* does not fit this backbone"):
            checkpoint.load(tmp_path, other)
    facts = json.loads((tmp_path / "head.json").read_text())
    assert (facts["depths"], facts["draft_vocab_size"], facts["backbone"]) == (DEPTHS, 288, "tiny")


# The draft vocabulary


def test_maps_both_ways():
    vocab = DraftVocab(torch.tensor([1, 4, 5, 9]), 11)
    assert torch.equal(vocab.index[vocab.ids], torch.arange(4))  # t2d after d2t
    outside = [token for token in range(11) if token not in (1, 4, 5, 9)]
    assert vocab.index[outside].tolist() == [-1] * 7
    weight = torch.arange(22.0).view(11, 2)
    assert torch.equal(vocab.rows(weight), weight[[1, 4, 5, 9]])
    assert not vocab.whole
    assert vocab.coverage(torch.tensor([1, 1, 0, 9])) == 0.75
    whole = DraftVocab(torch.arange(11), 11)
    assert whole.whole
    assert whole.rows(weight) is weight
    assert whole.coverage(torch.arange(11)) == 1.0


@pytest.mark.parametrize("ids", [[4, 1], [1, 1, 4], [-1, 2], [1, 11]])
def test_ids_that_are_no_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="ascending unique ids below 11"):
        DraftVocab(torch.tensor(ids), 11)


def test_the_most_frequent_tokens_are_chosen_lower_ids_first():
    tokens = torch.tensor([7, 7, 7, 2, 2, 5, 5, 3, 3, 8])
    assert choose(tokens, 10, 1).ids.tolist() == [7]
    assert choose(tokens, 10, 3).ids.tolist() == [2, 3, 7]
    assert choose(tokens, 10, 6).ids.tolist() == [0, 2, 3, 5, 7, 8]
    for size in (0, 10, 99):
        assert choose(tokens, 10, size).whole


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parts_on_threads_train_like_one_batch(model, tmp_path, monkeypatch, optimizer):
    """A batch split over two threads is the same step, summation order aside."""
    shapes = [(6, 9), (3, 5), (4, 7), (9, 12)]
    data = _dataset(model, _completions(model, shapes), tmp_path)
    weights = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        trainer = _trainer(model, data, optimizer=optimizer, batch_sequences=4, epochs=3.0, learning_rate=1e-3)
        assert trainer.threads == threads
        trainer.run()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.head.parameters()]))
    # Muon orthogonalises in bfloat16, so it amplifies the last bits more than AdamW does.
    torch.testing.assert_close(weights[1], weights[0], atol=2e-4 if optimizer == "muon" else 2e-5, rtol=1e-3)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    masters = {
        "eh_proj.weight": torch.nn.Parameter(torch.ones(4, 3)),
        "norm.weight": torch.nn.Parameter(torch.ones(3)),
        "lm_heads.0": torch.nn.Parameter(torch.ones(7, 3)),  # its rows are tokens
    }
    muon, adamw = build_optimizers(masters, _config(optimizer="muon"))
    assert isinstance(muon, Muon)
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(4, 3)]
    assert [p.shape for p in adamw.param_groups[0]["params"]] == [(3,), (7, 3)]
    (only,) = build_optimizers(masters, _config(optimizer="adamw"))
    assert [p.shape for p in only.param_groups[0]["params"]] == [(4, 3), (3,), (7, 3)]


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_muon_is_torch_s(monkeypatch, shape):
    """Whose own rounds to bfloat16: made to do so too, ours takes the same steps, weight decay and all."""
    monkeypatch.setattr(setup, "arithmetic", lambda dtype: dtype)
    start = torch.randn(shape)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], lr=0.1, weight_decay=0.3),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert (ours - start).abs().max() > 0.05


def test_orthogonalising_brings_singular_values_near_one():
    matrix = torch.randn(40, 16)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    got = orthogonalised(matrix, torch.float32)
    values = torch.linalg.svdvals(got)
    assert 0.6 < values.min() <= values.max() < 1.3  # as the quintic has it, not exactly 1
    assert torch.einsum("ik,ij,kj->k", u, got, vt).min() > 0.6  # along the matrix's own singular vectors


@pytest.mark.parametrize("vocab", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_own_output_rows_learn_a_text_by_heart(model, tmp_path, optimizer, vocab):
    data = _dataset(model, _completions(model, [(6, 12)]), tmp_path)
    head = ParallelHead(model, DEPTHS, vocab, output="own")
    before = [head.output_rows(depth).detach().clone() for depth in range(DEPTHS)]
    objective = losses.Objective("ce")
    options = _config(optimizer=optimizer, epochs=150.0, learning_rate=2e-2)
    last = Trainer(model, head, vocab, objective, options, 1.0, data, data, 0).run().rows[-DEPTHS:]
    covered = vocab.coverage(torch.tensor(data.completions[0].completion_ids))
    for depth, row in enumerate(last):
        assert row["match"] == pytest.approx(covered)  # all that it can draft
        assert row["loss"] < 0.1
        moved = [head.output_rows(d).detach() - before[d] for d in (depth, depth - 1)]
        assert moved[0].abs().max() > 0.05
        assert not torch.equal(*moved)


@pytest.mark.parametrize("scope", ["position", "batch"])
def test_lambda_of_the_whole_batch_does_not_depend_on_its_parts(model, tmp_path, monkeypatch, scope):
    data = _dataset(model, _completions(model, [(6, 9), (3, 5), (4, 7), (9, 12)]), tmp_path)
    objective = losses.Objective("lk_hybrid", eta=3.0, lambda_scope=scope)
    norms = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        trainer = _trainer(model, data, objective=objective, batch_sequences=4)
        optimizers = build_optimizers(trainer.masters.masters, trainer.config)
        tally, norm, _ = trainer.step(range(4), optimizers)
        norms.append([*tally.loss.tolist(), norm])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("name", ["reverse_kl", "js", "tv", "lk_hybrid", "lk_nll", "chain"])
def test_every_loss_of_the_backbone_s_distribution_raises_acceptance(model, tmp_path, name):
    """From a head that cross-entropy has begun: alone, tv and its kin see no gradient where p and q do not overlap."""
    data = _dataset(model, _completions(model, [(6, 12), (4, 9)]), tmp_path)
    objective = losses.Objective(name, eta=3.0, lambda_scope="batch", ce_weight=0.05)
    trainer = _trainer(model, data, objective=objective, epochs=60.0, learning_rate=3e-3)
    before = trainer.measure(data.batch(range(2))).alpha
    trainer.run()
    after = trainer.measure(data.batch(range(2))).alpha
    assert bool((after > before * 1.2).all())
