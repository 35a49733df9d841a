"""The loaders on archives of a few lines: what is taken, what is left out, under which group."""

import bz2
import gzip
import json
import zipfile
from pathlib import Path

import pytest

from selfspec.config import SourceConfig
from selfspec.corpus.records import CorpusError
from selfspec.corpus.sources import Context, loader_of
from selfspec.corpus.sources.sphinx import sections as sphinx_sections
from selfspec.corpus.sources.sphinx import thin
from selfspec.corpus.sources.wikitext import sections

SENTENCE = "This is a sentence that is long enough to be kept as prose. "


def _documents(root: Path, loader: str, files: dict[str, str | bytes], kind="corpus", seed=0, member=None, **options):
    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    source = SourceConfig.model_validate(
        {
            "name": "s",
            "loader": loader,
            "kind": kind,
            "domain": "chat",
            "weight": 1.0,
            "split": "hash",
            "license": "MIT",
            "archives": [{"uri": "file:archive.zip", "member": member}],
            "options": options,
        }
    )
    return list(loader_of(source).documents(Context(source, root, seed, 10)))


def _prompts(documents) -> dict[str, str]:
    return {document.key: document.messages[0]["content"] for document in documents}


def test_mt_bench_takes_first_turns(tmp_path):
    rows = [{"question_id": 81, "turns": ["first", "second"]}, {"question_id": 82, "turns": ["other", "more"]}]
    files = {"q.jsonl": "\n".join(map(json.dumps, rows))}
    found = _documents(tmp_path, "mt_bench", files, kind="prompt", member="q.jsonl")
    assert _prompts(found) == {"81": "first", "82": "other"}


def test_champ_takes_the_plain_text(tmp_path):
    files = {"v0.json": json.dumps({"problems": {"P_1": {"_text": "How many?", "_raw_text": "@@How@@"}}})}
    assert _prompts(_documents(tmp_path, "champ", files, kind="prompt", member="v0.json")) == {"P_1": "How many?"}


def test_human_eval_asks_to_complete_the_stub(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    '''Add.'''\n", "canonical_solution": "return 1"}
    files = {"h.jsonl.gz": gzip.compress(json.dumps(row).encode())}
    (prompt,) = _prompts(_documents(tmp_path, "human_eval", files, kind="prompt", member="h.jsonl.gz")).values()
    assert prompt == "Complete the following Python function.\n\n```python\ndef f(x):\n    '''Add.'''\n```"


def test_chatterbot_takes_each_opening_once_and_leaves_topics_out(tmp_path):
    def topic(*openings: str) -> str:
        return json.dumps({"conversations": [[opening, "an answer"] for opening in openings]})

    files = {
        "data/english/ai.yml": topic("What is AI?", "what is ai", "Hi"),
        "data/english/gossip.yml": topic("Tell me some gossip"),
        "data/german/ai.yml": topic("Was ist das denn?"),
    }
    found = _documents(tmp_path, "chatterbot", files, kind="prompt", exclude=["gossip"], min_words=3)
    assert list(_prompts(found).values()) == ["What is AI?"]


def test_codeio_becomes_an_instruction_in_english(tmp_path):
    def row(task: str, code: str = "def main_solution(a,\n    b):\n    return a") -> dict[str, str]:
        return {"task_description": task, "input_output_spec": "Input: `a`, `b`", "code_sample": code}

    rows = [
        row("What is the sum of the two numbers?"),
        row("What is the sum of  the two numbers?"),  # the other file's copy
        row("给定两个数字，求和是多少？ the sum of the"),
        row("What is the product of the two?", code="x = 1"),
        row("What is the longest path of the tree? " + "x" * 2000),
    ]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        files = {"c.gz": gzip.compress(text.encode())}
        (prompt,) = _prompts(_documents(tmp_path, "codeio", files, kind="prompt", member="c.gz")).values()
        assert prompt == (
            "What is the sum of the two numbers?\n\nInput: `a`, `b`\n\nWrite the Python function `main_solution(a, b)`."
        )


def _gsm_wheel() -> dict[str, str]:
    folder = "reasoning_gym/arithmetic/gsm_symbolic"

    def module(first: int, last: int) -> str:
        body = "from reasoning_gym.utils import format_number\n"
        for template in range(first, last):
            body += f"def generate_{template}(rng, difficulty=1.0):\n"
            body += f"    return {{'question': f'Template {template}: {{format_number(rng.randint(0, 10**9))}}?'}}\n"
        return body

    return {
        "reasoning_gym/__init__.py": "raise ImportError('heavy')",
        "reasoning_gym/utils.py": "def format_number(x): return str(x)",
        f"{folder}/__init__.py": "raise ImportError('heavy')",
        f"{folder}/generators_00_49.py": module(0, 3),
        f"{folder}/generators_50_99.py": module(80, 83),
        f"{folder}/gsm_symbolic.py": "import torch_of_another_world\ntasks_ok = [0, 2, 80, 81, 82]\n",
    }


def test_gsm_templates_are_the_groups_and_seeds_give_other_instances(tmp_path):
    found = _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", templates=[0, 79], instances=3)
    assert {document.group for document in found} == {"gsm_symbolic/template/00", "gsm_symbolic/template/02"}
    assert len(_prompts(found)) == len(set(_prompts(found).values())) == 6
    for document in found:
        template = int(document.group[-2:])
        assert document.messages[0]["content"].startswith(f"Template {template}: ")
    assert {document.group for document in found[:2]} == {document.group for document in found}  # rounds
    again = _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", templates=[0, 79], instances=3)
    other = _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", seed=1, templates=[0, 79], instances=3)
    assert again == found
    assert not set(_prompts(other).values()) & set(_prompts(found).values())


def test_gsm_templates_never_straddle(tmp_path):
    train = _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", templates=[0, 79], instances=5)
    held = _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", templates=[80, 99], instances=5)
    assert {d.group for d in held} == {f"gsm_symbolic/template/{t}" for t in (80, 81, 82)}
    assert not {d.group for d in train} & {d.group for d in held}
    with pytest.raises(CorpusError, match=r"templates: \[3, 9\] holds no usable template; .*\[0, 2, 80, 81, 82\]"):
        _documents(tmp_path, "gsm_symbolic", _gsm_wheel(), kind="prompt", templates=[3, 9], instances=5)


MODULE = '''"""Module."""
import os

def add(a,
        b=1):
    """Add two numbers, as in :math:`a + b`.

    And return them.
    """
    # the sum
    total = a + b
    print(total)
    return total

class Box:
    """A box of things."""
    size = 3

    def open(self):
        """Open it."""
        return self.size

def bare():
    """Only words."""
'''


def test_python_code_loses_its_docstrings_only(tmp_path):
    found = _documents(tmp_path, "python_files", {"pkg/m.py": MODULE}, part="code", min_chars=1)
    texts = {document.key: document.text for document in found}
    body = "    # the sum\n    total = a + b\n    print(total)\n    return total"
    assert texts == {
        "pkg/m.py:add": f"def add(a,\n        b=1):\n{body}",
        "pkg/m.py:Box": "class Box:\n    size = 3\n\n    def open(self):\n        return self.size",
    }
    assert {document.group for document in found} == {"pkg/m.py"}


def test_python_signatures_ask_for_the_body(tmp_path):
    files = {"pkg/m.py": MODULE, "pkg/tests/test_m.py": MODULE, "pkg/broken.py": "def (", "pkg/data.txt": MODULE}
    found = _documents(tmp_path, "python_files", files, kind="prompt", part="signatures", min_chars=1)
    ((key, prompt),) = _prompts(found).items()
    assert key == "pkg/m.py:add"
    stub = 'def add(a,\n        b=1):\n    """Add two numbers, as in :math:`a + b`.\n\n    And return them.\n    """'
    assert prompt.endswith(f"\n\n```python\n{stub}\n```")


def test_python_docstrings_can_be_limited_to_maths(tmp_path):
    files = {"pkg/m.py": MODULE}
    found = _documents(tmp_path, "python_files", files, part="docstrings", maths=True, min_chars=1)
    assert [document.text for document in found] == ["Add two numbers, as in :math:`a + b`.\n\nAnd return them."]
    assert len(_documents(tmp_path, "python_files", files, part="docstrings", min_chars=1)) == 4
    assert len(_documents(tmp_path, "python_files", files, part="docstrings", min_chars=1, per_file=2)) == 2


def test_python_names_are_unique(tmp_path):
    """A property and its setter share a name, and a record's id must be its own."""
    setter = "class A:\n    def x(self):\n        'Get.'\n\n    def x(self, value):\n        'Set.'\n"
    found = _documents(tmp_path, "python_files", {"pkg/m.py": setter}, part="docstrings", min_chars=1)
    assert {document.key: document.text for document in found} == {"pkg/m.py:A.x": "Get."}
    assert len(found) == 1


def test_wikitext_becomes_sentences():
    text = (
        "{{Infobox|a={{nested}}}}'''Anarchism''' is a [[political philosophy|philosophy]] (from {{lang|x}}) "
        "of [[society]].<ref name=a>cite</ref><ref name=b/> It is old &amp; [http://x.org widely known].\n"
        "{| class=wikitable\n| cell that is quite long and would otherwise be kept, is it not.\n|}\n"
        "[[File:x.jpg|thumb|A [[link]] in a caption that is rather long, all told.]]\n"
        "short line\n"
        "== History ==\n* A list item that is long enough to count as a sentence of prose.\n"
        "== References ==\nA reference that is long enough to count as a sentence of prose.\n"
    )
    assert list(sections(text)) == [
        ("", "Anarchism is a philosophy (from ) of society. It is old & widely known."),
        ("History", "A list item that is long enough to count as a sentence of prose."),
    ]


def _dump() -> bytes:
    def page(title: str, text: str, namespace: int = 0) -> str:
        return f"<page><title>{title}</title><ns>{namespace}</ns><revision><text>{text}</text></revision></page>"

    body = SENTENCE * 3 + "\n== Uses ==\n" + SENTENCE * 2
    pages = page("Lime", body) + page("Old", "#REDIRECT [[Lime]]") + page("Talk:Lime", body, 1)
    return bz2.compress(f'<mediawiki xmlns="http://example.org/x">{pages}</mediawiki>'.encode())


def test_wikipedia_gives_sections_or_prompts_of_the_same_group(tmp_path):
    files = {"wiki.bz2": _dump()}
    corpus = _documents(tmp_path, "wikipedia", files, member="wiki.bz2", min_chars=60)
    assert {d.key: d.text.split("\n\n") for d in corpus} == {
        "Lime/0": ["Lime", (SENTENCE * 3).strip()],
        "Lime/1": ["Uses", (SENTENCE * 2).strip()],
    }
    options = {"min_chars": 60, "passage_chars": 70, "prompts_per_section": 5}
    prompts = _documents(tmp_path, "wikipedia", files, kind="prompt", member="wiki.bz2", **options)
    texts = [d.messages[0]["content"] for d in prompts if d.key.startswith("Lime/1/")]
    assert len(set(texts)) == 5
    assert "What should I know about Uses (Lime)?" in texts
    assert f"List the key points of this text:\n\n{SENTENCE.strip()}" in texts
    assert {d.group for d in [*corpus, *prompts]} == {"wikipedia/Lime"}


RST = """.. _label:

=====
Title
=====

See :ref:`the guide <guide>` and :class:`~django.db.Model`, or `the site <http://x>`_.

Section
-------

.. versionadded:: 5.0

Text of it.
"""


def test_sphinx_sections_keep_words_and_lose_markup(tmp_path):
    assert "the guide" in thin(RST)
    assert "django.db.Model, or the site." in thin(RST)
    assert not {"label", "versionadded", "http"} & set(thin(RST).replace(":", " ").split())
    assert sphinx_sections(thin(RST))[-1] == "Section\n-------\n\nText of it."
    files = {"p/docs/a.txt": RST, "p/docs/releases/1.txt": RST, "p/src/b.txt": RST}
    found = _documents(tmp_path, "sphinx", files, folder="docs", exclude=["/releases/"], min_chars=5)
    assert {document.group for document in found} == {"p/docs/a.txt"}


def test_faults_name_the_parameter(tmp_path):
    with pytest.raises(CorpusError, match=r"shard\.sources\.s\.loader: got 'nope', allowed: champ, chatterbot"):
        _documents(tmp_path, "nope", {})
    with pytest.raises(CorpusError, match=r"shard\.sources\.s\.options\.templates"):
        _documents(tmp_path, "gsm_symbolic", {}, templates=[9, 3], instances=1)
    with pytest.raises(CorpusError, match=r"shard\.sources\.s\.options\.instancs"):
        _documents(tmp_path, "gsm_symbolic", {}, templates=[0, 3], instancs=1)
    with pytest.raises(CorpusError, match=r"shard\.sources\.s\.archives\.0\.member: missing"):
        _documents(tmp_path, "champ", {}, kind="prompt")
