"""What only a parallel head has: a learned temperature a depth."""

import copy

import pytest
import torch
from torch.nn.functional import softmax

from selfspec import losses
from selfspec.backbones.decoder import Decoder
from selfspec.backbones.rotary import RotaryTable
from selfspec.config import TrainConfig
from selfspec.decoding.drafter import drafter_for
from selfspec.heads import checkpoint
from selfspec.heads.alignment import pack
from selfspec.heads.parallel import ParallelHead
from selfspec.training.chunked import Scorer, loss_and_gradient
from selfspec.training.data import Batch
from selfspec.training.setup import Muon, build_optimizers
from tests.unit import tiny, tiny_heads

DEPTHS = 3
TEXT = torch.tensor(tiny_heads.prompt(20))


@pytest.fixture(scope="module")
def model():
    return tiny.llama(tied=False).requires_grad_(False)


def _at_one(head):
    """The same head with every temperature 1."""
    plain = copy.deepcopy(head)
    plain.log_temperatures.data.zero_()
    return plain


def test_states_are_divided_by_the_depth_s_temperature(model):
    head = tiny_heads.random_head(model, DEPTHS, kind="parallel")
    head.log_temperatures.data.copy_(torch.tensor([0.0, 0.5, -0.25]))
    hidden, states = tiny_heads.forced(model, head, TEXT, DEPTHS)
    for depth, temperature in enumerate([1.0, 1.6487213, 0.7788008]):
        anchored = hidden[: len(states[depth])]
        wanted = (anchored + torch.nn.functional.silu(anchored @ head.blocks[depth].layers[0].weight.T)) / temperature
        torch.testing.assert_close(states[depth], wanted)


def test_temperatures_leave_the_argmax_and_change_the_distribution(model):
    head = tiny_heads.random_head(model, DEPTHS, kind="parallel")
    rows = model.lm_head.weight
    (hidden, warm), (_, plain) = (tiny_heads.forced(model, each, TEXT, DEPTHS) for each in (head, _at_one(head)))
    assert torch.equal((warm @ rows.T).argmax(-1), (plain @ rows.T).argmax(-1))
    for depth in range(DEPTHS):
        p = softmax(hidden[depth + 1 : depth + 11] @ rows.T, -1)
        alphas = [losses.acceptance(states[depth, :10] @ rows.T, p).mean() for states in (warm, plain)]
        assert abs(alphas[0] - alphas[1]) > 1e-3


@pytest.mark.parametrize("name", ["ce", "lk_hybrid"])
@pytest.mark.parametrize("output", ["shared", "own"])
def test_the_gradient_is_that_of_finite_differences(model, name, output):
    wide = copy.deepcopy(model).double()
    head = tiny_heads.random_head(wide, DEPTHS, kind="parallel", output=output).double().requires_grad_(True)
    hidden = wide.model(TEXT[None]).last_hidden_state[0]
    packed = pack([TEXT], [1], DEPTHS)
    batch = Batch(packed, hidden, wide.lm_head(hidden[packed.teachers]).logsumexp(-1), ["a"])
    vocab = tiny_heads.vocabulary(wide)
    scorer = Scorer.of(wide.lm_head.weight, vocab, torch.float64)
    # eta 0: lambda is 1, whatever alpha; with another eta it is a constant to the gradient and not to the value.
    objective = losses.Objective(name, eta=0.0)
    weights = losses.depth_weights(DEPTHS, 0.8).double()
    table = RotaryTable(wide, 64, torch.float64)

    def loss(backward=False):
        states = head(packed, hidden, wide.get_input_embeddings().weight, table)
        tally = loss_and_gradient(
            states, batch, scorer, objective, weights, 16, output_rows=head.output_rows, backward=backward
        )
        return float((tally.loss / tally.count) @ weights)

    loss(backward=True)
    step = 1e-5
    for depth in range(DEPTHS):
        around = []
        for sign in (1, -1):
            with torch.no_grad():
                head.log_temperatures[depth] += sign * step
                around.append(loss())
                head.log_temperatures[depth] -= sign * step
        slope = (around[0] - around[1]) / (2 * step)
        assert abs(slope) > 1e-4
        assert float(head.log_temperatures.grad[depth]) == pytest.approx(slope, rel=1e-5)


def test_adamw_takes_them(model):
    head = ParallelHead(model, DEPTHS, tiny_heads.vocabulary(model))
    config = TrainConfig.model_validate(
        {
            "epochs": 1,
            "optimizer": "muon",
            "learning_rate": 1e-3,
            "weight_decay": 0,
            "batch_sequences": 1,
            "warmup_fraction": 0,
            "schedule": "constant",
            "grad_clip": 1,
            "dtype": "float32",
            "eval_every": 1,
            "chunk_rows": 1,
        }
    )
    muon, adamw = build_optimizers(dict(head.named_parameters()), config)
    assert isinstance(muon, Muon)
    assert len(muon.param_groups[0]["params"]) == DEPTHS
    assert adamw.param_groups[0]["params"] == [head.log_temperatures]


def test_they_are_saved_and_drafted_with(model, tmp_path):
    head = tiny_heads.random_head(model, DEPTHS, kind="parallel")
    checkpoint.save(tmp_path, head, tiny_heads.vocabulary(model), "tiny")
    loaded = checkpoint.load(tmp_path, model)
    assert torch.equal(loaded.module.log_temperatures, head.log_temperatures)
    assert loaded.facts["parameters"] == DEPTHS * (32 * 32 + 1)
    hidden, states = tiny_heads.forced(model, head, TEXT, DEPTHS)
    drafter = drafter_for(Decoder(model), loaded)
    for depth in range(DEPTHS):
        logits = drafter.logits(hidden[:5], depth + 1)
        torch.testing.assert_close(logits, states[depth, :5] @ model.lm_head.weight.T, atol=1e-4, rtol=1e-4)
