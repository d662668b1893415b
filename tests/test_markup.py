"""HTML that people see in notebooks: escaped whatever the model says, well-formed, and saying what is there."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from jaxrt.markup import bytes_text, generation_html, table_html, weights_html
from jaxrt.requests import FinishReason, Generation, GenerationStats, SamplingParams, TokenLogprobs

HOSTILE = ("<script>alert(1)</script>", "</style>", "\"' onmouseover='x", "</div></span>", "&lt;", "\x00\x1b[31m")
STATS = GenerationStats(
    prompt_tokens=3, new_tokens=6, ttft_s=0.25, prefill_tps=12.0, decode_tps=30.5, compile_s=0.0, compiles=0
)


class Page(HTMLParser):
    """Checks nesting while it reads; keeps the visible text, the tooltips and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.titles: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        for name, value in attrs:
            assert name in ("style", "title", "dir", "open"), f"attribute {name} in <{tag}>"
            if name == "title":
                self.titles.append(value or "")
            if name == "style":
                self.styles.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data


def answer(pieces: tuple[str, ...], logprobs: tuple[float, ...] | None = None, **changes: object) -> Generation:
    entries = None
    if logprobs is not None:
        entries = tuple(
            TokenLogprobs(token=10 + i, logprob=value, rank=1 + i, top={10 + i: value, 99: -5.0})
            for i, value in enumerate(logprobs)
        )
    made = Generation(
        text="".join(pieces),
        tokens=tuple(range(10, 10 + len(pieces))),
        finish_reason=FinishReason.STOP,
        prompt_tokens=(504, 3575, 282),
        params=SamplingParams(temperature=0.0),
        seed=7,
        stats=STATS,
        logprobs=entries,
        pieces=pieces,
    )
    return replace(made, **changes)


@pytest.mark.parametrize("logprobs", [None, (-0.01, -0.5, -1.0, -3.0, -9.0, -math.inf)])
def test_hostile_text_stays_text(logprobs: tuple[float, ...] | None):
    page = Page(generation_html(answer(HOSTILE, logprobs, stop_reason="<b>stop")))
    assert set(page.tags) <= {"div", "span", "details", "summary"}
    for piece in HOSTILE[:-1]:
        assert piece in page.text
    assert "␀␛[31m" in page.text  # control characters become pictures of themselves
    assert "'<b>stop'" in page.text


def test_every_token_is_shaded_by_its_probability_and_says_its_alternatives():
    page = Page(generation_html(answer(("sure", "half", "rare"), (math.log(0.95), math.log(0.6), math.log(0.001)))))
    shades = [style for style in page.styles if "border-radius" in style and "border:" not in style]
    assert [style.split(",")[3].split(")")[0] for style in shades] == ["0.0", "0.14", "0.7"]
    assert page.titles[1].splitlines() == [
        "token 11: logprob -0.5108 (60.00%), rank 2",
        "→ 11: logprob -0.5108 (60.00%)",
        "  99: logprob -5.0000 (0.67%)",
    ]
    assert "≥ 90 %" in page.text  # the legend


def test_without_logprobs_there_are_neither_shades_nor_legend():
    page = Page(generation_html(answer(("a", "b"))))
    assert "ab" in page.text
    assert "≥ 90 %" not in page.text
    assert not page.titles


def test_a_token_without_text_shows_its_id():
    page = Page(generation_html(answer(("end", ""), (-0.1, -0.2))))
    assert "end⟨11⟩" in page.text


def test_the_footer_says_speed_finish_and_seed_and_the_prompt_is_there():
    page = Page(generation_html(answer(("a",), stop_reason=42)))
    for fact in ("30.5 tokens/s", "stop (42)", "seed: 7", "504 3575 282"):
        assert fact in page.text


def test_further_samples_follow_closed():
    first, second = answer(("first",)), answer(("second </details> " + "x" * 200,))
    page = Page(generation_html(replace(first, samples=(first, second))))
    assert page.tags.count("details") == 2  # the prompt, and the second sample
    assert page.text.count("first") == 1 + 1  # the answer, and "first token" of the footer
    assert "x" * 200 in page.text


def test_a_table_escapes_cells_and_puts_numbers_on_the_right():
    page = Page(table_html(("<name>", "n"), [("<script>", 3), ("ok", "4")], 'a "caption"'))
    assert page.tags.count("tr") == 3
    assert page.text == 'a "caption"<name>n<script>3ok4'
    assert [style for style in page.styles if style.startswith("text-align:") and ";" not in style] == [
        "text-align:left", "text-align:right", "text-align:left", "text-align:left",
    ]  # fmt: skip


def layer(number: int, width: int = 8) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [
        (f"layers.{number}.norm", (width,), "float32", 4 * width),
        (f"layers.{number}.qkv", (width, 24), "bfloat16", 48 * width),
    ]


def test_equal_layers_are_shown_once():
    leaves = [("embedding", (100, 8), "float32", 3_200), *(leaf for i in range(30) for leaf in layer(i))]
    page = Page(weights_html("model", {"family": "llama"}, leaves))
    assert "layers.0 … layers.29" in page.text
    assert page.text.count("norm") == 1
    assert "in each of 30:norm 8 float32, 32 B" in page.text
    assert "60 arrays, 6,000 numbers" in page.text  # 30 of (8 + 8 * 24)
    assert "61 arrays, 6,800 numbers, 15.7 kB" in page.text  # 3,200 + 30 * (32 + 384) bytes
    assert "family: llama" in page.text


def test_a_layer_that_differs_or_is_missing_ends_a_run():
    leaves = [leaf for i in (0, 1, 2, 3, 5, 6) for leaf in layer(i, width=16 if i == 2 else 8)]
    text = Page(weights_html("model", {}, leaves)).text
    assert "layers.0 … layers.1" in text
    assert "layers.5 … layers.6" in text
    assert text.count("…") == 2
    assert text.count("norm") == 4  # 0-1, 2, 3, 5-6


def test_names_of_equal_arrays_are_not_merged_and_a_path_may_be_array_and_branch():
    leaves = [("a", (2,), "int8", 2), ("a.scale", (), "float32", 4), ("b", (2,), "int8", 2), ("c", (2,), "int8", 2)]
    text = Page(weights_html("<i>", {"<b>": "</details>"}, leaves)).text
    assert "itself 2 int8, 2 B" in text
    assert "scale scalar float32, 4 B" in text
    assert "b 2 int8" in text and "c 2 int8" in text
    assert "<i>" in text and "<b>: </details>" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (98_444_192, "98.4 MB"),
        (10**9, "1.0 GB"),
        (3 * 10**18, "3000.0 PB"),
    ],
)
def test_bytes_are_said_in_powers_of_a_thousand(count: int, text: str):
    assert bytes_text(count) == text
