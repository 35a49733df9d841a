"""Heads that models ship: read, trained on, written back; against ``transformers``' own MTP layer."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_layers import MtpModel

from selfspec.backbones import load
from selfspec.backbones.decoder import Decoder
from selfspec.config import BackboneConfig, HeadConfig, TrainConfig
from selfspec.distill import states
from selfspec.distill.records import Completion
from selfspec.heads import build, checkpoint, native, start
from selfspec.heads.protocol import HeadError
from selfspec.heads.shared import SharedHead
from selfspec.losses import Objective
from selfspec.training.data import Dataset
from selfspec.training.loop import Trainer
from tests.unit import tiny, tiny_heads, tiny_native
from tests.unit.tiny_families import family

BF16 = torch.bfloat16
TEXT = torch.tensor(tiny_heads.prompt(24, seed=4))
NATIVE = HeadConfig(type="shared", depths=3, draft_vocab_size=0, depth_decay=1.0, init="native")
families = pytest.mark.parametrize(("name", "form"), list(tiny_native.FORMS.items()), ids=list(tiny_native.FORMS))


def _tensors(model, form, dtype=BF16):
    return tiny_native.named(tiny_native.stock(model, form, dtype), form, dtype)


def _shipped(folder, name="mimo", how="single", **changes):
    """A model of the family ``name`` with its head, whose tensors are changed; None: left out."""
    model, form = family(name), tiny_native.FORMS[name]
    tensors = {name: tensor for name, tensor in (_tensors(model, form) | changes).items() if tensor is not None}
    return tiny_native.ship(folder, model, tensors, how), model, tensors


def _bits(tensors):
    return {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).tolist()) for name, t in tensors.items()}


def _built(folder, model):
    return build.build(NATIVE, model, tiny_heads.vocabulary(model), start.read(NATIVE, folder))


# The two formats


def test_the_mimo_form_has_the_names_that_engines_read():
    head = tiny_heads.random_head(family("mimo"))
    layer = "model.mtp_layers.0."
    projections = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + [f"self_attn.{p}_proj.bias" for p in "qkv"]
    norms = [f"{part}_layernorm.weight" for part in ("token", "hidden", "final", "input", "post_attention")]
    mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names = {layer + name for name in ["input_proj.weight", *projections, *norms, *mlp]}
    assert set(native.to_native(native.MIMO, head.state_dict())) == names
    # A layer without biases ships zeros: left out, they would be whatever lay in the engine's memory.
    without = native.to_native(native.MIMO, tiny_heads.random_head(tiny.llama()).state_dict())
    assert set(without) == names
    sizes = {"q": 32, "k": 16, "v": 16}
    for part, size in sizes.items():
        assert torch.equal(without[f"{layer}self_attn.{part}_proj.bias"], torch.zeros(size))


def test_the_qwen_form_has_the_names_that_engines_read():
    state = {f"{name}.weight": torch.zeros(1) for name in ("enorm", "hnorm", "eh_proj", "post_norm")}
    state |= {"mtp_block.self_attn.q_norm.weight": torch.zeros(1), "mtp_block.mlp.up_proj.weight": torch.zeros(1)}
    assert list(native.to_native(native.QWEN3_5, state)) == [
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ]


def test_columns_are_exchanged_where_the_hidden_state_comes_first():
    state = {"eh_proj.weight": torch.arange(6.0).expand(2, 6)}  # column j holds j: embedding 0..2, hidden 3..5
    assert native.to_native(native.QWEN3_5, state)["mtp.fc.weight"][0].tolist() == [0, 1, 2, 3, 4, 5]
    hidden_first = native.exchanged(state["eh_proj.weight"])
    assert hidden_first[0].tolist() == [3, 4, 5, 0, 1, 2]
    tensors = {"model.mtp_layers.0.input_proj.weight": hidden_first}
    assert torch.equal(native.from_native(native.MIMO, tensors, state)["eh_proj.weight"], state["eh_proj.weight"])


@pytest.mark.parametrize("options", [{"norms": "joint"}, {"layers": 2}, {"kind": "parallel"}, {"kind": "cascade"}])
def test_heads_of_another_form_are_not_written(tmp_path, options):
    head = tiny_heads.random_head(tiny.llama(), 2, **options)
    with pytest.raises(HeadError, match=r"^head.*allowed: (a head of type )?shared"):
        native.write(tmp_path, head, native.MIMO, BF16)
    assert list(tmp_path.iterdir()) == []


# There and back


@families
@pytest.mark.parametrize("how", ["single", "beside", "sharded", "indexed"])
def test_it_is_read_wherever_it_lies_and_the_model_as_if_it_were_not_there(tmp_path, name, form, how):
    folder, model, tensors = _shipped(tmp_path, name, how)
    found = native.read(folder)
    assert found.form.name == form
    assert _bits(found.tensors) == _bits(tensors)
    spec = BackboneConfig(uri=f"file:{folder}", name="tiny", license="MIT", dtype="float32")
    loaded = load.load_model(spec)
    assert torch.equal(loaded(TEXT[None]).logits, model(TEXT[None]).logits)


@families
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_read_built_saved_loaded_and_written_it_is_the_same_to_the_bit(tmp_path, name, form, dtype):
    model = family(name)
    tensors = _tensors(model, form, dtype)
    folder = tiny_native.ship(tmp_path / "model", model, tensors)
    begun = start.read(NATIVE, folder)
    head = build.build(NATIVE, model, tiny_heads.vocabulary(model), begun)
    assert head.eh_proj.weight.dtype == torch.float32
    checkpoint.save(tmp_path / "head", head, tiny_heads.vocabulary(model), "tiny", begun.facts)
    trained = checkpoint.load(tmp_path / "head", model, torch.float32)
    assert trained.module.options["init"] == "native"
    form_of_it, dtypes = native.stored(trained.facts)
    path = native.write(tmp_path / "out", trained.module, form_of_it, dtypes)
    assert path == tmp_path / "out/mtp.safetensors"
    assert _bits(load_file(path)) == _bits(tensors)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_it_goes_back_to_its_form_by_way_of_another_run(tmp_path):
    folder, model, tensors = _shipped(tmp_path / "model")
    vocab = tiny_heads.vocabulary(model)
    first = start.read(NATIVE, folder)
    checkpoint.save(tmp_path / "one", build.build(NATIVE, model, vocab, first), vocab, "tiny", first.facts)
    again = NATIVE.model_copy(update={"init": "checkpoint", "checkpoint": str(tmp_path / "one")})
    second = start.read(again, folder)
    checkpoint.save(tmp_path / "two", build.build(again, model, vocab, second), vocab, "tiny", second.facts)
    trained = checkpoint.load(tmp_path / "two", model, torch.float32)
    assert trained.facts["start"]["start"] == first.facts
    assert _bits(load_file(native.write(tmp_path, trained.module, *native.stored(trained.facts)))) == _bits(tensors)
    assert native.stored({"type": "shared"}) is None


def test_zero_biases_are_dropped_where_the_layer_has_none_and_come_back(tmp_path):
    model = tiny.llama()
    tensors = native.to_native(native.MIMO, tiny_heads.random_head(model).state_dict())
    folder = tiny_native.ship(tmp_path, model, tensors, "beside")
    head = _built(folder, model)
    assert _bits(load_file(native.write(tmp_path / "out", head, native.MIMO, torch.float32))) == _bits(tensors)
    bias = "model.mtp_layers.0.self_attn.k_proj.bias"
    tensors[bias][3] = 0.5
    save_file(tensors, folder / "mtp.safetensors")
    with pytest.raises(HeadError, match=f"it has beside what the head takes {bias}; mend"):
        _built(folder, model)


def test_its_digest_tells_values_names_and_dtypes(tmp_path):
    def digest(tensors):
        return native.Native(tmp_path, native.MIMO, tensors).facts["sha256"]

    one = torch.arange(4.0)
    others = [{"a": one.clone()}, {"a": one + 1}, {"b": one}, {"a": one.view(2, 2)}, {"a": one.to(BF16)}]
    assert digest({"a": one}) == digest(others[0])
    assert len({digest(tensors) for tensors in others}) == len(others)
    facts = native.Native(tmp_path, native.MIMO, {"a": one.to(BF16)}).facts
    assert json.loads(json.dumps(facts)) == {
        "init": "native",
        "format": "mimo",
        "sha256": facts["sha256"],
        "dtypes": {"a": "bfloat16"},
    }


# What the weights compute


class _Masked(nn.Module):
    """Input embeddings with zeros for the first token, as a shared head sees position 0."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        embedded = self.inner(ids)
        embedded[:, 0] = 0
        return embedded


def _reference(model, mtp, hidden, *, zeroed=True):
    """Logits ``[T - 1, V]`` of ``transformers``' layer over TEXT: state i and the token after it, at position i."""
    embedded = model.get_input_embeddings()(TEXT[None, 1:]).clone()
    if zeroed:
        embedded[:, 0] = 0
    positions = torch.arange(len(TEXT) - 1)[None]
    mask = torch.full((len(TEXT) - 1,) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
    rotary = model.model.rotary_emb(embedded, positions)
    return model.lm_head(mtp(embedded, hidden[None, :-1], rotary, mask, positions, None))[0]


@families
def test_its_logits_are_those_of_transformers_layer(tmp_path, name, form):
    model = family(name)
    mtp = tiny_native.stock(model, form, BF16)
    folder = tiny_native.ship(tmp_path, model, tiny_native.named(mtp, form, BF16))
    hidden, states = tiny_heads.forced(model, _built(folder, model), TEXT, depths=1)
    ours = model.lm_head(states[0])  # at anchors 0..T-3, whose x[i+2] is there
    torch.testing.assert_close(ours, _reference(model, mtp, hidden)[:-1], atol=1e-4, rtol=1e-4)
    assert ours.std() > 0.5  # of values that differ
    # The reference does not zero position 0 by itself; the difference reaches every anchor that attends to it.
    assert (ours - _reference(model, mtp, hidden, zeroed=False)[:-1]).abs().max() > 1e-2
    # Swapped halves would show.
    mtp.config.mtp_hidden_states_first = not mtp.config.mtp_hidden_states_first
    assert (ours - _reference(model, mtp, hidden)[:-1]).abs().max() > 0.1


# MtpModel takes the first norm it finds by name in the last layer; in linear attention that is a gated one.
@pytest.mark.parametrize("name", ["mimo", "qwen3_5-attention"])
def test_its_last_logits_are_those_of_transformers_model(tmp_path, name):
    """As stock ``generate(use_mtp=True)`` runs it, where positions count from the token and not from the state."""
    model, form = family(name), tiny_native.FORMS[name]
    layer = tiny_native.stock(model, form, BF16)
    folder = tiny_native.ship(tmp_path, model, tiny_native.named(layer, form, BF16))
    hidden, states = tiny_heads.forced(model, _built(folder, model), TEXT, depths=1)
    model.config.update({"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]})
    model.config.mtp_hidden_states_first = form == "mimo"
    mtp = MtpModel(model, 1).eval()
    mtp.layers[0].load_state_dict(layer.state_dict())
    mtp.embed_tokens = _Masked(model.get_input_embeddings())
    positions = torch.arange(1, len(TEXT) - 1)[None]
    with torch.no_grad():
        drafted, logits, _ = mtp(TEXT[None, 1:-1], hidden[None, :-2], None, positions, None)
    ours = model.lm_head(states[0, -1])
    torch.testing.assert_close(ours, logits[0, 0], atol=1e-4, rtol=1e-4)
    assert drafted.item() == ours.argmax()


def test_training_goes_on_from_it(tmp_path):
    folder, model, tensors = _shipped(tmp_path / "model")
    prompt, written = TEXT[:8].tolist(), TEXT[8:].tolist()
    completion = Completion("one", "s", "corpus", "chat", prompt, written, "length", 0.0)
    with torch.inference_mode():
        hidden = [states.recompute(Decoder(model), completion)]
    states.write(tmp_path, "train", hidden, completion.length, model.config.hidden_size, torch.float32)
    data = Dataset([completion], states.StoredStates.open(tmp_path, "train", torch.float32), 3)
    head = _built(folder, model)
    options = TrainConfig(
        epochs=3.0,
        optimizer="adamw",
        learning_rate=1e-5,
        weight_decay=0.0,
        batch_sequences=1,
        warmup_fraction=0.0,
        schedule="constant",
        grad_clip=1.0,
        dtype="float32",
        eval_every=1.0,
        chunk_rows=64,
    )
    Trainer(model, head, tiny_heads.vocabulary(model), Objective("ce"), options, 1.0, data, data, 0).run()
    trained = native.to_native(native.MIMO, head.state_dict())
    for name, tensor in tensors.items():
        moved = (trained[name] - tensor.float()).abs().max()
        assert 0 < moved < 5e-5, name  # by AdamW's three steps of the learning rate, from what was shipped
    rounded = load_file(native.write(tmp_path, head, native.MIMO, BF16))
    assert all(torch.equal(rounded[name], tensor.to(BF16)) for name, tensor in trained.items())


# What is refused


def _refused(folder, model, message):
    with pytest.raises(HeadError, match=message) as caught:
        _built(folder, model)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_head_is_named_with_what_was_looked_for(tmp_path):
    model = tiny.llama()
    tiny.save(tmp_path)
    _refused(tmp_path, model, r"ships no head: none of its 20 tensors .* is named mtp\.\* or model\.mtp_layers\.\*; ch")
    (tmp_path / "model.safetensors").unlink()
    _refused(tmp_path, model, "none of its 0 tensors in safetensors files")


BIAS = "model.mtp_layers.0.self_attn.q_proj.bias"
PROJECTION = "model.mtp_layers.0.input_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({BIAS: None}, rf"it lacks {BIAS}; mend the files"),
        (
            {"model.mtp_layers.0.extra": torch.ones(1)},
            r"it has beside what the head takes model\.mtp_layers\.0\.extra;",
        ),
        ({PROJECTION: torch.ones(32, 32)}, rf"it has in another shape {PROJECTION} \(\[32, 32\], not \[32, 64\]\);"),
        ({BIAS: None, PROJECTION: None}, rf"it lacks {PROJECTION}, {BIAS};"),
        (
            {"model.mtp_layers.1.input_proj.weight": torch.ones(32, 64)},
            r"has 2 layers \(model\.mtp_layers\.\{0,1\}\.\*",
        ),
        ({"mtp.fc.weight": torch.ones(32, 64)}, "heads of two formats, qwen3_5 and mimo; remove one"),
    ],
)
def test_a_head_that_is_not_one_layer_of_the_backbone_s_is_refused(tmp_path, changes, message):
    folder, model, _ = _shipped(tmp_path, **changes)
    _refused(folder, model, message)


def test_a_long_list_of_tensors_is_cut(tmp_path):
    folder, model, tensors = _shipped(tmp_path)
    for name in list(tensors)[2:]:
        del tensors[name]
    tiny_native.ship(folder, model, tensors)
    _refused(folder, model, r"it lacks ([\w.]+, ){3}[\w.]+ and 10 more; mend")


def test_copies_that_contradict_each_other_are_refused_unless_an_index_says_which_counts(tmp_path):
    folder, model, tensors = _shipped(tmp_path)
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(other, folder / "mtp.safetensors")
    _refused(
        folder, model, r"and 12 more in both model\.safetensors and mtp\.safetensors, and no model\.safetensors\.ind"
    )
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    for places, wanted in ((names, tensors), (names | dict.fromkeys(other, "mtp.safetensors"), other)):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert _bits(native.read(folder).tensors) == _bits(wanted)


def test_damaged_files_are_named(tmp_path):
    folder, model, tensors = _shipped(tmp_path, how="indexed")
    del tensors[BIAS]
    save_file(tensors, folder / "mtp.safetensors")
    _refused(folder, model, rf"mtp\.safetensors: has no tensor {BIAS}, which .*index\.json says is there")
    (folder / "mtp.safetensors").write_bytes(b"12345678 no header")
    _refused(folder, model, r"mtp\.safetensors: cannot be read \(.*\); fetch it again")
    (folder / "mtp.safetensors").unlink()
    _refused(folder, model, r"mtp\.safetensors: cannot be read")
    (folder / "model.safetensors.index.json").write_text("[]")
    _refused(folder, model, r"index\.json: is no index of safetensors files; fetch it again")


# MiMo backbones


def test_a_mimo_directory_is_a_qwen2_model_and_none_of_its_code_runs(tmp_path):
    folder, model, _ = _shipped(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mimo"
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config["auto_map"] = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for module in ("configuration_mimo", "modeling_mimo"):
        (folder / f"{module}.py").write_text("raise AssertionError\n")
    spec = BackboneConfig(uri=f"file:{folder}", name="tiny", license="MIT", dtype="float32")
    assert load.load_tokenizer(spec).vocab_size > 0
    loaded = load.load_model(spec)
    qwen2 = family("qwen2", tie_word_embeddings=False)
    qwen2.load_state_dict(model.state_dict())
    assert torch.equal(loaded(TEXT[None]).logits, qwen2(TEXT[None]).logits)
    assert isinstance(_built(folder, loaded), SharedHead)
