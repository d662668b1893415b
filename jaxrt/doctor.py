"""What jaxrt finds on this machine: versions, devices, memory, settings, caches, and whether a matmul comes out right.

Nothing here runs on a device before `examine` is called.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrt import __version__, compile_cache, native
from jaxrt.artifacts.hub import DEMO_MODELS, default_cache
from jaxrt.markup import bytes_text

OPTIONS: Any = jax.config  # whose options are attributes that type checkers do not see

Status = Literal["ok", "warn", "fail"]
Version = tuple[int, ...]

# Python from, jax from, jax before: the pairs that jaxrt supports. The last row that fits a Python counts.
SUPPORTED: tuple[tuple[Version, Version, Version], ...] = (
    ((3, 11), (0, 10, 2), (0, 11)),
    ((3, 12), (0, 11), (1,)),
)
WRONG_ON_CPU = (0, 11, 1)  # jax issue 40101
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
CUDA_13_DRIVER = 580  # the oldest driver, by its first number, that runs CUDA 13
LEAST_FREE_BYTES = 2_000_000_000  # a demo model and its compiled programs, with room to spare
SMOKE = 256  # rows and columns of the matmul that is tried

# Settings that change how JAX behaves; each is shown where it is set.
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MEMORY_VARIABLES = ("XLA_PYTHON_CLIENT_PREALLOCATE", *FRACTIONS, "XLA_PYTHON_CLIENT_ALLOCATOR")
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", *MEMORY_VARIABLES)


@dataclass(frozen=True)
class Finding:
    """One fact, whether it is as it should be, and what to do if not."""

    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Gpus:
    """The NVIDIA GPUs that the driver shows, whatever JAX makes of them."""

    names: tuple[str, ...] = ()
    driver: str = ""  # its version; empty where nothing says


def examine() -> list[Finding]:
    """Everything there is to say about this machine. Starts JAX's default backend and runs one small matmul on it."""
    gpus = visible_gpus()
    plugins = installed(PLUGINS)
    found = [
        Finding("jaxrt", __version__),
        *check_versions(sys.version_info[:3], jax.__version__, importlib.metadata.version("jaxlib"), plugins),
    ]
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, for a platform that has no plugin
        advice = "JAX finds no device it can use; check JAX_PLATFORMS, the plugin and the driver"
        found.append(Finding("devices", str(error) or "none", "fail", advice))
    else:
        named = ", ".join(f"{device.platform}:{device.id} ({device.device_kind})" for device in devices)
        found += [
            Finding("devices", named),
            check_gpu(devices[0].platform, gpus, plugins, os.environ),
            *(_memory(device) for device in devices),
            try_matmul(),
        ]
    return [
        *found,
        check_kernels(native.instruction_set(), native.missing()),
        *check_environment(os.environ),
        *_jax_options(),
        check_compile_cache(Path(OPTIONS.jax_compilation_cache_dir or compile_cache.default_directory())),
        _hugging_face(),
        _models(default_cache()),
        check_disk(default_cache()),
        Finding("scheduler", scheduler(os.environ)),
    ]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """What `jaxrt doctor --json` prints: the findings, and the worst status among them."""
    worst = next((status for status in ("fail", "warn") if any(f.status == status for f in findings)), "ok")
    return {"status": worst, "findings": [dataclasses.asdict(finding) for finding in findings]}


# Versions


def check_versions(python: Sequence[int], jax_version: str, jaxlib: str, plugins: Mapping[str, str]) -> list[Finding]:
    """Whether these versions go together. `plugins` maps distribution names to versions."""
    said = ".".join(map(str, python))
    least, below = next(
        ((low, high) for since, low, high in reversed(SUPPORTED) if tuple(python) >= since), SUPPORTED[0][1:]
    )
    wanted = f"jax from {_dotted(least)} on and before {_dotted(below)}"
    found = [Finding("python", f"{said} on {platform.platform()}")]
    if tuple(python) < SUPPORTED[0][0]:
        found = [Finding("python", said, "fail", f"jaxrt needs Python {_dotted(SUPPORTED[0][0])} or newer")]
    version = _version(jax_version)
    pair = f"{jax_version} with jaxlib {jaxlib}"
    if not least <= version < below:
        found.append(Finding("jax", pair, "warn", f"on Python {said} jaxrt is made for {wanted}"))
    elif version[:3] == WRONG_ON_CPU:
        found.append(Finding("jax", pair, "fail", "this release computes wrongly on CPU; take another"))
    elif _version(jaxlib)[:3] != version[:3]:
        found.append(
            Finding("jax", pair, "warn", f"install jax and jaxlib of one version: pip install jax[cpu]=={jaxlib}")
        )
    else:
        found.append(Finding("jax", pair))
    for name, plugin in plugins.items():
        same = _version(plugin)[:3] == _version(jaxlib)[:3]
        advice = "" if same else f"plugin and jaxlib must be of one version: pip install {name}=={jaxlib}"
        found.append(Finding(name, plugin, "ok" if same else "fail", advice))
    return found


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those of `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _version(text: str) -> Version:
    parts = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


# Devices


def visible_gpus(proc: Path = Path("/proc/driver/nvidia"), smi: str = "nvidia-smi") -> Gpus:
    """What the driver's command `smi` lists, else what lies under `proc`; empty where there is neither."""
    command = shutil.which(smi)
    if command:
        query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            done = None  # the command without a driver: what /proc says counts
        if done is not None and done.stdout.strip():
            rows = [line.rpartition(",") for line in done.stdout.strip().splitlines()]
            return Gpus(tuple(name.strip() for name, _, _ in rows), rows[0][2].strip())
    return Gpus(tuple(f"NVIDIA GPU at {folder.name}" for folder in sorted(proc.glob("gpus/*"))))


def check_gpu(used: str, gpus: Gpus, plugins: Mapping[str, str], environ: Mapping[str, str]) -> Finding:
    """Whether the platform that JAX chose, `used`, leaves a GPU idle that is there, and how it takes its memory."""
    seen = ", ".join(gpus.names) + (f", driver {gpus.driver}" if gpus.driver else "")
    if used in ("gpu", "cuda", "rocm"):
        if any(name in environ for name in MEMORY_VARIABLES):
            return Finding("GPU", seen or "in use")
        advice = "to share it between processes, set XLA_PYTHON_CLIENT_PREALLOCATE=false in each"
        return Finding("GPU", f"{seen or 'in use'}; JAX takes 75 % of its memory at the first use", advice=advice)
    if not gpus.names:
        if not plugins:
            return Finding("GPU", "none")
        advice = "in a container, start it with its GPUs (`--gpus all`); else look at the driver"
        return Finding("GPU", f"none, though {' and '.join(plugins)} is installed", "warn", advice)
    idle = f"{seen}: NOT USED, JAX runs on {used}"
    if not plugins:
        driver = _version(gpus.driver)
        extra = "cuda12" if driver and driver[0] < CUDA_13_DRIVER else "cuda13"
        return Finding(
            "GPU", idle, "warn", f'install JAX\'s CUDA plugin: pip install "jax[{extra}]=={jax.__version__}"'
        )
    if environ.get("JAX_PLATFORMS"):
        return Finding("GPU", idle, "warn", f"JAX_PLATFORMS={environ['JAX_PLATFORMS']} says so; unset it")
    if environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles"):
        return Finding("GPU", idle, "warn", "CUDA_VISIBLE_DEVICES hides it; unset it")
    advice = 'the plugin did not start: run `JAX_PLATFORMS=cuda python -c "import jax; jax.devices()"` and see why'
    return Finding("GPU", idle, "fail", advice)


def _memory(device: Any) -> Finding:
    name, stats = f"memory of {device.platform}:{device.id}", device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Finding(name, f"not reported by the device; the host has {bytes_text(host)}")
    used, limit = stats["bytes_in_use"], stats["bytes_limit"]
    return Finding(name, f"{bytes_text(used)} of {bytes_text(limit)} in use")


def try_matmul() -> Finding:
    """One matmul of small whole numbers on the default device, which every precision gets exactly."""
    name = "matmul"
    left, right = np.random.default_rng(0).integers(-7, 8, (2, SMOKE, SMOKE)).astype(np.float32)
    start = time.perf_counter()
    try:
        result = np.asarray(jax.jit(lambda a, b: a @ b)(left, right))
    except Exception as error:  # whatever the runtime raises is the finding
        return Finding(
            name, f"{type(error).__name__}: {error}", "fail", "the device cannot run a program; see `devices`"
        )
    took = f"{SMOKE} x {SMOKE} in {time.perf_counter() - start:.2f} s, with compiling"
    if not np.array_equal(result, left @ right):
        return Finding(name, f"{took}: WRONG", "fail", "look at XLA_FLAGS, the plugin's version and the driver")
    return Finding(name, took)


# Settings


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """The variables of JAX and XLA that are set; values that hurt come with advice."""
    found = []
    for name in VARIABLES:
        if name not in environ:
            continue
        value = environ[name]
        if name in FRACTIONS and not _is_fraction(value):
            found.append(Finding(name, value, "fail", "a fraction of the GPU's memory: above 0 and at most 1, as .75"))
        elif name == "XLA_PYTHON_CLIENT_ALLOCATOR" and value == "platform":
            found.append(Finding(name, value, "warn", "allocates and frees at every step, very slowly; unset it"))
        else:
            found.append(Finding(name, value or "(empty)"))
    return found


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _jax_options() -> list[Finding]:
    found = [Finding("jax_enable_x64", str(OPTIONS.jax_enable_x64))]
    if OPTIONS.jax_enable_x64:
        found = [Finding("jax_enable_x64", "True", "warn", "jaxrt is tested without; unset JAX_ENABLE_X64")]
    if OPTIONS.jax_debug_nans:
        advice = "it runs donated calls again, which fails (jax issue 12514); unset JAX_DEBUG_NANS"
        found.append(Finding("jax_debug_nans", "True", "warn", advice))
    return found


def check_kernels(instruction_set: str | None, missing: str | None) -> Finding:
    """Whether the native kernels for CPUs are there; without them XLA does the same, more slowly."""
    if missing is None:
        return Finding("native kernels", f"{instruction_set}")
    return Finding("native kernels", "none", "warn", f"decoding on CPU is several times slower: {missing}")


# Directories


def check_compile_cache(directory: Path) -> Finding:
    """Whether the persistent compile cache is there and private. Its entries are code: nobody else may write them."""
    name = "compile cache"
    try:
        facts = directory.stat()
    except OSError as error:
        return Finding(name, f"{directory}: {'not there yet' if isinstance(error, FileNotFoundError) else error}")
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.getuid():
        advice = "jaxrt does not use it; set XDG_CACHE_HOME to a directory of your own"
        return Finding(name, f"{directory}: belongs to user {facts.st_uid}", "warn", advice)
    sizes = [size for entry in directory.glob("*-cache") if (size := _size(entry)) is not None]
    said = f"{directory}: {len(sizes):,} entries, {bytes_text(sum(sizes))}, mode {mode:04o}"
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Finding(name, said, "warn", f"entries are code: chmod 700 {directory}")
    return Finding(name, said)


def check_disk(directory: Path) -> Finding:
    """Free bytes where `directory` is or would be made."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    said = f"{bytes_text(free)} at {there}"
    if free < LEAST_FREE_BYTES:
        return Finding("disk free", said, "warn", "models and compiled programs may not fit")
    return Finding("disk free", said)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # removed by another process
        return None


def _hugging_face() -> Finding:
    from huggingface_hub import constants

    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    there = "" if Path(constants.HF_HUB_CACHE).is_dir() else ", not there yet"
    return Finding("Hugging Face cache", f"{constants.HF_HUB_CACHE}{there}, {offline}")


def _models(cache: Path) -> Finding:
    fetched = [name for name, model in DEMO_MODELS.items() if (cache / name / model.file).exists()]
    return Finding("demo models", f"{cache}: {', '.join(fetched) or 'none fetched yet'}")


def scheduler(environ: Mapping[str, str]) -> str:
    """What started this process, as far as its environment says."""
    if "SLURM_JOB_ID" in environ:
        task, tasks = environ.get("SLURM_PROCID", "0"), environ.get("SLURM_NTASKS", "1")
        nodes = environ.get("SLURM_JOB_NODELIST", "one node")
        return f"Slurm job {environ['SLURM_JOB_ID']}, task {task} of {tasks}, on {nodes}"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return f"Kubernetes, pod {environ.get('HOSTNAME', 'unknown')}"
    return "none"
