"""The command line as people use it: on a file and on a directory, what goes where, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import jaxrt
from tests.files import (
    byte_tokenizer_json,
    hf_to_gguf_tensors,
    tiny_config_json,
    tiny_gguf_metadata,
    tiny_llama_tensors,
    write_gguf,
    write_hf,
)

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows bytes, as a Hugging Face directory with spaces and an umlaut in its path."""
    return write_hf(
        tmp_path_factory.mktemp("a tiny mödel") / "hf",
        tiny_config_json(),
        tiny_llama_tensors(np.random.default_rng(0)),
        tokenizer_json=byte_tokenizer_json(),
        tokenizer_config={"eos_token": "</s>"},
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def file(directory: Path) -> Path:
    """The same weights as one GGUF file, without a tokenizer."""
    tensors = hf_to_gguf_tensors(tiny_llama_tensors(np.random.default_rng(0)))
    return write_gguf(directory.parent / "tiny.gguf", tiny_gguf_metadata(), tensors)


def jaxrt_command(*arguments: object, text: str | None = None, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a `jaxrt` process that must end with `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxrt", *map(str, arguments)],
        input=text or "",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_run_prints_the_answer_alone_on_stdout(directory: Path):
    out, _ = jaxrt_command("run", "hello", "--model", directory, "--max-tokens", 8, "--ignore-eos")
    with jaxrt.load(directory) as runtime:
        expected = runtime.generate("hello", jaxrt.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert out == expected.text + "\n"


def test_run_json_is_one_object_in_the_documented_form(directory: Path):
    out, _ = jaxrt_command("run", "hello", "--model", directory, "--max-tokens", 4, "--json", "--ignore-eos")
    found = json.loads(out)
    assert found["prompt_tokens"] == list(b"hello") and len(found["tokens"]) == 4
    assert found["finish_reason"] == "length" and isinstance(found["text"], str)
    names = {"ttft_s", "prefill_tps", "decode_tps", "compile_s", "prompt_tokens", "new_tokens"}
    assert names <= found["stats"].keys()


def test_run_reads_stdin_and_uses_the_chat_template(directory: Path):
    out, err = jaxrt_command(
        "run", "--chat", "--model", directory, "--max-tokens", 3, "--json", "--stats", text="hi there"
    )
    assert bytes(json.loads(out)["prompt_tokens"]) == b"<user>hi there<assistant>"
    assert "first token" in err


def test_sampling_options_reach_the_sampler(directory: Path):
    options = ["--temperature", 1.0, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.01, "--max-tokens", 12, "--json"]
    one, again, other = (
        json.loads(jaxrt_command("run", "x", "--model", directory, "--seed", seed, *options)[0]) for seed in (1, 1, 2)
    )
    assert one["tokens"] == again["tokens"] != other["tokens"] and one["seed"] == 1


@pytest.mark.parametrize("source", ["directory", "file"])
def test_plan_reads_headers_only(source: str, request: pytest.FixtureRequest, tmp_path: Path):
    path: Path = request.getfixturevalue(source)
    found = json.loads(jaxrt_command("plan", "--model", path, "--rows", 4, "--capacity", 256, "--json")[0])
    tensors = tiny_llama_tensors(np.random.default_rng(0))
    assert found["weights_bytes"] == sum(array.nbytes for array in tensors.values())
    assert found["parameters"] == sum(array.size for array in tensors.values())
    assert (
        found["cache_bytes_per_row"] == 2 * 2 * 2 * 8 * 4 * 256
    )  # K and V, layers, KV heads, head width, bytes, tokens
    assert found["compiles"] == len(found["buckets"]) <= 20
    shown, _ = jaxrt_command("plan", "--model", path)
    assert "cache per 1,000 tokens" in shown and "workspace" in shown


def test_score_bench_and_convert_work_on_files_and_directories(directory: Path, file: Path, tmp_path: Path):
    scored = json.loads(jaxrt_command("score", "abc", "--model", directory, "--json")[0])
    assert scored[0]["tokens"] == list(b"abc") and scored[0]["logprobs"][0] is None
    assert "perplexity" in jaxrt_command("score", "--model", directory, text="abc")[0]

    out, _ = jaxrt_command("bench", "--model", file, "-p", 16, "-n", 4, "-d", 8, "-b", 1, "-b", 2, "-r", 2, "--json")
    results = json.loads(out)["results"]
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"], r["rows"]) for r in results] == [
        (16, 0, 8, 1), (16, 0, 8, 2), (0, 4, 8, 1), (0, 4, 8, 2),
    ]  # fmt: skip
    assert all(r["avg_ts"] > 0 and r["stddev_ts"] >= 0 and len(r["samples_ts"]) == 2 for r in results)
    assert "± " in jaxrt_command("bench", "--model", file, "-p", 8, "-n", 2, "-r", 1)[0]
    assert jaxrt_command("bench", "--model", file, "-p", 8, "-n", 2, "-r", 1, "-o", "csv")[0].startswith(
        "model,device,"
    )

    for number, source in enumerate((directory, file)):
        target = tmp_path / f"orbax {number}"
        jaxrt_command("convert", target, "--model", source)
        tokens = [
            json.loads(jaxrt_command("bench", "--model", m, "-p", 4, "-n", 2, "-r", 1, "--json")[0]) for m in (target,)
        ]
        assert tokens[0]["n_params"] == json.loads(jaxrt_command("plan", "--model", source, "--json")[0])["parameters"]
        _, err = jaxrt_command("convert", target, "--model", source, code=1)
        assert "there already" in err


def test_doctor_says_what_it_sees():
    found = json.loads(jaxrt_command("doctor", "--json")[0])
    assert found
    assert "jax" in jaxrt_command("doctor")[0]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "x", "--model", "no such model"], 1, "no such"),
        (["run", "x", "--model", "{directory}", "--temperature", "-1"], 2, "temperature"),
        (["run", "x", "--model", "{directory}", "--top-k", "many"], 2, "--top-k"),
        (["run", "x", "--model", "{directory}", "--device", "tpu"], 2, "tpu"),
        (["run", "--model", "{directory}"], 2, "prompt"),
        (["run", "x", "--model", "{file}"], 2, "tokenizer"),
        (["fly"], 2, "fly"),
        (["plan", "--rows", "0"], 2, "--rows"),
    ],
)
def test_errors_say_what_to_do_without_a_traceback(
    arguments: Sequence[str], code: int, said: str, directory: Path, file: Path
):
    given = [argument.format(directory=directory, file=file) for argument in arguments]
    out, err = jaxrt_command(*given, code=code)
    assert out == "" and said in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_with_their_exit_code(directory: Path, number: int, code: int):
    command = [
        sys.executable,
        "-m",
        "jaxrt",
        "run",
        "x",
        "--model",
        str(directory),
        "--max-tokens",
        "250",
        "--ignore-eos",
    ]
    command += ["--temperature", "1", "--seed", "3"]
    jaxrt_command(*command[3:-4], "--max-tokens", 2)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)  # the answer has begun
        process.send_signal(number)
        started = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode in (code, 0)  # a tiny model may be done before the signal arrives
    assert time.monotonic() - started < 10 and b"Traceback" not in err


def test_a_closed_pipe_is_no_traceback(directory: Path):
    command = f"{sys.executable} -m jaxrt run x --model '{directory}' --max-tokens 200 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("where", "code"), [("> /dev/full", 1), (">&-", 0), ("PYTHONIOENCODING=ascii:strict", 0), ("-u HOME", 0)]
)
def test_odd_surroundings_are_no_traceback(directory: Path, where: str, code: int):
    """A full disk, a closed stdout, a terminal of few characters, no home."""
    env, after = ("", where) if ">" in where else (f"env {where}", "")
    command = f"{env} '{sys.executable}' -m jaxrt score héllo --model '{directory}' {after}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_importing_jaxrt_costs_no_more_than_jax_and_flax_struct():
    """Counted in modules, since seconds are noise here: nothing heavy comes along."""
    code = "import sys, jaxrt; print(*[m for m in sys.modules])"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {
        "orbax",
        "orbax.checkpoint",
        "transformers",
        "torch",
        "huggingface_hub",
        "matplotlib",
        "IPython",
    }
