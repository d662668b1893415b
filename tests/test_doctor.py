"""`jaxrt doctor` says loudly what would make a user wonder: wrong versions, an idle GPU, a cache others can write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrt.doctor import (
    Finding,
    Gpus,
    as_json,
    check_compile_cache,
    check_disk,
    check_environment,
    check_gpu,
    check_versions,
    examine,
    scheduler,
    try_matmul,
    visible_gpus,
)

H200 = Gpus(("NVIDIA H200",), "580.95.05")
CUDA = {"jax-cuda13-plugin": "0.12.0"}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_is_well_and_is_described_whole():
    found = by_name(examine())
    assert not [finding for finding in found.values() if finding.status == "fail"]
    for name in ("jaxrt", "python", "jax", "devices", "GPU", "matmul", "compile cache", "disk free", "scheduler"):
        assert found[name].value
    assert json.loads(json.dumps(as_json(list(found.values()))))["findings"][0]["name"] == "jaxrt"


@pytest.mark.parametrize(
    ("statuses", "worst"), [((), "ok"), (("ok", "warn"), "warn"), (("fail", "warn", "ok"), "fail"), (("ok",), "ok")]
)
def test_json_says_the_worst_status(statuses: tuple, worst: str):
    assert as_json([Finding("x", "y", status) for status in statuses])["status"] == worst


@pytest.mark.parametrize(
    ("python", "jax", "jaxlib", "status"),
    [
        ((3, 11, 7), "0.10.2", "0.10.2", "ok"),
        ((3, 11, 7), "0.10.1", "0.10.1", "warn"),  # too old
        ((3, 11, 7), "0.11.0", "0.11.0", "warn"),  # not for this Python
        ((3, 12, 1), "0.10.2", "0.10.2", "warn"),  # 3.12 has newer ones
        ((3, 12, 1), "0.12.0.1", "0.12.0.1", "ok"),
        ((3, 14, 0), "0.11.2", "0.11.2", "ok"),
        ((3, 13, 0), "0.11.1", "0.11.1", "fail"),  # computes wrongly on CPU
        ((3, 12, 1), "0.12.0", "0.11.2", "warn"),  # skew
    ],
)
def test_versions_that_do_not_go_together_are_told(python: tuple, jax: str, jaxlib: str, status: str):
    finding = by_name(check_versions(python, jax, jaxlib, {}))["jax"]
    assert finding.status == status
    assert bool(finding.advice) == (status != "ok")


def test_an_old_python_and_a_plugin_of_another_version_are_failures():
    assert by_name(check_versions((3, 10, 2), "0.10.2", "0.10.2", {}))["python"].status == "fail"
    found = by_name(check_versions((3, 12, 1), "0.12.0", "0.12.0", {"jax-cuda13-plugin": "0.11.0"}))
    assert found["jax-cuda13-plugin"].status == "fail"
    assert "jax-cuda13-plugin==0.12.0" in found["jax-cuda13-plugin"].advice
    assert by_name(check_versions((3, 12, 1), "0.12.0.1", "0.12.0.1", CUDA))["jax-cuda13-plugin"].status == "ok"


@pytest.mark.parametrize(
    ("used", "gpus", "plugins", "environ", "status", "advice"),
    [
        ("cpu", Gpus(), {}, {}, "ok", ""),
        ("gpu", H200, CUDA, {}, "ok", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("gpu", H200, CUDA, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "ok", ""),
        ("cpu", H200, {}, {}, "warn", "jax[cuda13]=="),
        ("cpu", Gpus(("Tesla V100",), "535.104"), {}, {}, "warn", "jax[cuda12]=="),
        ("cpu", Gpus(("NVIDIA GPU at 0000:01:00.0",)), {}, {}, "warn", "jax[cuda13]=="),
        ("cpu", H200, CUDA, {"JAX_PLATFORMS": "cpu"}, "warn", "JAX_PLATFORMS=cpu"),
        ("cpu", H200, CUDA, {"CUDA_VISIBLE_DEVICES": ""}, "warn", "CUDA_VISIBLE_DEVICES"),
        ("cpu", H200, CUDA, {"CUDA_VISIBLE_DEVICES": "0"}, "fail", "did not start"),
        ("cpu", Gpus(), CUDA, {}, "warn", "--gpus all"),
    ],
)
def test_an_idle_gpu_is_told_with_the_way_to_use_it(
    used: str, gpus: Gpus, plugins: dict, environ: dict, status: str, advice: str
):
    finding = check_gpu(used, gpus, plugins, environ)
    assert finding.status == status
    assert advice in finding.advice and bool(finding.advice) == bool(advice)
    assert ("NOT USED" in finding.value) == (used == "cpu" and bool(gpus.names))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_read_from_the_drivers_command_else_from_proc(tmp_path: Path):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    works = script(tmp_path / "works", "echo 'NVIDIA H200, 580.95.05'; echo 'NVIDIA H200, 580.95.05'")
    broken = script(tmp_path / "broken", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert visible_gpus(tmp_path, works) == Gpus(("NVIDIA H200", "NVIDIA H200"), "580.95.05")
    at_proc = Gpus(("NVIDIA GPU at 0000:01:00.0",))
    assert visible_gpus(tmp_path, broken) == at_proc
    assert visible_gpus(tmp_path, str(tmp_path / "absent")) == at_proc
    assert visible_gpus(tmp_path / "absent", broken) == Gpus()


def test_settings_that_hurt_come_with_advice():
    found = by_name(
        check_environment(
            {
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "75",
                "XLA_CLIENT_MEM_FRACTION": ".5",
                "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
                "CUDA_VISIBLE_DEVICES": "",
                "HOME": "/",
            }
        )
    )
    assert {name: finding.status for name, finding in found.items()} == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "fail",
        "XLA_CLIENT_MEM_FRACTION": "ok",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "warn",
        "CUDA_VISIBLE_DEVICES": "ok",
    }
    assert found["CUDA_VISIBLE_DEVICES"].value == "(empty)"
    assert not check_environment({})


def test_a_compile_cache_is_measured_and_must_be_private(tmp_path: Path):
    cache = tmp_path / "xla"
    assert "not there yet" in check_compile_cache(cache).value
    cache.mkdir(mode=0o700)
    (cache / "jit_f-abc-cache").write_bytes(b"x" * 1_500)
    (cache / "jit_f-abc-atime").write_bytes(b"x" * 8)
    private = check_compile_cache(cache)
    assert private.status == "ok"
    assert "1 entries, 1.5 kB, mode 0700" in private.value
    cache.chmod(0o777)
    assert check_compile_cache(cache).status == "warn"
    assert "chmod 700" in check_compile_cache(cache).advice


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_compile_cache_of_another_user_is_told(tmp_path: Path):
    os.chown(tmp_path, 12_345, -1)
    assert "user 12345" in check_compile_cache(tmp_path).value
    assert check_compile_cache(tmp_path).status == "warn"


def test_free_disk_is_that_of_the_nearest_directory_there_is(tmp_path: Path):
    assert str(tmp_path) in check_disk(tmp_path / "not" / "made").value


def test_the_matmul_is_right_on_this_device():
    assert try_matmul().status == "ok"


def test_schedulers_are_recognised():
    assert scheduler({}) == "none"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert scheduler(slurm) == "Slurm job 7, task 1 of 4, on n[1-2]"
    assert scheduler({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "pod-3"}) == "Kubernetes, pod pod-3"


@pytest.mark.parametrize("platform", ["rocm", "nonsense"])
def test_a_platform_that_is_not_there_is_a_finding_and_no_traceback(platform: str):
    code = "import json; from jaxrt.doctor import *; print(json.dumps(as_json(examine())))"
    environ = {**os.environ, "JAX_PLATFORMS": platform, "JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["status"] == "fail"
    assert found["devices"]["status"] == "fail" and found["devices"]["value"]
    assert found["jax_enable_x64"]["status"] == "warn"
    assert found["JAX_PLATFORMS"]["value"] == platform
