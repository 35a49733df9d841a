"""n-gram overlap, splits and chunks: values on texts small enough to count by hand."""

import pytest

from selfspec.config import ShardConfig, SourceConfig
from selfspec.corpus.chunks import cut, records
from selfspec.corpus.ledger import Ledger
from selfspec.corpus.overlap import MIN_WHOLE_WORDS, HeldoutIndex, shared_ngrams
from selfspec.corpus.records import Document, Record, identity
from selfspec.corpus.splits import split_of
from tests.unit import tiny

HELDOUT = "one two three four five six seven eight nine ten eleven twelve"


def _source(name: str = "s", split: str = "hash", kind: str = "corpus", **more: object) -> SourceConfig:
    weight = 0.0 if split == "heldout" else 1.0
    fields = {"loader": "dataset", "domain": "prose", "license": "MIT", "archives": [{"uri": "file:x.parquet"}]}
    return SourceConfig.model_validate({"name": name, "split": split, "kind": kind, "weight": weight, **fields, **more})


def _config(*sources: SourceConfig, **more: object) -> ShardConfig:
    sizes = {"max_train_tokens": 1000, "chunk_tokens": 64, "probe_records": 8, "shuffle_buffer": 8}
    sizes |= {"records_per_shard": 10, "max_eval_records": 100, "ngram": 4, "max_shared_ngrams": 0}
    fractions = {"validation_fraction": 0.1, "heldout_fraction": 0.2}
    return ShardConfig.model_validate({**sizes, **fractions, "sources": sources or (_source(),), **more})


def _record(identifier: str, text: str, source: str = "s") -> Record:
    return Record(identifier, source, "corpus", "prose", identifier, text, "", "MIT", len(text.split()))


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("three four five", 0),
        ("Three, four (five) SIX", 1),
        ("zero one two three four five zero", 2),
        ("one two three four. And again: one two three four!", 1),  # distinct n-grams
        ("four three two one", 0),
        (HELDOUT, 9),
        ("", 0),
    ],
)
def test_shared_ngrams_counts_distinct_runs_of_words(text, shared):
    assert shared_ngrams(text, HeldoutIndex([("a", HELDOUT)], 4)) == shared


def test_a_prompt_shorter_than_an_ngram_is_looked_for_whole():
    short = HELDOUT.rsplit(" ", 4)[0]
    assert len(short.split()) == MIN_WHOLE_WORDS
    index = HeldoutIndex([("short", short), ("tiny", "Tell me a joke")], 13)
    assert shared_ngrams(f"he counted {short} and stopped", index) == 1
    assert shared_ngrams(short.rsplit(" ", 1)[0], index) == 0
    assert shared_ngrams("Tell me a joke please", index) == 0  # too common to mean anything


def test_ledger_drops_counts_and_reports():
    ledger = Ledger([_record("h1", HELDOUT), _record("h2", "Tell a joke")], _config())
    training = [
        _record("t1", "nothing in common here"),
        _record("t2", "zero one two three four five"),
        _record("t3", "tell  a joke"),
        _record("t4", "one two three"),
    ]
    kept = list(ledger.clean(training, "train"))
    assert [record.id for record in kept] == ["t1", "t4"]
    found = ledger.summary(exact_duplicates=5)
    assert found["records"] == {"s": {"train": 2, "heldout": 2}}
    assert found["tokens"] == {"s": {"train": 7, "heldout": 15}}
    assert found["dropped_overlap"] == {"s": 2}
    assert found["heldout"] == [{"id": "h1", "shared_ngrams_before": 2, "shared_ngrams_after": 0}]
    assert (found["max_overlap_after"], found["heldout_in_training"]) == (0, [])
    assert (found["heldout_prompts"], found["exact_duplicates"], found["ngram"], found["threshold"]) == (2, 5, 4, 0)
    assert found["revisions"] == {"s": ["file:x.parquet"]}


def test_a_threshold_lets_a_little_through_and_names_what_is_wholly_in_training():
    ledger = Ledger([_record("h1", HELDOUT), _record("h2", "red green blue white")], _config(max_shared_ngrams=2))
    texts = ["zero one two three four five", "one two three four five six seven", "a red green blue white flag"]
    kept = list(ledger.clean([_record(str(i), text) for i, text in enumerate(texts)], "train"))
    assert [record.id for record in kept] == ["0", "2"]
    found = ledger.summary(0)
    assert found["max_overlap_after"] == 2
    assert found["heldout"][0] == {"id": "h1", "shared_ngrams_before": 4, "shared_ngrams_after": 2}
    assert found["heldout_in_training"] == ["h2"]


def test_exact_duplicates_differ_at_most_in_space_and_case():
    assert identity("x  + y\n") == identity("X + y")
    assert identity("x + y") != identity("x - y")


def test_a_group_has_one_split_whatever_the_source():
    config = _config()
    hashed, train = _source("a"), _source("b", split="train")
    counts = {"train": 0, "validation": 0, "heldout": 0}
    for number in range(4000):
        split = split_of(f"document {number}", hashed, config)
        counts[split] += 1
        assert split_of(f"document {number}", train, config) == (None if split == "heldout" else split)
        assert split_of(f"document {number}", _source("c", split="heldout"), config) == "heldout"
    assert counts["heldout"] / 4000 == pytest.approx(0.2, abs=0.02)
    assert counts["validation"] / 4000 == pytest.approx(0.1, abs=0.02)


def _characters(text: str) -> list[tuple[int, int]]:
    return [(index, index + 1) for index in range(len(text))]


def test_cut_prefers_the_last_line_break_of_the_final_quarter():
    text = "aaaaaa\nbbbbbbbb\ncccc"
    assert list(cut(text, _characters(text), 8)) == [("aaaaaa", 7), ("bbbbbbbb", 8), ("cccc", 5)]
    assert list(cut("abcdefgh", _characters("abcdefgh"), 8)) == [("abcdefgh", 8)]


def test_cut_keeps_the_indentation_with_the_line_it_opens():
    text = "def f():\n    return 1\n"
    offsets = [(0, 3), (3, 8), (8, 13), (13, 19), (19, 21), (21, 22)]  # token 2 is line break and indentation
    assert list(cut(text, offsets, 3)) == [("def f():", 3), ("    return 1", 3)]


def test_cut_leaves_out_a_short_tail_but_never_a_short_text():
    text = "x" * 33
    assert [tokens for _, tokens in cut(text, _characters(text), 16)] == [16, 16]
    assert list(cut("x", _characters("x"), 16)) == [("x", 1)]


def test_records_stay_within_the_limit_and_prompts_stay_whole():
    tokenizer = tiny.tokenizer()
    text = "some words on a line\n" * 30
    documents = [Document("d", "g", text=text)]
    pieces = list(records(documents, _source(), tokenizer, 64))
    assert [piece.id for piece in pieces] == [f"s/d#{index}" for index in range(len(pieces))]
    assert max(len(tokenizer(piece.text)["input_ids"]) for piece in pieces) <= 64
    assert "\n".join(piece.text for piece in pieces) == text.strip()[: len("\n".join(p.text for p in pieces))]
    prompt = Document("p", "g", messages=({"role": "user", "content": text},))
    (whole,) = records([prompt], _source(kind="prompt"), tokenizer, 64)
    assert whole.content == text
    assert whole.tokens == len(tokenizer(text)["input_ids"])
    assert (whole.id, whole.text, whole.group) == ("s/p", "", "g")
