"""What the backbone writes is its own text with its own states, and a killed run loses nothing that was flushed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from selfspec.backbones.decoder import Decoder
from selfspec.benchmark.lossless import stock_greedy
from selfspec.config import DistillConfig
from selfspec.distill import prompts as selection
from selfspec.distill import records, states
from selfspec.distill.journal import Journal, key_of
from selfspec.distill.prompts import DistillError
from selfspec.distill.records import Completion, Prompt
from selfspec.distill.writer import write_completions
from selfspec.errors import SelfspecError
from tests.unit import tiny, tiny_heads
from tests.unit.tiny_families import family

LENGTHS = [12, 3, 25, 1, 40, 8, 17, 30, 5, 9, 22]
LIMIT = 20


def _prompts(lengths=LENGTHS):
    return [
        Prompt(f"p{number}", "some", "corpus", "chat", tiny_heads.prompt(n, seed=n)) for number, n in enumerate(lengths)
    ]


def _model(ends):
    model = tiny.llama().requires_grad_(False)
    model.generation_config.eos_token_id = ends
    return model


@pytest.fixture(scope="module")
def model():
    """A backbone whose end token comes up in some completions and not in others."""
    first = [stock_greedy(_model(None), [prompt.prompt_ids], LIMIT)[0] for prompt in _prompts()]
    ends = [first[0][4], first[4][0], first[7][11]]
    return _model(ends)


@pytest.fixture(scope="module")
def stock(model):
    """Completion ids of every prompt, one at a time, by stock generate."""
    written = {prompt.id: stock_greedy(model, [prompt.prompt_ids], LIMIT)[0] for prompt in _prompts()}
    lengths = [len(ids) for ids in written.values()]
    assert min(lengths) == 1
    assert sorted(lengths).count(LIMIT) in range(2, len(LENGTHS) - 2)
    return written


@torch.inference_mode()
def _write(model, prompts, on_finished=None, **options):
    finished = {}

    def keep(completion, of):
        assert completion.id not in finished
        finished[completion.id] = (completion, of)
        if on_finished:
            on_finished(completion, of)

    settings = {"max_new_tokens": LIMIT, "temperature": 0.0, "batch_size": 3, "seed": 0} | options
    decoder = Decoder(model, middle_layers=settings.pop("middle_layers", ()))
    write_completions(decoder, prompts, end_tokens=decoder.end_tokens, on_finished=keep, **settings)
    return finished


@pytest.mark.parametrize("reverse", [False, True], ids=["in_order", "reversed"])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_completions_are_stock_greedy_text_with_its_states(model, stock, batch_size, reverse):
    prompts = _prompts()[::-1] if reverse else _prompts()
    finished = _write(model, prompts, batch_size=batch_size)
    assert {name: completion.completion_ids for name, (completion, _) in finished.items()} == stock
    decoder = Decoder(model)
    for prompt in prompts:
        completion, of = finished[prompt.id]
        assert (completion.prompt_ids, completion.source, completion.domain) == (prompt.prompt_ids, "some", "chat")
        ended = completion.completion_ids[-1] in decoder.end_tokens  # the end token is kept
        assert completion.stop == ("eos" if ended else "length")
        assert ended or len(completion.completion_ids) == LIMIT
        again = states.recompute(decoder, completion)
        torch.testing.assert_close(of.hidden, again.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of.lse, again.lse, atol=1e-4, rtol=1e-4)


def test_recomputed_states_are_the_stock_model_s(model, stock):
    prompt = _prompts()[0]
    completion = Completion(**vars(prompt), completion_ids=stock[prompt.id], stop="eos", temperature=0.0)
    of = states.recompute(Decoder(model), completion)
    hidden = model.model(torch.tensor([completion.tokens])).last_hidden_state[0]
    torch.testing.assert_close(of.hidden[:-1], hidden[:-1], atol=1e-4, rtol=1e-4)
    assert not of.hidden[-1].any()
    taught = slice(len(prompt.prompt_ids) - 1, completion.length - 1)
    torch.testing.assert_close(of.lse[taught], model.lm_head(hidden).logsumexp(-1)[taught], atol=1e-4, rtol=1e-4)
    assert not of.lse[: taught.start].any()
    assert of.lse[-1] == 0


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16], ids=str)
def test_middle_states_are_kept_beside_the_final_one(model, stock, store):
    """Text and normalisers as without; the states those of a plain forward pass."""
    decoder = Decoder(model, middle_layers=[1])
    plain = _write(model, _prompts(), batch_size=4, store=store)
    for name, (completion, of) in _write(model, _prompts(), batch_size=4, store=store, middle_layers=[1]).items():
        assert completion.completion_ids == plain[name][0].completion_ids
        assert of.hidden.shape == (completion.length, 64)
        assert torch.equal(of.hidden[:, :32], plain[name][1].hidden)
        assert torch.equal(of.lse, plain[name][1].lse)
        again = states.recompute(decoder, completion, store)
        close = {"atol": 1e-4, "rtol": 1e-4} if store == torch.float32 else {"atol": 0.02, "rtol": 0.02}
        torch.testing.assert_close(of.hidden, again.hidden, **close)
        torch.testing.assert_close(of.lse, again.lse, **close)
        expected = tiny_heads.backbone_states(model, torch.tensor(completion.tokens), [1])[:-1]
        torch.testing.assert_close(of.hidden[:-1].float(), expected, **close)
        assert not of.hidden[-1].any()


def test_admitting_short_prompts_beside_long_rows_keeps_the_long_ones():
    """The cache follows its longest row, not the prompts that were admitted last."""
    prompts = _prompts([140, 139, 5])
    end = stock_greedy(_model(None), [prompts[1].prompt_ids], 6)[0][5]
    model = _model(end)
    expected = [stock_greedy(model, [prompt.prompt_ids], 60)[0] for prompt in prompts]
    assert len(expected[0]) > 10  # still running while the second has ended and the third comes in
    finished = _write(model, prompts, batch_size=2, max_new_tokens=60)
    assert [finished[prompt.id][0].completion_ids for prompt in prompts] == expected


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_rows_with_recurrent_states_are_taken_over_clean(batch_size):
    """Linear attention: rows end, are taken over and are dropped; what a row held before does not show."""
    first = [stock_greedy(family("qwen3_5"), [prompt.prompt_ids], LIMIT)[0] for prompt in _prompts()]
    model = family("qwen3_5", ends=[first[0][4], first[4][0], first[7][11]])
    decoder = Decoder(model)
    finished = _write(model, _prompts(), batch_size=batch_size)
    for prompt in _prompts():
        completion, of = finished[prompt.id]
        assert completion.completion_ids == stock_greedy(model, [prompt.prompt_ids], LIMIT)[0]
        again = states.recompute(decoder, completion)
        torch.testing.assert_close(of.hidden, again.hidden, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(of.lse, again.lse, atol=5e-4, rtol=1e-4)


def test_sampled_completions_are_seeded(model):
    def text(seed):
        finished = _write(model, _prompts(), temperature=1.0, seed=seed)
        assert {completion.temperature for completion, _ in finished.values()} == {1.0}
        return {name: completion.completion_ids for name, (completion, _) in finished.items()}

    first = text(1)
    assert first == text(1)
    assert first != text(2)
    assert first != {name: c.completion_ids for name, (c, _) in _write(model, _prompts()).items()}


def test_sampled_states_belong_to_the_sampled_text(model):
    for completion, of in _write(model, _prompts(), temperature=1.5, batch_size=4).values():
        again = states.recompute(Decoder(model), completion)
        torch.testing.assert_close(of.hidden, again.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of.lse, again.lse, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_narrow_store_teaches_what_it_holds(model):
    """float32 arithmetic, 16 bits stored: tokens and normalisers are those of the rounded states, not of finer ones."""
    finer = 0
    for completion, of in _write(model, _prompts(), batch_size=4, store=torch.bfloat16).values():
        assert of.hidden.dtype == torch.bfloat16
        taught = slice(len(completion.prompt_ids) - 1, completion.length - 1)
        logits = model.lm_head(of.hidden[taught].float())
        torch.testing.assert_close(of.lse[taught], logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
        assert logits.argmax(-1).tolist() == completion.completion_ids
        again = states.recompute(Decoder(model), completion, torch.bfloat16)
        torch.testing.assert_close(again.lse[taught], model.lm_head(again.hidden[taught].float()).logsumexp(-1))
        finer += int(not torch.allclose(of.lse, states.recompute(Decoder(model), completion).lse, atol=1e-5))
    assert finer  # the store does round


def test_nothing_to_write_is_no_error(model):
    assert _write(model, []) == {}


# The journal


class Killed(Exception):
    """Stands for whatever ends a run."""


def _journal(root, prompts, key="some", part_records=3):
    return Journal(root, key_of(key, prompts), part_records, torch.float32)


def _assert_whole(journal, uninterrupted):
    assert set(journal.finished) == set(uninterrupted)
    for name, (completion, of) in uninterrupted.items():
        assert journal.finished[name] == completion
        kept = journal.states(completion)
        # Rows of another batch: the same up to float32 rounding.
        torch.testing.assert_close(kept.hidden, of.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.lse, of.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("survived", [0, 1, 4, 7, 10])
def test_a_restart_finishes_only_what_is_missing(model, tmp_path, survived):
    prompts = _prompts()
    uninterrupted = _write(model, prompts)
    journal = _journal(tmp_path, prompts)
    seen = 0

    def until_killed(completion, of):
        nonlocal seen
        if seen == survived:
            raise Killed
        seen += 1
        journal.add(completion, of)

    with pytest.raises(Killed):
        _write(model, prompts, until_killed)

    journal = _journal(tmp_path, prompts)
    flushed = survived - survived % 3  # whole parts
    assert len(journal.finished) == flushed
    remaining = journal.remaining(prompts)
    assert [prompt for prompt in prompts if prompt.id not in journal.finished] == remaining
    rest = _write(model, remaining, journal.add)
    assert len(rest) == len(prompts) - flushed
    journal.flush()
    _assert_whole(journal, uninterrupted)
    _assert_whole(_journal(tmp_path, prompts), uninterrupted)


def test_a_half_written_part_is_ignored_and_overwritten(model, tmp_path):
    prompts = _prompts()
    uninterrupted = _write(model, prompts)
    journal = _journal(tmp_path, prompts, part_records=100)
    for name in ("p0", "p1"):
        journal.add(*uninterrupted[name])
    journal.flush()
    # Killed while the second part's table was being written: states are there, the table is not.
    (journal.folder / "00001.npy").write_bytes(b"half a header")
    (journal.folder / ".00001.parquet.partial").write_bytes(b"PAR1")
    journal = _journal(tmp_path, prompts, part_records=100)
    assert set(journal.finished) == {"p0", "p1"}
    for prompt in journal.remaining(prompts):
        journal.add(*uninterrupted[prompt.id])
    journal.flush()
    _assert_whole(_journal(tmp_path, prompts), uninterrupted)


def test_another_run_does_not_see_it(model, tmp_path):
    prompts = _prompts()
    journal = _journal(tmp_path, prompts, key={"seed": 1})
    journal.add(*_write(model, prompts[:1])["p0"])
    journal.flush()
    assert set(_journal(tmp_path, prompts, key={"seed": 1}).finished) == {"p0"}
    assert not _journal(tmp_path, prompts, key={"seed": 2}).finished
    assert not _journal(tmp_path, prompts[:-1], key={"seed": 1}).finished
    changed = [*prompts[:-1], Prompt("p10", "some", "corpus", "chat", [7, 8])]
    assert not _journal(tmp_path, changed, key={"seed": 1}).finished
    journal.discard()
    assert not _journal(tmp_path, prompts, key={"seed": 1}).finished


_WRITES_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from tests.unit import test_distill as here

model, prompts = here._model(None), here._prompts()
journal = here._journal(Path(sys.argv[1]), prompts, part_records=2)

def slowly(completion, of):
    journal.add(completion, of)
    time.sleep(0.2)

here._write(model, prompts, slowly)
"""


def test_kill_nine_loses_at_most_the_pending_part(tmp_path):
    prompts, root = _prompts(), Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES_UNTIL_KILLED, str(tmp_path)], cwd=root, env=environment, stderr=subprocess.PIPE
    )
    give_up = time.monotonic() + 60
    while len(list(tmp_path.glob("*/*.parquet"))) < 2 and time.monotonic() < give_up and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    journal = _journal(tmp_path, prompts, part_records=2)
    done = len(journal.finished)
    assert 4 <= done < len(prompts)
    model = _model(None)
    rest = _write(model, journal.remaining(prompts), journal.add)
    assert len(rest) == len(prompts) - done
    journal.flush()
    _assert_whole(journal, _write(model, prompts))


# Prompts


def _row(number, kind="prompt", domain="chat", text="What is a tensor, and what is it for?"):
    messages = json.dumps([{"role": "user", "content": text}])
    return {"id": f"{domain}-{number}", "source": f"of_{domain}", "kind": kind, "domain": domain} | (
        {"messages": messages, "text": ""} if kind == "prompt" else {"messages": "", "text": text}
    )


def _config(prefix=12, longest=80):
    count = {"chat": 1, "maths": 0, "code": 0, "prose": 0}
    return DistillConfig.model_validate(
        {
            "prompts": {"train": count, "validation": count, "heldout": count},
            "prefix_tokens": prefix,
            "max_prompt_tokens": longest,
            "max_new_tokens": 4,
            "temperature": 0.0,
            "batch_size": 2,
            "records_per_shard": 2,
        }
    )


def test_messages_go_through_the_chat_template_and_documents_are_cut():
    tokenizer = tiny.tokenizer()
    text = "The theory of relativity is the work of one man."
    chosen = selection.select(
        [_row(0), _row(0, "corpus", "prose", text)], {"chat": 1, "prose": 1}, _config(), tokenizer
    )
    chat, prose = chosen.prompts
    asked = "<|im_start|>user\nWhat is a tensor, and what is it for?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat.prompt_ids) == asked
    assert chat.prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # one token, not its letters
    assert prose.prompt_ids == tokenizer(text).input_ids[:12]
    assert text.startswith(tokenizer.decode(prose.prompt_ids))
    assert (prose.id, prose.source, prose.kind, prose.domain) == ("prose-0", "of_prose", "corpus", "prose")


def test_counts_per_domain_in_order_and_what_is_missing():
    rows = [
        _row(0),
        _row(0, domain="code"),
        _row(1),
        _row(1, "corpus", "prose", "too"),
        _row(2),
        _row(2, domain="maths"),
        _row(3),
    ]
    counts = {"chat": 3, "code": 2, "prose": 1, "maths": 0}
    chosen = selection.select(rows, counts, _config(), tiny.tokenizer())
    assert [prompt.id for prompt in chosen.prompts] == ["chat-0", "code-0", "chat-1", "chat-2"]
    assert chosen.missing == {"code": 1, "prose": 1}
    assert chosen.skipped_long == {}


def test_long_prompts_are_skipped_and_counted_never_cut():
    long = "Now then, " * 40
    rows = [_row(0, text=long), _row(1), _row(2, text=long), _row(0, domain="maths", text=long)]
    chosen = selection.select(rows, {"chat": 2, "maths": 1}, _config(), tiny.tokenizer())
    assert [prompt.id for prompt in chosen.prompts] == ["chat-1"]
    assert chosen.skipped_long == {"chat": 2, "maths": 1}
    assert chosen.missing == {"chat": 1, "maths": 1}


def test_selection_stops_reading_when_it_has_enough():
    def rows():
        yield _row(0)
        raise AssertionError("read on")

    assert len(selection.select(rows(), {"chat": 1}, _config(), tiny.tokenizer()).prompts) == 1


def test_a_tokenizer_without_a_chat_template_says_what_to_do():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DistillError, match=r"of_chat is of kind prompt, .* no chat template; use corpus sources"):
        selection.select([_row(0)], {"chat": 1}, _config(), tokenizer)
    plain = selection.select([_row(0, "corpus")], {"chat": 1}, _config(), tokenizer)
    assert len(plain.prompts) == 1


def test_a_split_without_a_prompt_stops_distill_before_the_backbone_is_loaded():
    config = _config()
    counts = config.prompts.train.model_dump()
    empty = selection.select([_row(0, domain="code")], counts, config, tiny.tokenizer())
    expected = {"train": "max_train_tokens", "validation": "validation_fraction", "heldout": "heldout_fraction"}
    for split, remedy in expected.items():
        with pytest.raises(DistillError) as caught:
            selection.check_found(split, empty, config)
        assert str(caught.value) == (
            f"distill.prompts.{split}: got 0 of the 1 prompts asked for in chat; allowed: at least 1; "
            f"raise shard.{remedy}, or ask for a domain that the shards hold"
        )
    found = selection.select([_row(0)], counts, config, tiny.tokenizer())
    selection.check_found("validation", found, config)


def test_a_split_of_long_prompts_only_names_the_limit():
    config = _config()
    rows = [_row(number, text="Now then, " * 40) for number in range(3)]
    empty = selection.select(rows, {"chat": 1}, config, tiny.tokenizer())
    with pytest.raises(DistillError, match=r"raise distill\.max_prompt_tokens above 80 \(3 prompts are longer\)$"):
        selection.check_found("heldout", empty, config)


def test_what_may_be_written_fits_the_context():
    config = _config(longest=80)  # and 4 new tokens
    selection.check_context(config, 84)
    expected = (
        r"^distill\.max_prompt_tokens \+ distill\.max_new_tokens: got 80 \+ 4; allowed: at most 83 together, "
        r"the positions that the backbone has; lower one of the two$"
    )
    with pytest.raises(DistillError, match=expected):
        selection.check_context(config, 83)


# Files


def test_records_come_back_as_they_went(tmp_path):
    written = [
        Completion("a", "s", "prompt", "chat", [1, 2], [3], "eos", 0.0),
        Completion("b", "s", "corpus", "code", [287], [5, 6, 7], "length", 0.5),
        Completion("c", "t", "corpus", "code", [9], [2], "eos", 0.0),
    ]
    records.write(tmp_path / "00001.parquet", written[2:])
    records.write(tmp_path / "00000.parquet", written[:2])
    assert records.read(tmp_path) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.parquet", "00001.parquet"]
    assert (written[1].tokens, written[1].length) == ([287, 5, 6, 7], 4)
    assert records.by_domain(written) == {"chat": written[:1], "code": written[1:]}
    assert records.by_domain(written, 1) == {"chat": written[:1], "code": written[1:2]}


def test_no_shards_names_the_stage_to_run(tmp_path):
    with pytest.raises(SelfspecError, match="no completions; run `dvc repro distill` first"):
        records.read(tmp_path)


def test_states_of_another_width_than_the_head_reads_are_refused(tmp_path):
    states.write(tmp_path, "train", [states.States(torch.randn(3, 16), torch.randn(3))], 3, 16, torch.float32)
    assert len(states.StoredStates.open(tmp_path, "train", torch.float32, 16)) == 3
    with pytest.raises(states.StatesError) as caught:
        states.StoredStates.open(tmp_path, "train", torch.float32, 8)
    assert str(caught.value) == (
        f"head.middle_layers: got states of 16 columns in {tmp_path}/train.npy; allowed: 8, the final state and those "
        "of the layers that the head reads; rerun distill"
    )
    assert isinstance(caught.value, SelfspecError)  # a stage prints it without a traceback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_bit_for_bit(tmp_path, dtype):
    parts = [states.States(torch.randn(n, 8).to(dtype), torch.randn(n)) for n in (3, 1, 5)]
    states.write(tmp_path, "train", iter(parts), 9, 8, dtype)
    stored = states.StoredStates.open(tmp_path, "train", dtype)
    assert len(stored) == 9
    start = 0
    for part in parts:
        rows = stored.rows(start, start + len(part.lse))
        assert rows.hidden.dtype == dtype
        assert torch.equal(rows.hidden, part.hidden)
        assert torch.equal(rows.lse, part.lse)
        start += len(part.lse)
    wrong = torch.float16 if dtype == torch.float32 else torch.float32
    with pytest.raises(ValueError, match=r"backbone\.dtype asks for"):
        states.StoredStates.open(tmp_path, "train", wrong)
    with pytest.raises(ValueError, match="9 states for 10 tokens"):
        states.write(tmp_path, "other", iter(parts), 10, 8, dtype)
