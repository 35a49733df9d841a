"""Every kind of fault in params.yaml ends in one line that a person can act on."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from selfspec import config
from selfspec.config import Config, ConfigError
from selfspec.errors import SelfspecError

ROOT = Path(__file__).resolve().parents[2]
ITEM = "shard.sources[0]"


def _valid():
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["shard"]["sources"] = [
        {
            "name": "letters",
            "loader": "parquet",
            "kind": "prompt",
            "domain": "chat",
            "weight": 1,
            "split": "hash",
            "license": "MIT",
            "archives": [{"uri": "file:letters.parquet"}],
        }
    ]
    return raw


def _set(name, value, raw=None):
    """``raw``, or else a valid mapping, with one parameter set; ``name`` is dotted, as a fault prints it."""
    raw = _valid() if raw is None else raw
    *owners, last = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", name)]
    node = raw
    for step in owners:
        node = node[step]
    node[last] = value
    return raw


def _with(**changes):
    """A valid mapping with several parameters set; a dot is spelt as two underscores."""
    raw = _valid()
    for name, value in changes.items():
        _set(name.replace("__", "."), value, raw)
    return raw


def _faults(raw):
    with pytest.raises(ConfigError) as caught:
        config.parse(raw)
    return str(caught.value).splitlines()


def _fault(raw):
    lines = _faults(raw)
    assert len(lines) == 1, lines
    return lines[0]


def test_the_default_run_is_valid():
    assert config.load(ROOT / "params.yaml").seed >= 0


@pytest.mark.parametrize(
    ("name", "value", "shown", "allowed"),
    [
        # a number
        ("train_ce.learning_rate", "abc", "'abc'", "a finite number > 0"),
        ("train_ce.learning_rate", True, "true", "a finite number > 0"),
        ("train_ce.learning_rate", None, "null", "a finite number > 0"),
        ("train_ce.learning_rate", float("nan"), "nan", "a finite number > 0"),
        ("train_ce.learning_rate", float("inf"), "inf", "a finite number > 0"),
        ("train_ce.learning_rate", "nan", "nan", "a finite number > 0"),
        ("train_ce.learning_rate", 0, "0", "a finite number > 0"),
        ("train_ce.learning_rate", [1], "[1]", "a finite number > 0"),
        ("loss.eta", -0.5, "-0.5", "a finite number >= 0"),
        ("head.depth_decay", 1.5, "1.5", "a finite number > 0 and <= 1"),
        ("shard.heldout_fraction", 1, "1", "a finite number >= 0 and < 1"),
        # a whole number
        ("distill.batch_size", 0, "0", "a whole number >= 1"),
        ("distill.batch_size", 2.5, "2.5", "a whole number >= 1"),
        ("distill.batch_size", False, "false", "a whole number >= 1"),
        ("head.depths", 17, "17", "a whole number >= 1 and <= 16"),
        ("seed", 2**32, "4294967296", "a whole number >= 0 and < 4294967296"),
        # a choice, a text, a pattern
        ("head.type", "shred", "'shred'", "shared or cascade or parallel"),
        ("head.layers", 3, "3", "a whole number >= 1 and <= 2"),
        ("train_kl.schedule", "cosin", "'cosin'", "cosine or linear or constant"),
        ("backbone.name", "", "''", "text that is not empty"),
        ("backbone.license", 2, "2", "text that is not empty"),
        ("backbone.uri", "http://x", "'http://x'", "pypi:FILE, hf:OWNER/NAME or file:PATH"),
        ("backbone.sha256", "ABC", "'ABC'", "64 lower-case hexadecimal digits or null"),
        # a section, a list
        ("bench.num_drafts", 3, "3", "a list of at least 1, each a whole number >= 1"),
        ("bench.num_drafts", [], "[]", "a list of at least 1, each a whole number >= 1"),
        ("loss", 3, "3", "a mapping with name, eta, "),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed_and_what_to_do(name, value, shown, allowed):
    line = _fault(_set(name, value))
    assert line.startswith(f"{name}: got {shown}; allowed: {allowed}"), line
    assert line.endswith(f"; set it in params.yaml or with -S {name}=…"), line


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (f"{ITEM}.weight", -1, "got -1; allowed: a finite number >= 0; set it in params.yaml"),
        (f"{ITEM}.domain", "math", "got 'math'; allowed: chat or maths or code or prose; set it in params.yaml"),
        (f"{ITEM}.name", "A b", "got 'A b'; allowed: lower-case letters, digits and _; set it in params.yaml"),
        (
            f"{ITEM}.archives[0].uri",
            "x",
            "got 'x'; allowed: pypi:FILE, hf:OWNER/NAME or file:PATH; set it in params.yaml",
        ),
        ("bench.num_drafts[1]", 0, "got 0; allowed: a whole number >= 1; set it in params.yaml"),
    ],
)
def test_inside_a_list_the_item_is_named_and_no_override_is_suggested(name, value, expected):
    assert _fault(_set(name, value)) == f"{name}: {expected}"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            _with(shard__sources__0__archives=[{"uri": "pypi:a.whl"}]),
            f"{ITEM}.archives[0].sha256: got null; allowed: the digest of pypi:a.whl, 64 hexadecimal digits; "
            "add it, to pin the file",
        ),
        (
            _with(backbone__uri="hf:a/b"),
            "backbone.revision: got null; allowed: a commit sha of hf:a/b, 40 hexadecimal digits; "
            "add it, to pin the data",
        ),
        (
            _with(backbone__revision="0" * 40, backbone__uri="file:x"),
            f"backbone.revision: got '{'0' * 40}'; allowed: null with file:x; only hf: has revisions; remove it",
        ),
        (
            _with(shard__sources__0__weight=0),
            f"{ITEM}.weight: got 0.0; allowed: above 0 for letters with split: hash; change the weight or the split",
        ),
        (
            _with(shard__sources__0__split="heldout"),
            f"{ITEM}.weight: got 1.0; allowed: 0 for letters with split: heldout; change the weight or the split",
        ),
        (
            _with(shard__sources=_valid()["shard"]["sources"] * 2),
            "shard.sources: got ['letters']; allowed: names that differ; rename one of the two",
        ),
        (
            _with(shard__sources__0__name="all"),
            "shard.sources: got 'a source named all'; allowed: any other name: in tables all is every source; "
            "rename it",
        ),
        (
            _with(head__type="cascade", head__depths=2, accept__num_drafts=3, bench__num_drafts=[2]),
            "accept.num_drafts: got 3; allowed: at most head.depths, 2, with head.type: cascade; "
            "lower it or raise head.depths",
        ),
        (
            _with(head__type="parallel", head__depths=3, accept__num_drafts=3, bench__num_drafts=[1, 4]),
            "bench.num_drafts: got 4; allowed: at most head.depths, 3, with head.type: parallel; "
            "lower it or raise head.depths",
        ),
        (
            _with(shard__sources__0__split="heldout", shard__sources__0__weight=0),
            "shard.sources: got ['letters']; allowed: a weight above 0 in at least one; "
            "add a source with split: hash or train",
        ),
        (
            _with(shard__validation_fraction=0.5, shard__heldout_fraction=0.6),
            "shard.heldout_fraction: got 0.6; allowed: validation_fraction + heldout_fraction below 1; "
            "lower one of the two",
        ),
        (
            _with(distill__prompts__heldout=dict.fromkeys(config.DOMAINS, 0)),
            "distill.prompts.heldout: got 0; allowed: at least one prompt in at least one domain; "
            "raise a domain's count",
        ),
        (
            _with(
                distill__prompts__heldout__code=0, distill__prompts__heldout__prose=0, bench__domains=["chat", "code"]
            ),
            "bench.domains: got 'code'; allowed: chat or maths, whose prompts are held out; "
            "leave code out, or raise distill.prompts.heldout.code above 0",
        ),
        (
            _with(distill__prefix_tokens=9, distill__max_prompt_tokens=8),
            "distill.prefix_tokens: got 9; allowed: at most max_prompt_tokens, 8: longer prompts are skipped; "
            "shorten the prefix or allow longer prompts",
        ),
        (
            _with(accept__temperatures=[0.5, 0.5]),
            "accept.temperatures: got [0.5, 0.5]; allowed: values that differ (0.5 is there twice); keep one of them",
        ),
        (
            _with(head__type="parallel", head__norms="joint"),
            "head.norms: got 'joint'; allowed: inputs with type: parallel; change it back, or choose type: shared",
        ),
        (
            _with(head__type="shared", head__output="own"),
            "head.output: got 'own'; allowed: shared with type: shared; "
            "change it back, or choose type: cascade or parallel",
        ),
        (
            _with(head__type="cascade", head__layers=2),
            "head.layers: got 2; allowed: 1 with type: cascade; change it back, or choose type: shared or parallel",
        ),
        (
            _with(head__type="parallel", head__middle_layers=[1]),
            "head.middle_layers: got [1]; allowed: [] with type: parallel; change it back, or choose type: shared",
        ),
        (
            _with(head__middle_layers=[2, 1]),
            "head.middle_layers: got [2, 1]; allowed: numbers that ascend, each once; put them in order",
        ),
        (
            _with(head__middle_layers=[1, 1]),
            "head.middle_layers: got [1, 1]; allowed: numbers that ascend, each once; put them in order",
        ),
        (
            _with(head__type="cascade", head__block="encoder", head__init="last_layer"),
            "head.init: got 'last_layer'; allowed: random with block: encoder; "
            "change it back, or choose block: backbone",
        ),
        (
            _with(head__type="cascade", head__init="native"),
            "head.init: got 'native'; allowed: random or last_layer or checkpoint with type: cascade; "
            "a native head is of type: shared, norms: inputs, layers: 1, middle_layers: []; "
            "choose these or another init",
        ),
        (
            _with(head__norms="joint", head__init="native"),
            "head.init: got 'native'; allowed: random or last_layer or checkpoint with norms: joint; "
            "a native head is of type: shared, norms: inputs, layers: 1, middle_layers: []; "
            "choose these or another init",
        ),
        (
            _with(head__init="checkpoint"),
            "head.checkpoint: got null; allowed: a directory with head.json and head.safetensors with "
            "init: checkpoint; name one, or choose another init",
        ),
        (
            _with(head__checkpoint="heads/first"),
            "head.checkpoint: got 'heads/first'; allowed: null with init: random; "
            "remove it, or choose init: checkpoint",
        ),
        (
            _with(head__init="checkpoint", head__checkpoint="./models/head/"),
            "head.checkpoint: got './models/head/'; allowed: another directory than models/head_ce and models/head, "
            "which this run overwrites; copy it, and name the copy",
        ),
        (
            _with(shard__sources__0__options={1: 2}),
            f"{ITEM}.options: got the key 1; allowed: a mapping whose keys are text; quote it",
        ),
    ],
)
def test_a_rule_over_several_values_names_the_one_to_change(raw, expected):
    assert _fault(raw) == expected


def test_a_middle_layer_that_is_no_number_is_named():
    expected = "head.middle_layers[1]: got 0; allowed: a whole number >= 1; set it in params.yaml"
    assert _fault(_with(head__middle_layers=[10, 0])) == expected
    parsed = config.parse(_with(head__middle_layers=[10, 20])).head
    assert (parsed.middle_layers, parsed.options["middle_layers"]) == ((10, 20), [10, 20])


def test_a_missing_parameter_says_what_belongs_there():
    raw = _valid()
    del raw["head"]["depths"]
    expected = "head.depths: missing; allowed: a whole number >= 1 and <= 16; add it to params.yaml"
    assert _fault(raw) == expected


def test_a_missing_section_is_one_line():
    raw = _valid()
    del raw["accept"]
    assert _fault(raw).startswith("accept: missing; allowed: a mapping with prompts, ")


@pytest.mark.parametrize(
    ("name", "intended"),
    [
        ("train_ce.learnin_rate", "train_ce.learning_rate"),
        ("sed", "seed"),
        ("eta", "loss.eta"),
        ("warmup_fraction", "train_ce.warmup_fraction or train_kl.warmup_fraction"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name, intended):
    expected = f"{name}: got 1; no such parameter, did you mean {intended}? Rename it in params.yaml or remove it"
    assert _fault(_set(name, 1)) == expected


def test_a_typo_inside_a_list_item_gets_a_suggestion():
    assert f"did you mean {ITEM}.weight?" in _fault(_set(f"{ITEM}.weigth", 1))


def test_an_unknown_name_without_a_near_one_lists_the_names():
    line = _fault(_set("loss.zzz", 1))
    assert line.startswith("loss.zzz: got 1; no such parameter; allowed: name, eta, "), line


def test_a_misspelt_name_is_not_also_reported_as_missing():
    raw = _valid()
    raw["loss"]["etta"] = raw["loss"].pop("eta")
    assert "did you mean loss.eta?" in _fault(raw)


def test_several_faults_are_several_lines():
    raw = _with(seed=-1, loss__eta="x", head__typ="shared", bench__num_drafts=[0, True])
    names = [line.split(":")[0] for line in _faults(raw)]
    assert sorted(names) == ["bench.num_drafts[0]", "bench.num_drafts[1]", "head.typ", "loss.eta", "seed"]


@pytest.mark.parametrize("raw", [None, [], 3, "text"])
def test_a_file_that_is_no_mapping_is_one_line(raw):
    assert _fault(raw).startswith("params.yaml: got ")


@pytest.mark.parametrize(("text", "value"), [("1e-05", 1e-05), ("1E-3", 1e-3), ("0.5", 0.5), ("3", 3.0)])
def test_a_number_spelt_as_text_is_a_number(text, value):
    """`dvc exp run -S x=1e-5` writes 1e-05, which YAML 1.1 takes for text."""
    assert config.parse(_set("train_ce.learning_rate", text)).train_ce.learning_rate == value


def test_a_whole_number_may_be_spelt_as_text_or_float():
    assert config.parse(_set("distill.batch_size", "1e2")).distill.batch_size == 100
    assert config.parse(_set("distill.batch_size", 8.0)).distill.batch_size == 8


def test_a_long_value_is_cut():
    assert len(_fault(_set("loss.eta", "x" * 10_000))) < 250


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=4))
def test_whatever_the_value_each_fault_stays_on_its_line(value):
    raw = _set("train_kl.epochs", value)
    lines = []
    try:
        config.parse(raw)
    except ConfigError as error:
        lines = str(error).splitlines()
    assert len(lines) <= 1
    assert all(line.startswith("train_kl.epochs: got ") for line in lines)


class TestLoad:
    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"no\.yaml: no such file; run from the project's root$"):
            config.load(tmp_path / "no.yaml")

    @pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx: 1", "a: 1\nb: 2\na: 3\n"])
    def test_a_broken_file_is_one_line(self, tmp_path, text):
        (tmp_path / "params.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"^\S+params\.yaml: not valid YAML: [^\n]+; mend it there$"):
            config.load(tmp_path / "params.yaml")

    def test_a_repeated_key_is_named(self, tmp_path):
        (tmp_path / "params.yaml").write_text("seed: 1\nloss:\n  eta: 1\n  eta: 2\n")
        with pytest.raises(ConfigError, match="mapping at line 3 has 'eta' twice"):
            config.load(tmp_path / "params.yaml")

    def test_a_file_in_another_encoding(self, tmp_path):
        (tmp_path / "params.yaml").write_bytes(b"title: caf\xe9\n")
        with pytest.raises(ConfigError, match="not valid YAML: 'utf-8' codec"):
            config.load(tmp_path / "params.yaml")


def test_the_error_is_one_that_stages_print_without_a_traceback():
    assert issubclass(ConfigError, SelfspecError)


def test_the_config_cannot_be_changed():
    loaded = config.parse(_valid())
    with pytest.raises(ValueError, match="frozen"):
        loaded.seed = 3


def test_params_yaml_and_the_schema_name_the_same_parameters():
    """No default hides in the schema: what a stage reads can be read in params.yaml."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())

    def compare(model, mapping, where):
        assert sorted(mapping) == sorted(model.model_fields), where
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, config.BaseModel):
                compare(field.annotation, mapping[name], f"{where}.{name}")

    compare(Config, raw, "params.yaml")


def test_every_parameter_has_a_comment():
    """Beside the value, or on the line next to it; train_kl repeats the names that train_ce explains."""
    lines = (ROOT / "params.yaml").read_text().splitlines()
    commented: dict[str, bool] = {}
    section = ""
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        match = re.match(r"( {0,2})(\w+):(.*)", line)
        if match is None:  # a comment, or an item of a list, whose keys the list's comment explains
            continue
        indent, name, rest = match.groups()
        section = section if indent else name
        is_section = not indent and rest.split("#")[0].strip() == ""
        if not is_section:
            beside = "#" in rest or before.strip().startswith("#") or after.strip().startswith("#")
            commented[f"{section}.{name}" if indent else name] = beside
    for name, beside in commented.items():
        repeats = name.startswith("train_kl.") and commented.get(name.replace("train_kl.", "train_ce."))
        assert beside or repeats, f"{name} has no comment"
