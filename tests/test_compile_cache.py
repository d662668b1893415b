"""The persistent compile cache: private, rid of what is torn, and read through once."""

import logging
import os
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jaxrt import compile_cache

WHOLE = zlib.compress(b"an executable" * 100)
HARMS = {
    "empty": b"",
    "one byte": WHOLE[:1],
    "half": WHOLE[: len(WHOLE) // 2],
    "its end": WHOLE[:-1],
    "a flipped bit": WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
    "text": b"this is no executable",
    "zeros": bytes(200),
}


@pytest.fixture(autouse=True)
def zlib_codec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_cache, "_codec", lambda: ("zlib", zlib.decompress))


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_no_entry_is_removed(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture):
    (tmp_path / "good-cache").write_bytes(WHOLE)
    (tmp_path / "bad-cache").write_bytes(HARMS[harm])
    (tmp_path / "note.txt").write_bytes(HARMS[harm])
    with caplog.at_level(logging.WARNING, "jaxrt"):
        assert compile_cache.heal(tmp_path) == [tmp_path / "bad-cache"]
    assert "removed 1 entries" in caplog.text
    assert (tmp_path / "good-cache").exists() and (tmp_path / "note.txt").exists()


def test_entries_are_read_through_once(tmp_path: Path):
    old, new = tmp_path / "old-cache", tmp_path / "new-cache"
    old.write_bytes(WHOLE)
    assert compile_cache.heal(tmp_path) == []
    old.write_bytes(b"torn, but long ago")
    long_ago = os.stat(old).st_mtime - 3_600
    os.utime(old, (long_ago, long_ago))
    new.write_bytes(b"torn just now")
    assert compile_cache.heal(tmp_path) == [new]
    assert old.exists()


def test_an_entry_that_cannot_be_removed_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bad-cache").write_bytes(b"torn")

    def refuse(self: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert compile_cache.heal(tmp_path) == []


def test_a_directory_that_others_could_write_is_made_private_and_not_trusted(tmp_path: Path):
    code = f"""
from pathlib import Path
from jaxrt import compile_cache
print(compile_cache.enable(Path({str(tmp_path / "cache")!r})))
"""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "planted-cache").write_bytes(WHOLE)
    (tmp_path / "cache").chmod(0o777)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == str(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert "removed its 1 entries" in ran.stderr and not (tmp_path / "cache" / "planted-cache").exists()


def test_torn_entries_cost_one_compile(tmp_path: Path):
    code = f"""
from pathlib import Path
from jaxrt import compile_cache
compile_cache.enable(Path({str(tmp_path / "cache")!r}))
import jax
from jaxrt.program import compiles
jax.jit(lambda x: x * 3 + 1)(2.0)
print(compiles().misses, compiles().hits)
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}

    def run() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip(), done.stderr

    first, _ = run()
    again, _ = run()
    assert first == "1 0" and again == "0 1"
    (entry,) = (tmp_path / "cache").glob("*-cache")
    entry.write_bytes(entry.read_bytes()[:100])
    torn, said = run()
    assert torn == "1 0" and "removed 1 entries" in said
    assert run()[0] == "0 1"
