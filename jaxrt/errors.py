"""The error tree. Every message has three parts: what was found, what was expected, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class JaxrtError(Exception):
    """Root of everything jaxrt raises on purpose.

    found: what was there. expected: what should have been there. fix: what the reader can do about it.
    """

    def __init__(self, found: str, *, expected: str = "", fix: str = "") -> None:
        self.found, self.expected, self.fix = found, expected, fix
        parts = [found, f"expected {expected}" if expected else "", fix]
        super().__init__("; ".join(part for part in parts if part))


class ArtifactError(JaxrtError):
    """A file or directory that cannot be read as what it claims to be. Names the file and the field."""

    def __init__(self, found: str, *, path: object = "", field: str = "", expected: str = "", fix: str = "") -> None:
        self.path, self.field = str(path), field
        where = ": ".join(part for part in (self.path, field) if part)
        super().__init__(f"{where}: {found}" if where else found, expected=expected, fix=fix)


class UnsupportedModel(JaxrtError):
    """A well-formed checkpoint that asks for something jaxrt does not do. Names the key and its value."""


class ModelLoadError(JaxrtError):
    """A checkpoint that could be read but not turned into a session."""


class SessionCapabilityError(ModelLoadError):
    """A session lacks a capability that was required of it, or has others than were admitted."""


class RequestError(JaxrtError, ValueError):
    """A request that cannot be served as written; raised before anything is dispatched."""


class CapacityError(RequestError):
    """A request that does not fit: the model's context, the cache, or the device's memory."""


class ContextError(JaxrtError, KeyError):
    """A named value, target or symbol that a program needs and that is not there."""

    __str__ = Exception.__str__


class UnboundSymbol(ContextError):
    """A symbol that a program reads and that the pass did not bind."""


class ReboundSymbol(ContextError):
    """A symbol bound twice in one pass, to different values; the first one stays."""


class TopologyChanged(JaxrtError):
    """A plan was made for other devices, shapes or dtypes than it is now given."""


class CompileForbidden(JaxrtError):
    """Something was compiled, or loaded from the compile cache, under `forbid_compile()`."""


class SessionPoisoned(JaxrtError):
    """A session whose buffers were lost on the way; says how to get a usable one."""


class ExecutionError(JaxrtError):
    """The device failed, or computed something that is no answer (all-NaN logits)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known spellings closest to `name`, or all of them when none is close."""
    names = sorted(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(names)}"
