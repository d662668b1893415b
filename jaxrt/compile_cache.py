"""The persistent compile cache: on by default, private to its user, and rid of entries that a crash tore.

An entry is executable code, so a directory that others can write is never used. JAX writes entries without a
temporary file and never rewrites one that is there: a torn entry would cost a warning and a compile at every start for
ever. Only entries written since the last start are read through, since a cache grows to hundreds of megabytes.
"""

import importlib
import logging
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

CHECKED = "checked"  # begins the name of a file there, whose time is that of the last look at the entries
MARGIN_NS = 10**10  # of a file system's clock against another, and of an entry that was being written

log = logging.getLogger("jaxrt")


def default_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "jaxrt" / "xla"


def enable(directory: Path | None = None) -> Path | None:
    """Turn the cache on in `directory` (made private), unless the user has configured one: the directory in use.

    None, with a warning in the log, where it cannot be made private; everything then works without it.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    try:
        directory = directory or default_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _make_private(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        problem = str(error)
    if problem:
        log.warning("compile cache off: %s: %s", directory or "no directory", problem)
        return None
    heal(directory)
    for option, value in {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",  # else the key covers the directory's path
    }.items():
        jax.config.update(option, value)
    return directory


def heal(directory: Path) -> list[Path]:
    """Remove entries written since the last call that JAX could not unpack here; those removed."""
    codec, unpack = _codec()
    torn, checked = [], directory / f"{CHECKED}-{codec}"
    try:
        since = checked.stat().st_mtime_ns - MARGIN_NS if checked.exists() else 0
        checked.touch(mode=0o600)
    except OSError as error:  # a full or read-only disk: look at all of them
        log.debug("compile cache: %s: %s", checked, error)
        since = 0
    for entry in directory.glob("*-cache"):
        try:
            if entry.stat().st_mtime_ns < since:
                continue
            packed = entry.read_bytes()
        except OSError as error:  # another process may have removed it
            log.debug("compile cache: %s: %s", entry, error)
            continue
        try:
            unpack(packed)
        except Exception as error:  # each codec has errors of its own
            log.debug("compile cache: %s: %s", entry, error)
            with suppress(OSError):
                entry.unlink()
                torn.append(entry)
    if torn:
        log.warning("compile cache: removed %d entries that are torn or no such thing", len(torn))
    return torn


def _make_private(directory: Path) -> str:
    facts = directory.stat()
    if facts.st_uid != os.getuid():
        return "it belongs to another user"
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        directory.chmod(0o700)
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        entries = list(directory.glob("*-cache"))
        for entry in entries:
            entry.unlink()
        log.warning("compile cache: others could write %s: removed its %d entries", directory, len(entries))
    return ""


def _codec() -> tuple[str, Callable[[bytes], bytes]]:
    """What JAX packs its entries with here: the best of what is installed."""
    with suppress(ImportError):  # from Python 3.14 on
        return "zstd", importlib.import_module("compression.zstd").decompress
    with suppress(ImportError):
        return "zstandard", importlib.import_module("zstandard").ZstdDecompressor().decompress
    return "zlib", zlib.decompress
