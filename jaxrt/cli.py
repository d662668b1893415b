"""The `jaxrt` command. Answers go to stdout; progress, statistics and errors to stderr. Heavy imports wait until a
command runs."""

import io
import json
import logging
import os
import signal
import sys
from typing import Any

import click

from jaxrt import __version__
from jaxrt.errors import JaxrtError
from jaxrt.terminal import Progress, show_table

DEMO = "smollm2-135m"

model_option = click.option(
    "--model", "-m", default=DEMO, show_default=True, help="Demo name, Hugging Face id or path."
)
device_option = click.option("--device", default=None, help='"cpu", "gpu", "gpu:1"; JAX\'s default if left out.')
dtype_option = click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto")
kv_dtype_option = click.option(
    "--kv-dtype", type=click.Choice(["auto", "float32", "bfloat16", "int8"]), default="auto", help="Of keys and values."
)
quantize_option = click.option(
    "--quantize",
    type=click.Choice(["auto", "none", "keep", "int8", "int4", "fp8"]),
    default="auto",
    help="How weights are held: packed as the file has them where that pays (auto), or packed at load.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="jaxrt")
@click.option("--debug", is_flag=True, help="Show tracebacks and debug messages.")
@click.pass_context
def commands(context: click.Context, debug: bool) -> None:
    """Run language models as pure JAX functions."""
    context.obj = debug
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s")


@commands.command()
@click.argument("prompt", required=False)
@model_option
@click.option("--chat/--raw", default=False, help="Through the chat template, or as raw text (default).")
@click.option("--system", default=None, help="A system message, with --chat.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0)
@click.option("--top-p", type=float, default=1.0)
@click.option("--min-p", type=float, default=0.0)
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--seed", type=int, default=None)
@click.option("--stop", multiple=True, help="End at this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True)
@click.option("--stats", is_flag=True, help="Print times and speeds to stderr.")
@json_option
@device_option
@dtype_option
@kv_dtype_option
@quantize_option
def run(
    prompt: str | None, model: str, chat: bool, system: str | None, stats: bool, as_json: bool, **options: Any
) -> None:
    """Continue PROMPT, or answer it with --chat; without a PROMPT --chat is a conversation, else stdin is read."""
    from jaxrt.requests import SamplingParams

    params = SamplingParams.from_dict({name: options[name] for name in _SAMPLING})
    if system and not chat:
        raise click.UsageError("--system needs --chat")
    if prompt is None and not (chat and sys.stdin.isatty()):
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, pipe one in, or start a conversation with --chat")
        prompt = sys.stdin.read()
    runtime = _load(model, options, prepare=True)
    with runtime:
        if prompt is None:
            _converse(runtime, params, system, stats)
            return
        asked: dict[str, Any] = {"prompt": prompt}
        if chat:
            asked = {"messages": [*_system(system), {"role": "user", "content": prompt}]}
        if as_json:
            answer = runtime.generate(params=params, **asked)
            click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
        else:
            answer = _print_stream(runtime.stream(params=params, **asked))
        if stats:
            show_table("", answer.stats.lines())


_SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _print_stream(events: Any) -> Any:
    answer = None
    for event in events:
        click.echo(event.text, nl=False)
        answer = event.generation or answer
    click.echo()
    return answer


def _converse(runtime: Any, params: Any, system: str | None, stats: bool) -> None:
    """A conversation on a terminal: Ctrl-C ends an answer, Ctrl-D or an empty line the conversation."""
    messages = _system(system)
    runtime.warmup(wait=False)  # while the first question is being typed
    while True:
        try:
            said = click.prompt(click.style("you", bold=True), default="", show_default=False, err=True)
        except click.Abort:
            said = ""
        if not said.strip():
            return
        messages.append({"role": "user", "content": said})
        parts: list[str] = []
        try:
            for event in runtime.stream(messages=messages, params=params, session=runtime.session):
                parts.append(event.text)
                click.echo(event.text, nl=False)
                if stats and event.generation is not None:
                    show_table("", event.generation.stats.lines())
        except KeyboardInterrupt:
            click.echo(" [interrupted]", err=True)
        click.echo()
        messages.append({"role": "assistant", "content": "".join(parts)})


def _load(model: str, options: dict[str, Any], prepare: bool = False) -> Any:
    import jaxrt

    with Progress() as progress:
        path = jaxrt.resolve(model, progress=progress.fetching)
        return jaxrt.load(
            path,
            device=options["device"],
            dtype=options["dtype"],
            kv_dtype=options["kv_dtype"],
            quantize=options["quantize"],
            prepare=prepare,
            progress=progress.bytes(f"loading {model}"),
        )


@commands.command()
@model_option
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="Rows of one batch.")
@click.option("--capacity", type=click.IntRange(1), default=2_048, show_default=True, help="Tokens a row.")
@click.option("--platform", type=click.Choice(["cpu", "gpu"]), default=None, help="Plan for another kind of device.")
@dtype_option
@kv_dtype_option
@quantize_option
@json_option
def plan(model: str, as_json: bool, **options: Any) -> None:
    """Bytes, buckets and compiles of MODEL, from its headers alone: nothing is allocated."""
    import jaxrt
    from jaxrt.planning import plan_artifact

    with Progress() as progress:
        path = jaxrt.resolve(model, progress=progress.fetching)
    found = plan_artifact(path, **options)
    if as_json:
        click.echo(json.dumps({"model": model, **found.as_json()}))
    else:
        show_table(f"plan of {model}", found.lines(), to_stdout=True)


@commands.command()
@json_option
def doctor(as_json: bool) -> None:
    """Look at this machine: versions, devices, memory, caches; exit 1 if something is broken."""
    from jaxrt.doctor import as_json as findings_json
    from jaxrt.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps(findings_json(findings)))
    else:
        marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
        rows = [(f.name, f.value + (f"\n{f.advice}" if f.advice else ""), f.status) for f in findings]
        show_table("doctor", rows, to_stdout=True, marks=marks)
    if any(finding.status == "fail" for finding in findings):
        raise SystemExit(1)


@commands.command()
@model_option
@click.option("-p", "prompts", multiple=True, type=click.IntRange(0), help="Prompt tokens to prefill. [128]")
@click.option("-n", "news", multiple=True, type=click.IntRange(0), help="Tokens to decode. [32]")
@click.option("-d", "depths", multiple=True, type=click.IntRange(0), help="Tokens in the cache before. [0]")
@click.option("-b", "rows", multiple=True, type=click.IntRange(1), help="Rows of one batch. [1]")
@click.option("-r", "repetitions", type=click.IntRange(1), default=5, show_default=True)
@click.option("-o", "output", type=click.Choice(["md", "csv", "json"]), default="md", show_default=True)
@click.option("--explain", is_flag=True, help="Also say where the time of one decode step goes.")
@json_option
@device_option
@dtype_option
@kv_dtype_option
@quantize_option
def bench(model: str, output: str, as_json: bool, **options: Any) -> None:
    """Measure prefill and decode of MODEL like llama-bench, beside this device's bandwidth and matmul peak."""
    from jaxrt.bench import measure, render

    if options["explain"] and output == "csv" and not as_json:
        raise click.UsageError("--explain prints a table of its own: use -o md or -o json")
    runtime = _load(model, options)
    with runtime, Progress() as progress:
        report = measure(
            runtime,
            model=model,
            prompts=options["prompts"] or (128,),
            news=options["news"] or (32,),
            depths=options["depths"] or (0,),
            rows=options["rows"] or (1,),
            repetitions=options["repetitions"],
            explain=options["explain"],
            progress=progress.steps("measuring"),
        )
    click.echo(render(report, "json" if as_json else output))


@commands.command()
@click.argument("output", type=click.Path())
@model_option
@dtype_option
@json_option
def convert(output: str, model: str, dtype: str, as_json: bool) -> None:
    """Write MODEL to OUTPUT as an Orbax directory, with a hash of every array that loading checks."""
    import jaxrt
    from jaxrt.artifacts.convert import convert_artifact

    with Progress() as progress:
        path = jaxrt.resolve(model, progress=progress.fetching)
        written = convert_artifact(path, output, dtype=dtype, progress=progress.bytes(f"converting {model}"))
    facts = {"output": output, "arrays": written.arrays, "bytes": written.nbytes}
    click.echo(json.dumps(facts) if as_json else f"{output}: {written.arrays} arrays, {written.nbytes:,} bytes")


@commands.command()
@click.argument("texts", nargs=-1)
@model_option
@json_option
@device_option
@dtype_option
@kv_dtype_option
@quantize_option
def score(texts: tuple[str, ...], model: str, as_json: bool, **options: Any) -> None:
    """How likely MODEL finds each of TEXTS (or the text on stdin), in nat a token."""
    asked = list(texts) or [sys.stdin.read()]
    with _load(model, options) as runtime:
        scores = runtime.score(asked)
        pieces = [[runtime.tokenizer.piece(token) for token in scored.tokens] for scored in scores]
    if as_json:
        click.echo(json.dumps([scored.as_json() for scored in scores], ensure_ascii=False))
        return
    for scored, shown in zip(scores, pieces, strict=True):
        rows = [
            (repr(piece), "" if value is None else f"{value:.4f}", "greedy" if likeliest else "")
            for piece, value, likeliest in zip(shown, scored.logprobs, scored.greedy, strict=True)
        ]
        show_table(f"{scored.total:.4f} nat, perplexity {scored.perplexity:.3f}", rows, to_stdout=True)


def main() -> None:
    """Entry point: exit codes 0, 1 for a failure, 2 for wrong usage, 130 and 143 for SIGINT and SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot write a character shows another
            stream.reconfigure(errors="replace")
    debug = "--debug" in sys.argv[1:]
    code: int | None = None
    try:
        commands.main(args=_debug_first(sys.argv[1:]), prog_name="jaxrt", standalone_mode=False)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show(file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        code = 130
    except OSError as error:  # a reader that has gone is no news; a full disk is
        if debug:
            raise
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            click.echo(f"jaxrt: {error}", err=True)
        code = 1
    except JaxrtError as error:
        if debug:
            raise
        click.echo(f"jaxrt: {error}", err=True)
        code = 2 if isinstance(error, _usage_errors()) else 1
    if code:
        sys.exit(code)


def _usage_errors() -> type[JaxrtError]:
    from jaxrt.errors import RequestError

    return RequestError


def _debug_first(arguments: list[str]) -> list[str]:
    """--debug may stand anywhere on the line."""
    rest = [argument for argument in arguments if argument != "--debug"]
    return ["--debug", *rest] if len(rest) < len(arguments) else rest


def _terminate(_signal: int, _frame: Any) -> None:
    sys.exit(143)
