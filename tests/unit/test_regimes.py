"""Training's regimes: going on after a kill, parts of a batch, several processes, live states, an unfrozen backbone."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml

from selfspec import config, losses
from selfspec.backbones import unfreeze
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.load import BackboneError
from selfspec.benchmark import drift
from selfspec.benchmark.lossless import stock_greedy
from selfspec.distill import states
from selfspec.heads import checkpoint
from selfspec.training.data import Dataset
from selfspec.training.loop import Trainer
from selfspec.training.setup import build_optimizers
from tests.unit import tiny, tiny_heads, training_data
from tests.unit.training_data import DEPTHS

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(6, 9), (3, 5), (4, 7), (9, 12), (5, 6)]


@pytest.fixture
def model():
    built = tiny.llama().requires_grad_(False)
    built.generation_config.eos_token_id = None
    return built


@pytest.fixture
def data(model, tmp_path):
    return training_data.dataset(model, training_data.completions(model, SHAPES), tmp_path / "states")


def _weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.head.parameters()])


# Going on after a kill

REGIMES = {
    "adamw": {"optimizer": "adamw", "schedule": "cosine"},
    "muon": {"optimizer": "muon", "schedule": "linear"},
    "on_policy": {"shared": {"on_policy": 0.5}},
    "unfrozen": {"shared": {"unfrozen_layers": 1, "backbone_learning_rate": 1e-3}},
}


def _regime(name):
    chosen = dict(REGIMES[name])
    shared = {"resume_steps": 2} | chosen.pop("shared", {})
    return chosen | {"shared": shared, "epochs": 4.0, "eval_every": 1.0}


def _killed_after(monkeypatch, steps):
    """As a kill does: nothing runs after it."""
    plain = Trainer.step

    def step(self, indices, optimizers, number=0):
        if number > steps:
            raise KeyboardInterrupt
        return plain(self, indices, optimizers, number)

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("steps", [1, 4, 11])
def test_a_killed_run_ends_as_an_uninterrupted_one_to_the_last_bit(model, data, tmp_path, monkeypatch, name, steps):
    regime, seed = _regime(name), {"seed": 3}
    if name == "unfrozen":
        data = Dataset(data.completions, None, DEPTHS)
    outcomes = []
    for path, kill in ((None, None), (tmp_path / "resume.pt", steps)):
        fresh = tiny.llama().requires_grad_(False)
        if kill:
            with monkeypatch.context() as patch:
                _killed_after(patch, kill)
                with pytest.raises(KeyboardInterrupt):
                    training_data.trainer(fresh, data, resume=path, **seed, **regime).run()
            assert path.exists() == (kill >= 2)
            fresh = tiny.llama().requires_grad_(False)
        trainer = training_data.trainer(fresh, data, resume=path, **seed, **regime)
        rows = trainer.run().rows
        kept = {name: weight.clone() for name, weight in trainer.backbone_masters.masters.items()}
        outcomes.append((_weights(trainer), pd.DataFrame(rows), kept))
    (weights, curve, backbone), (again, curve_again, backbone_again) = outcomes
    assert torch.equal(weights, again)
    pd.testing.assert_frame_equal(curve, curve_again, check_exact=True)
    assert backbone.keys() == backbone_again.keys()
    assert all(torch.equal(weight, backbone_again[name]) for name, weight in backbone.items())


@pytest.mark.parametrize(
    "other",
    [
        {"learning_rate": 1e-3},
        {"seed": 4},
        {"head_seed": 1},
        {"objective": losses.Objective("tv", ce_weight=1.0)},
        {"shared": {"resume_steps": 2, "on_policy": 0.1}},
        {"vocab": training_data.DraftVocab(torch.arange(0, 288, 2), 288)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_another_run_left_behind_is_refused_and_not_mixed_in(model, data, tmp_path, monkeypatch, capsys, other):
    path, options = tmp_path / "resume.pt", {"epochs": 3.0, "shared": {"resume_steps": 2}}
    with monkeypatch.context() as patch:
        _killed_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            training_data.trainer(model, data, resume=path, **options).run()
    capsys.readouterr()
    continued = training_data.trainer(model, data, resume=path, **(options | other))
    continued.run()
    assert "is of a run with other parameters or data; not used" in capsys.readouterr().out
    fresh = training_data.trainer(model, data, **(options | other))
    fresh.run()
    assert torch.equal(_weights(continued), _weights(fresh))


def test_a_finished_run_leaves_nothing_to_go_on_from(model, data, tmp_path):
    path = tmp_path / "deep" / "resume.pt"
    trainer = training_data.trainer(model, data, resume=path, epochs=3.0, shared={"resume_steps": 1})
    trainer.run()
    assert path.exists()
    trainer.save(tmp_path / "head", "tiny")
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


# Parts of a batch, and processes


@pytest.mark.parametrize("scope", ["position", "batch"])
def test_micro_batches_are_the_same_step(model, data, scope):
    objective = losses.Objective("lk_hybrid", eta=3.0, lambda_scope=scope)
    found = []
    for size in (0, 1, 2, 3):
        trainer = training_data.trainer(
            model, data, objective=objective, batch_sequences=5, shared={"micro_batch": size}
        )
        optimizers = build_optimizers(trainer.masters.masters, trainer.config)
        tally, norm, anchors = trainer.step(range(5), optimizers)
        found.append([*tally.loss.tolist(), *tally.count.tolist(), norm, anchors])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


def test_two_processes_train_as_one(tmp_path):
    """On the same global batches; the last batch of an epoch is too small for both to have a share."""
    curves = []
    for count in (1, 2):
        out = tmp_path / f"{count}.csv"
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        done = subprocess.run(
            [sys.executable, "-m", *launch, "--module", "tests.unit.two_processes", str(out)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("training on 2 processes" in done.stderr + done.stdout) == (count == 2)
        curves.append(pd.read_csv(out))
    assert len(curves[0]) > 10
    assert curves[0].loss.iloc[0] > curves[0].loss.iloc[-1]
    pd.testing.assert_frame_equal(curves[1], curves[0], rtol=1e-4, atol=1e-4)


# Part of the data


def test_a_share_of_the_data_is_the_same_in_both_stages_and_holds_what_it_says(model):
    texts = training_data.completions(model, [(4, 1 if number % 7 == 0 else 3) for number in range(40)])
    whole = Dataset(texts, None, DEPTHS)
    assert whole.taken == list(range(40))
    quarter, half = (Dataset(texts, None, DEPTHS, share, seed=1) for share in (0.25, 0.5))
    assert (len(quarter.taken), len(half.taken)) == (10, 20)
    assert set(quarter.taken) < set(half.taken)  # more data is the same and more
    assert Dataset(texts, None, DEPTHS, 0.25, seed=1).taken == quarter.taken
    assert Dataset(texts, None, DEPTHS, 0.25, seed=2).taken != quarter.taken
    assert quarter.usable == [number for number in quarter.taken if number % 7]
    batches = half.epochs(4, seed=0)
    seen = {number for _ in range(half.batches_per_epoch(4)) for number in next(batches)}
    assert seen == set(half.usable)


# States computed in training


def test_live_and_stored_states_give_the_same_loss(model, data):
    live = Dataset(data.completions, states.LiveStates(Decoder(model), data.completions, torch.float32), DEPTHS)
    objective = losses.Objective("lk_hybrid", eta=3.0, ce_weight=0.5)
    found = []
    for source in (data, live):
        trainer = training_data.trainer(model, source, objective=objective)
        tally, norm, _ = trainer.step([0, 3, 4], build_optimizers(trainer.masters.masters, trainer.config))
        found.append([*tally.loss.tolist(), norm])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_live_states_are_of_whole_completions(model, data):
    live = states.LiveStates(Decoder(model), data.completions, torch.float32)
    assert len(live) == data.offsets[-1]
    with pytest.raises(ValueError, match="tokens 0 to 4 are not one completion"):
        live.rows(0, 4)


# A backbone that is trained too


def _plain_unfrozen(model, head, completions, main_weight):
    """Loss of heads and backbone by autograd over everything at once; back-propagates."""
    trained = unfreeze.unfreeze(model, 1)
    rows = model.lm_head.weight
    sums, counts = [torch.zeros(()) for _ in range(DEPTHS)], [0] * DEPTHS
    main, taught = torch.zeros(()), 0
    for completion in completions:
        text, prompt = torch.tensor(completion.tokens), len(completion.prompt_ids)
        hidden = model.model(text[None]).last_hidden_state[0]
        logits = F.linear(hidden[prompt - 1 : -1], rows)
        main = main + F.cross_entropy(logits, text[prompt:], reduction="sum")
        taught += len(text) - prompt
        data = Dataset([completion], None, DEPTHS)
        packed = data.batch([0]).packed
        table = training_data.trainer(model, data).rotary
        per_depth = head(packed, hidden, model.get_input_embeddings().weight.detach(), table)
        for depth in range(DEPTHS):
            mask = packed.mask[depth]
            scores = F.linear(per_depth[depth][packed.rows[depth][mask]], rows.detach())
            sums[depth] = sums[depth] + F.cross_entropy(scores, packed.targets[mask], reduction="sum")
            counts[depth] += int(mask.sum())
    weights = losses.depth_weights(DEPTHS, 0.8)
    loss = sum(weights[d] * sums[d] / counts[d] for d in range(DEPTHS)) + main_weight * main / taught
    loss.backward()
    return {name: parameter.grad for name, parameter in trained.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_an_unfrozen_backbone_gets_the_gradient_of_heads_and_main_loss(tied, micro_batch):
    def fresh():
        built = tiny.llama(tied=tied, seed=3).requires_grad_(False)
        built.generation_config.eos_token_id = None
        return built

    texts = training_data.completions(fresh(), SHAPES[:4])
    data = Dataset(texts, None, DEPTHS)
    model = fresh()
    shared = {"unfrozen_layers": 1, "main_weight": 0.7, "micro_batch": micro_batch}
    trainer = training_data.trainer(model, data, shared=shared, batch_sequences=4)
    plain_model = fresh()
    head = training_data.trainer(plain_model, data).head
    wanted = _plain_unfrozen(plain_model, head, texts, 0.7)
    trainer.step(range(4), [])
    got = {name: master.grad for name, master in trainer.backbone_masters.masters.items()}
    assert got.keys() == wanted.keys()
    assert any("layers.1." in name for name in got)
    assert not any("layers.0." in name or "embed" in name for name in got)
    scale = got["lm_head.weight"].norm() / wanted["lm_head.weight"].norm()  # clipping scales all alike
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(got[name], gradient * scale, atol=1e-6, rtol=1e-3, msg=name)
    of_head = dict(head.named_parameters())
    for name, master in trainer.masters.masters.items():
        torch.testing.assert_close(master.grad, of_head[name].grad * scale, atol=1e-6, rtol=1e-3, msg=name)


def test_a_trained_backbone_is_kept_and_laid_over_a_fresh_one(tmp_path):
    model = tiny.llama(tied=True, seed=3).requires_grad_(False)
    model.generation_config.eos_token_id = None
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    texts = training_data.completions(model, SHAPES)
    data = Dataset(texts, None, DEPTHS)
    shared = {"unfrozen_layers": 1, "backbone_learning_rate": 1e-2}
    trainer = training_data.trainer(model, data, shared=shared, epochs=5.0)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    rows = trainer.run().rows
    for name, weight in model.named_parameters():
        moved = not torch.equal(weight, before.get(name, before["model.embed_tokens.weight"]))
        assert moved == ("layers.1." in name or name in ("model.norm.weight", "lm_head.weight")), name
    trainer.save(tmp_path, "tiny")
    again = tiny.llama(tied=True, seed=3).requires_grad_(False)
    loaded = checkpoint.load(tmp_path, again)
    assert loaded.backbone.keys() == trainer.backbone_masters.masters.keys()
    text = torch.tensor([texts[0].tokens])
    assert torch.equal(again(text).logits, model(text).logits)
    assert not torch.equal(again(text).logits, tiny.llama(tied=True, seed=3)(text).logits)
    # Stage 2 goes on from there: the same loss as where stage 1 stopped.
    second = training_data.trainer(again, data, shared=shared, exact=loaded.backbone)
    second.head.load_state_dict(loaded.module.state_dict())
    measured = second.measure(data.batch(data.usable))
    last = [row["loss"] for row in rows if row["split"] == "validation"][-DEPTHS:]
    assert (measured.loss / measured.count).tolist() == pytest.approx(last, rel=1e-5)


def test_weights_of_another_backbone_and_layers_that_are_not_there_are_refused(tmp_path, model):
    unfreeze.save(tmp_path, {"model.norm.weight": torch.ones(7)})
    with pytest.raises(BackboneError, match=r"model\.norm\.weight does not fit this backbone; train it again$"):
        unfreeze.apply(model, tmp_path)
    with pytest.raises(BackboneError, match=r"^train\.unfrozen_layers: got 3; allowed: at most 2, "):
        unfreeze.unfreeze(model, 3)


# The head's own drafts as inputs


@pytest.mark.parametrize("kind", ["shared", "cascade"])
def test_on_policy_inputs_are_the_heads_own_drafts(model, data, kind):
    batch = data.batch(range(5))
    seen = []

    def watched(trainer):
        chosen = trainer._drafts(1, 0)

        def drafts(depth, of_states, true):
            tokens = chosen(depth, of_states, true)
            seen.append((depth, of_states, true, tokens))
            return tokens

        return drafts

    always = training_data.trainer(model, data, kind=kind, shared={"on_policy": 1.0})
    never = training_data.trainer(model, data, kind=kind)
    states_always = always._states(batch, watched(always))
    assert [depth for depth, *_ in seen] == [2, 3]
    for _, before, true, tokens in seen:
        assert torch.equal(tokens, (before @ model.lm_head.weight.t()).argmax(-1))
        assert not torch.equal(tokens, true)
    plain = never._states(batch, never._drafts(1, 0))
    torch.testing.assert_close(states_always[0], plain[0])
    assert not torch.allclose(states_always[1], plain[1])
    seen.clear()
    half = training_data.trainer(model, data, kind=kind, shared={"on_policy": 0.5})
    half._states(batch, watched(half))
    replaced = torch.cat([(tokens != true).float() for _, _, true, tokens in seen]).mean()
    assert 0.2 < float(replaced) < 0.8


def test_parameters_that_contradict_each_other_are_named():
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["train"]["unfrozen_layers"] = 2
    with pytest.raises(config.ConfigError, match=r"^distill\.states: got 'cached'; allowed: live with train\.unfrozen"):
        config.parse(raw)
    raw["distill"]["states"] = "live"
    config.parse(raw)
    raw["head"]["type"], raw["train"]["on_policy"] = "parallel", 0.5
    raw["bench"]["num_drafts"] = [1]
    with pytest.raises(config.ConfigError, match=r"^train\.on_policy: got 0\.5; allowed: 0 with head\.type: parallel"):
        config.parse(raw)


def _distilled(model, teacher, texts, main_weight, teacher_weight):
    """Gradients of the main loss alone, by autograd over all logits at once."""
    trained = unfreeze.unfreeze(model, 1)
    total, count = torch.zeros(()), 0
    for completion in texts:
        text, prompt = torch.tensor(completion.tokens), len(completion.prompt_ids)
        log_q = model(text[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        log_p = teacher(text[None]).logits[0, prompt - 1 : -1].log_softmax(-1).detach()
        total = total - main_weight * log_q.gather(1, text[prompt:, None]).sum()
        total = total + teacher_weight * (log_p.exp() * (log_p - log_q)).sum()
        count += len(text) - prompt
    (total / count).backward()
    return {name: parameter.grad for name, parameter in trained.items()}


def test_a_backbone_learns_from_a_teacher_beside_its_heads():
    def student():
        return tiny.llama(seed=3).requires_grad_(False)

    teacher = tiny.llama(seed=8, num_hidden_layers=3).requires_grad_(False)
    teacher.generation_config.eos_token_id = None
    texts = training_data.completions(teacher, SHAPES[:3])
    data = Dataset(texts, None, DEPTHS)
    shared = {"unfrozen_layers": 1, "main_weight": 0.3, "teacher_weight": 0.9, "head_weight": 0.0}
    trainer = training_data.trainer(student(), data, shared=shared, teacher=teacher, batch_sequences=3, grad_clip=1e9)
    trainer.step(range(3), [])
    for name, gradient in _distilled(student(), teacher, texts, 0.3, 0.9).items():
        got = trainer.backbone_masters.masters[name].grad
        torch.testing.assert_close(got, gradient, atol=1e-6, rtol=1e-3, msg=name)
    assert all(not master.grad.any() for master in trainer.masters.masters.values())  # head_weight: 0
    shared |= {"head_weight": 0.5, "backbone_learning_rate": 1e-2}
    trainer = training_data.trainer(student(), data, shared=shared, teacher=teacher, epochs=40.0, batch_sequences=3)
    before = trainer.measure(data.batch(range(3)))
    trainer.run()
    after = trainer.measure(data.batch(range(3)))
    assert bool((after.match > before.match).all())
    agree = []
    for completion in texts:
        text = torch.tensor([completion.tokens])
        same = trainer.model(text).logits.argmax(-1) == teacher(text).logits.argmax(-1)
        agree.append(same[0, len(completion.prompt_ids) - 1 :])
    assert float(torch.cat(agree).float().mean()) > 0.7


def test_a_teacher_with_another_vocabulary_is_refused(model, data):
    data = Dataset(data.completions, None, DEPTHS)
    with pytest.raises(BackboneError, match=r"^train\.teacher: got one with a vocabulary of 300; allowed: "):
        training_data.trainer(model, data, shared={"unfrozen_layers": 1}, teacher=tiny.llama(vocab_size=300))


def test_drift_is_what_changed():
    before = tiny.llama(seed=3).requires_grad_(False)
    before.generation_config.eos_token_id = None
    texts = [tiny_heads.prompt(length, seed=length) for length in (9, 14, 6)]
    prompts = [tiny_heads.prompt(5, seed=number) for number in range(6)]
    options = {"max_new_tokens": 6, "batch_size": 4, "samples": 50, "seed": 0}
    same = drift.measure(Decoder(before), Decoder(before), texts, prompts, **options)
    assert same["exact_match"]["value"] == 1.0
    assert same["perplexity_after"] == same["perplexity_before"]
    total = sum(
        float(F.cross_entropy(before(torch.tensor([text])).logits[0, :-1], torch.tensor(text[1:]), reduction="sum"))
        for text in texts
    )
    count = sum(len(text) - 1 for text in texts)
    assert same["perplexity_before"]["value"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert (same["perplexity_before"]["prompts"], same["perplexity_before"]["count"]) == (3, count)
    after = tiny.llama(seed=3).requires_grad_(False)
    after.model.layers[1].mlp.down_proj.weight += 0.3 * torch.randn_like(after.model.layers[1].mlp.down_proj.weight)
    after.generation_config.eos_token_id = None
    moved = drift.measure(Decoder(before), Decoder(after), texts, prompts, **options)
    texts_before, texts_after = (stock_greedy(each, prompts, 6) for each in (before, after))
    share = sum(a == b for a, b in zip(texts_before, texts_after, strict=True)) / 6
    assert share < 1
    assert moved["exact_match"]["value"] == pytest.approx(share)
    assert moved["perplexity_after"]["value"] != moved["perplexity_before"]["value"]
