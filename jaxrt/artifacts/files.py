"""How files of unknown origin are opened: regular files only, bounded sizes, strict JSON, names made fit to print."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from jaxrt.errors import ArtifactError


def printable(text: str, limit: int = 120) -> str:
    """`text` as an error message may show it: no control characters, at most about `limit` characters."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def regular_size(path: Path) -> int:
    """Size in bytes of a regular file that is not empty.

    Raises: ArtifactError when it is missing, unreadable, empty, a directory or a device (opening a pipe may block).
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise ArtifactError("is a directory", path=path, expected="a file")
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError("is a pipe, socket or device", path=path, expected="a regular file")
    if not status.st_size:
        raise ArtifactError("the file is empty", path=path, fix="copy or download it again")
    return status.st_size


def unreadable(path: Path, error: Exception) -> ArtifactError:
    """The ArtifactError for what the operating system said about `path`."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ArtifactError(
        f"cannot be opened: {reason}", path=printable(str(path), 1024), fix="check the path and permissions"
    )


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises: ArtifactError for anything else."""
    size = regular_size(path)
    if size > limit:
        raise ArtifactError(f"{size:,} bytes", path=path, expected=f"at most {limit:,} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json_object(data, path)


def parse_json_object(data: bytes, path: Path, field: str = "") -> dict[str, Any]:
    """`data` as a JSON object; `path` and `field` say in errors where it stands. Raises: ArtifactError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):  # parsers differ in which one wins, so what was checked may not be what is used
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ArtifactError(
                f"key {printable(twice)!r} appears twice", path=path, field=field, expected="unique keys"
            )
        return value

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ArtifactError("JSON nested too deeply", path=path, field=field, expected="a flat object") from None
    except ValueError as error:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise ArtifactError(
            f"not JSON: {printable(str(error))}", path=path, field=field, fix="copy or download it again"
        ) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"JSON {type(value).__name__}", path=path, field=field, expected="an object")
    return value
