"""Pinned files from a local package folder: no network is touched."""

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from selfspec import resources
from selfspec.config import Resource
from selfspec.resources import ResourceError, atomic_path, cache_dir, fetch, member, open_archive

WHEEL = "toydata-1.0-py3-none-any.whl"
FOREIGN = "toynative-1.0-cp312-cp312-win_amd64.whl"  # can be read anywhere, installed nowhere near here
SDIST = "toysource-2.0.tar.gz"


def _wheel(path: Path, project: str, tag: str) -> None:
    info = f"{project}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{project}/data.txt", "four words of data\n" * 100)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


def _sdist(path: Path) -> None:
    """A source archive whose metadata step needs nothing but itself."""
    backend = (
        "import os\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        "    os.makedirs(f'{folder}/toysource-2.0.dist-info')\n"
        "    with open(f'{folder}/toysource-2.0.dist-info/METADATA', 'w') as file:\n"
        "        file.write('Metadata-Version: 2.1\\nName: toysource\\nVersion: 2.0\\n')\n"
        "    return 'toysource-2.0.dist-info'\n"
        "def build_wheel(*arguments):\n"
        "    raise SystemExit('nothing is built')\n"
    )
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: toysource\nVersion: 2.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": backend,
        "docs/b.txt": "second",
        "docs/a.txt": "first",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"toysource-2.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    _wheel(folder / WHEEL, "toydata", "py3-none-any")
    _wheel(folder / FOREIGN, "toynative", "cp312-cp312-win_amd64")
    _sdist(folder / SDIST)
    return folder


@pytest.fixture(autouse=True)
def _local_index(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


def _pinned(packages: Path, name: str, **more: str) -> Resource:
    return Resource(uri=f"pypi:{name}", sha256=hashlib.sha256((packages / name).read_bytes()).hexdigest(), **more)


def _leftovers() -> list[str]:
    return [str(path) for path in cache_dir().rglob("*") if path.is_file()]


def _single_line(error: pytest.ExceptionInfo[ResourceError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", [WHEEL, FOREIGN, SDIST])
def test_the_pinned_file_is_fetched_byte_for_byte(packages, name):
    path = fetch(_pinned(packages, name))
    assert path.read_bytes() == (packages / name).read_bytes()
    assert _leftovers() == [str(path)]  # no pip logs, no scratch


def test_a_second_fetch_needs_no_pip_and_a_damaged_copy_is_replaced(packages, monkeypatch):
    resource = _pinned(packages, WHEEL)
    path = fetch(resource)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert fetch(resource).read_bytes() == whole
    monkeypatch.setattr(resources.subprocess, "Popen", lambda *_, **__: pytest.fail("pip was called"))
    assert fetch(resource) == path


def test_wrong_hash_names_both_and_leaves_nothing(packages):
    wrong = Resource(uri=f"pypi:{WHEEL}", sha256="0" * 64)
    with pytest.raises(ResourceError) as error:
        fetch(wrong)
    text = _single_line(error)
    assert WHEEL in text
    assert "0" * 64 in text
    assert hashlib.sha256((packages / WHEEL).read_bytes()).hexdigest() in text
    assert "correct sha256" in text
    assert _leftovers() == []


def test_a_truncated_archive_is_told_and_leaves_nothing(packages, tmp_path, monkeypatch):
    resource = _pinned(packages, WHEEL)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / WHEEL).write_bytes((packages / WHEEL).read_bytes()[:200])
    monkeypatch.setenv("PIP_FIND_LINKS", str(broken))
    with pytest.raises(ResourceError, match="truncated download"):
        fetch(resource)
    assert _leftovers() == []


def test_no_network_says_so(monkeypatch):
    # pip tells a dead index from an empty one only in the notices of its retries
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setattr(resources, "_PIP_OPTIONS", ["--retries", "1", "--timeout", "1", "--no-cache-dir"])
    with pytest.raises(ResourceError) as error:
        fetch(Resource(uri=f"pypi:{WHEEL}", sha256="0" * 64))
    text = _single_line(error)
    assert "no network" in text
    assert "PIP_FIND_LINKS" in text
    assert "127.0.0.1" not in text
    assert _leftovers() == []


def test_a_file_that_the_index_lacks():
    with pytest.raises(ResourceError, match=r"has no file absent-1\.0-py3-none-any\.whl; correct the file name"):
        fetch(Resource(uri="pypi:absent-1.0-py3-none-any.whl", sha256="0" * 64))


def test_a_name_that_is_no_package_file():
    with pytest.raises(ResourceError, match="allowed: pypi:NAME-VERSION"):
        fetch(Resource(uri="pypi:data.zip", sha256="0" * 64))


def test_a_member_is_extracted_once_and_repaired(packages):
    resource = _pinned(packages, WHEEL, member="toydata/data.txt")
    path = member(resource)
    assert path.read_text() == "four words of data\n" * 100
    written = path.stat().st_mtime_ns
    assert member(resource).stat().st_mtime_ns == written
    path.write_text("four words of DATA\n" * 100)  # same size: the checksum tells
    assert member(resource).read_text() == "four words of data\n" * 100


def test_a_missing_member_names_what_there_is(packages):
    with pytest.raises(ResourceError) as error:
        member(_pinned(packages, WHEEL, member="elsewhere/data.txt"))
    assert "no member 'elsewhere/data.txt'" in _single_line(error)
    assert "toydata/data.txt" in str(error.value)
    with pytest.raises(ResourceError, match="set member"):
        member(_pinned(packages, WHEEL))


def test_archives_read_by_name_in_any_order(packages):
    with open_archive(_pinned(packages, SDIST)) as archive:
        assert "toysource-2.0/docs/b.txt" in archive.names()
        assert [archive.read(f"toysource-2.0/docs/{name}.txt") for name in "abab"] == [b"first", b"second"] * 2
        with pytest.raises(ResourceError, match="no member"):
            archive.read("absent")


def test_file_uris_are_relative_to_the_root_and_may_be_pinned(tmp_path):
    (tmp_path / "here.txt").write_text("x")
    digest = hashlib.sha256(b"x").hexdigest()
    assert fetch(Resource(uri="file:here.txt", sha256=digest), tmp_path) == tmp_path / "here.txt"
    with pytest.raises(ResourceError, match="correct sha256"):
        fetch(Resource(uri="file:here.txt", sha256="0" * 64), tmp_path)
    with pytest.raises(ResourceError, match="nothing at"):
        fetch(Resource(uri="file:absent.txt"), tmp_path)
    with pytest.raises(ResourceError, match=r"no readable archive.*allowed: a whole \.whl, \.zip or \.tar\.gz"):
        open_archive(Resource(uri="file:here.txt"), tmp_path)


def test_hub_repositories_fail_in_one_line():
    resource = Resource(uri="hf:nobody/nothing", revision="0" * 40)
    with pytest.raises(ResourceError) as error:
        fetch(resource)
    assert "hf:nobody/nothing at revision 000" in _single_line(error)


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def interrupted():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SELFSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "selfspec"


def test_pip_runs_in_this_interpreter(packages, monkeypatch):
    seen = {}

    def refuse(command, **_):
        seen["command"] = command
        raise OSError("stop here")

    monkeypatch.setattr(resources.subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="stop here"):
        fetch(_pinned(packages, WHEEL))
    assert seen["command"][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in seen["command"]
