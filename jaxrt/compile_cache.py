"""The persistent compile cache: on by default, private to its user, and rid of entries that a crash tore.

An entry is executable code, so a directory that others can write is never used. JAX writes entries without a
temporary file and
never rewrites one that is there: a torn entry would cost a warning and a compile at every start for ever.
"""

import logging
import os
import stat
import zlib
from pathlib import Path

import jax

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
    """Remove entries that are not whole; those removed. Entries of other compressions than zlib are left alone."""
    torn = []
    for entry in directory.glob("*-cache"):
        try:
            if not _whole(entry.read_bytes()):
                entry.unlink()
                torn.append(entry)
        except OSError as error:  # another process may have removed it
            log.debug("compile cache: %s: %s", entry, error)
    if torn:
        log.warning("compile cache: removed %d torn entries", len(torn))
    return torn


def _make_private(directory: Path) -> str:
    facts = directory.stat()
    if facts.st_uid != os.getuid():
        return "it belongs to another user"
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        directory.chmod(0o700)
    return ""


def _whole(data: bytes) -> bool:
    if len(data) < 2:
        return False
    if data[0] & 0x0F != 8 or (data[0] << 8 | data[1]) % 31:  # no zlib stream
        return True
    stream = zlib.decompressobj()
    try:
        stream.decompress(data)
    except zlib.error:
        return False
    return stream.eof
