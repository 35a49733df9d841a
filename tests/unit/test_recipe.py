"""Recipes: valid, laid over the default, written only when nothing is lost."""

import io
import shutil
import subprocess

import pytest
import yaml

from selfspec.config import ConfigError
from tools import recipe


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository whose params.yaml is committed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((recipe.ROOT / "params.yaml").read_text())
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], check=True)
    return tmp_path


def test_the_committed_parameters_are_the_default_recipe():
    committed = yaml.safe_load((recipe.ROOT / "params.yaml").read_text())
    assert recipe.plain(recipe.build(recipe.DEFAULT)) == committed


def test_the_default_is_written_byte_for_byte():
    stream = io.StringIO()
    recipe._yaml().dump(recipe.build(recipe.DEFAULT), stream)
    assert stream.getvalue() == (recipe.RECIPES / f"{recipe.DEFAULT}.yaml").read_text()


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_is_valid_and_described(name):
    recipe.build(name)
    assert len(recipe.summary(name)) > 20


def test_a_recipe_is_written_and_its_changes_are_named(repository):
    changed = recipe.write("minicpm-1b-shared")
    written = yaml.safe_load((repository / "params.yaml").read_text())
    assert written["head"]["norms"] == "joint"
    assert written["head"]["depths"] == 3  # the default's
    assert "head.norms: inputs -> joint" in changed
    assert not any(line.startswith("head.depths") for line in changed)
    assert "# K: depths trained" in (repository / "params.yaml").read_text()
    assert recipe.write("minicpm-1b-shared") == []


def test_edits_that_git_does_not_hold_are_not_overwritten(repository):
    path = repository / "params.yaml"
    edited = path.read_text().replace("seed: 17", "seed: 18")
    path.write_text(edited)
    with pytest.raises(recipe.RecipeError, match=r"git does not hold; commit or stash them, or add FORCE=1$"):
        recipe.write("minicpm-1b-shared")
    assert path.read_text() == edited
    assert "seed: 18 -> 17" in recipe.write("minicpm-1b-shared", force=True)


def test_a_broken_file_is_replaced_only_by_force(repository):
    (repository / "params.yaml").write_text("a: [1")
    with pytest.raises(recipe.RecipeError, match=r"^params\.yaml: has edits"):
        recipe.write("minicpm-1b-shared")
    recipe.write("minicpm-1b-shared", force=True)
    assert yaml.safe_load((repository / "params.yaml").read_text())["head"]["norms"] == "joint"


def test_an_unknown_recipe_names_those_there_are(repository):
    with pytest.raises(recipe.RecipeError, match=r"^NAME: got 'minicpm', allowed: smollm2-135m-shared, "):
        recipe.write("minicpm")


def test_a_recipe_that_breaks_the_schema_writes_nothing(repository, monkeypatch):
    folder = repository / "recipes"
    folder.mkdir()
    shutil.copy(recipe.RECIPES / f"{recipe.DEFAULT}.yaml", folder)
    (folder / "wrong.yaml").write_text("head: {depths: 99}\n")
    monkeypatch.setattr(recipe, "RECIPES", folder)
    before = (repository / "params.yaml").read_text()
    with pytest.raises(ConfigError, match=r"^head\.depths: got 99"):
        recipe.write("wrong")
    assert (repository / "params.yaml").read_text() == before


@pytest.mark.parametrize("name", [name for name in recipe.names() if name != recipe.DEFAULT])
def test_what_is_written_is_what_was_built(repository, name):
    """Whatever an overlay replaces, comments and all."""
    recipe.write(name)
    assert yaml.safe_load((repository / "params.yaml").read_text()) == recipe.plain(recipe.build(name))
    assert recipe.write(name) == []


def test_a_recipe_takes_in_a_file_of_data_and_lays_itself_over_it(repository, monkeypatch):
    folder = repository / "recipes"
    (folder / "data").mkdir(parents=True)
    shutil.copy(recipe.RECIPES / f"{recipe.DEFAULT}.yaml", folder)
    (folder / "data/some.yaml").write_text("shard: {chunk_tokens: 7, ngram: 8}\n")
    (folder / "other.yaml").write_text("extends: data/some.yaml\nshard: {ngram: 9}\n")
    monkeypatch.setattr(recipe, "RECIPES", folder)
    shard = recipe.plain(recipe.build("other"))["shard"]
    assert (shard["chunk_tokens"], shard["ngram"], shard["probe_records"]) == (7, 9, 64)


def test_hub_models_are_pinned():
    for name in recipe.names():
        backbone = recipe.plain(recipe.build(name))["backbone"]
        assert backbone["revision"] is None or backbone["uri"].startswith("hf:")
        assert backbone["uri"].startswith("pypi:") or len(backbone["revision"]) == 40
