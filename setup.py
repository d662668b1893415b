"""The native kernels, beside what pyproject.toml says. Without a C++ compiler the package installs without them."""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("jaxrt", "native")
sources = sorted(path.as_posix() for path in NATIVE.iterdir() if path.suffix in (".cc", ".h"))
digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in sources)).hexdigest()
jaxlib = find_spec("jaxlib")

extensions = []
if jaxlib and jaxlib.submodule_search_locations and sys.platform in ("linux", "darwin"):
    extensions = [
        Extension(
            "jaxrt.native.kernels",
            [path for path in sources if path.endswith(".cc")],
            depends=sources,
            include_dirs=[str(Path(jaxlib.submodule_search_locations[0], "include"))],
            define_macros=[("JAXRT_SOURCES", f'"{digest}"')],
            # products are not fused with sums where the source does not say so: unpacked weights are bitwise GGUF's
            extra_compile_args=["-O3", "-std=c++17", "-ffp-contract=off", "-g0", "-w"],
            optional=True,
        )
    ]
setup(ext_modules=extensions)
