"""Pictures: what they show is what was measured, escaped, self-contained, and bounded."""

import re
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxrt import display
from jaxrt.backend import XlaBackend
from jaxrt.display.axes import ticks
from jaxrt.display.colours import NAN, magnitude, signed
from jaxrt.display.lens import lens_of
from jaxrt.display.sessions import Stretch, prefix_tree
from jaxrt.errors import RequestError
from jaxrt.requests import SamplingParams
from jaxrt.runtime import ModelRuntime
from jaxrt.sessions.session import XlaSession
from tests.tiny import CONFIG, shared_model

PROMPT = [1, 2, 3, 4, 5, 6, 7]
WEIGHTS = "model.layers.1.attention.weights"
NASTY = '</svg><script>alert("x")</script>&\x1b[31m\u202e\ud800\0'


@pytest.fixture(scope="module")
def rt() -> ModelRuntime:
    return ModelRuntime(XlaBackend(), XlaSession(shared_model()))


@dataclass
class Handle:
    """A session's two fields that a tree reads."""

    tokens: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def drawn(picture: display.Picture) -> ElementTree.Element:
    """The picture's <svg>, which is well-formed XML."""
    return ElementTree.fromstring(picture.html)[0]


def titles(picture: display.Picture) -> list[str]:
    return [each.text or "" for each in drawn(picture).iter() if each.tag.endswith("title")]


def pictures(rt: ModelRuntime) -> dict[str, display.Picture]:
    answer = rt.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
    seen = rt.inspect(PROMPT, [WEIGHTS])
    return {
        "attention": display.attention(seen, layer=1, tokens=[NASTY, *"bcdefg"]),
        "lens": display.logit_lens(rt, PROMPT, top=2),
        "logprobs": display.token_logprobs(answer),  # type: ignore[arg-type]
        "tree": display.session_tree({NASTY: Handle(((1, 2, 3),), (3,)), "b": Handle(((1, 4),), (2,))}),
        "sweep": display.sweep([0, 1, 2], {NASTY: [1, 2, 3]}, xlabel=NASTY, ylabel=NASTY, title=NASTY),
    }


@pytest.mark.parametrize("name", ["attention", "lens", "logprobs", "tree", "sweep"])
def test_every_picture_is_self_contained_and_saved_in_three_forms(rt: ModelRuntime, name: str, tmp_path):
    pytest.importorskip("matplotlib")
    picture = pictures(rt)[name]
    assert picture._repr_html_() == picture.html and picture.title in repr(picture)
    assert "<script" not in picture.html and "\x1b" not in picture.html and "\u202e" not in picture.html
    assert not re.search(r"(href|src)=|url\(|@import|https?:(?!//www\.w3\.org/2000/svg)", picture.html)
    page = picture.save(tmp_path / "a.html").read_text("utf-8")
    assert picture.html in page and "default-src 'none'" in page
    root = ElementTree.parse(picture.save(tmp_path / "a.svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.save(tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match=r"\.svg"):
        picture.save(tmp_path / "a.pdf")


def test_attention_shows_the_observed_weights(rt: ModelRuntime):
    seen = rt.inspect(PROMPT, [WEIGHTS])
    weights = seen[WEIGHTS].data[0]  # type: ignore[union-attr]
    shown = [title for title in titles(display.attention(seen, layer=1, head=1)) if "→" in title]
    wanted = [f"{i} → {j}: {weights[1, i, j]:.4g}" for i in range(7) for j in range(i + 1)]
    assert shown == wanted
    everything = titles(display.attention(seen, layer=1, tokens=list("abcdefg")))
    assert sum("6 g → 0 a" in title for title in everything) == len(weights)


def test_long_attention_is_drawn_in_blocks():
    """600 tokens in blocks of 3: within 256 a side, within 40,000 cells, and the largest weight of a block shown."""
    weights = np.zeros((1, 1, 600, 600), np.float32)
    weights[0, 0, 599, 301] = 0.75
    picture = display.attention({"model.layers.0.attention.weights": weights}, layer=0)
    shown = titles(picture)
    assert "597-599 → 300-302: 0.75" in shown and len(shown) <= 40_000
    assert len(picture.html) < 4_000_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": 0}, "no observation at 'model.layers.0.attention.weights'"),
        ({"head": 99}, "head=99"),
        ({"row": 1}, "row=1"),
        ({"layer": "one"}, "layer='one'"),
        ({"tokens": ["a"]}, "1 tokens"),
        ({"tokens": 5}, "tokens 5"),
        ({"scale": "log"}, "scale='log'"),
    ],
)
def test_attention_of_what_is_not_there(rt: ModelRuntime, change: dict, words: str):
    with pytest.raises(RequestError, match=re.escape(words)):
        display.attention(rt.inspect(PROMPT, [WEIGHTS]), **{"layer": 1, **change})


def test_the_lens_at_the_last_layer_is_the_model_itself(rt: ModelRuntime):
    lens = display.read_lens(rt, PROMPT, top=3)
    logits = rt.inspect(PROMPT, ["model.logits"])["model.logits"].data[0].astype(np.float64)  # type: ignore[union-attr]
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    best = np.argsort(-chances, axis=-1)[:, :3]
    assert lens.layers == tuple(range(len(CONFIG.layers))) and lens.prompt == tuple(PROMPT)
    np.testing.assert_array_equal(lens.tokens[-1], best)
    np.testing.assert_allclose(lens.probabilities[-1], np.take_along_axis(chances, best, -1), rtol=1e-4)
    picture = display.draw_lens(lens)
    assert f"{lens.probabilities[-1, -1, 0]:7.2%}  ⟨{best[-1, 0]}⟩" in "\n".join(titles(picture))


def test_the_lens_reads_in_blocks(rt: ModelRuntime):
    """70 positions are three blocks, the last one padded: each position as if alone."""
    model = rt.session.model  # type: ignore[attr-defined]
    stream = np.random.default_rng(0).standard_normal((70, CONFIG.width)).astype(np.float32)
    whole = lens_of(model, [1] * 70, {0: stream}, 2)
    last = lens_of(model, [1], {0: stream[69:]}, 2)
    np.testing.assert_array_equal(whole.tokens[0, 69], last.tokens[0, 0])
    np.testing.assert_allclose(whole.probabilities[0, 69], last.probabilities[0, 0], rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"layers": [99]}, {"layers": []}, {"layers": [0, 0]}, {"layers": "all"}, {"top": 0}, {"top": 65}]
)
def test_a_lens_of_what_is_not_there(rt: ModelRuntime, change: dict):
    with pytest.raises(RequestError):
        display.logit_lens(rt, PROMPT, **change)


def test_logprobs_show_what_was_measured(rt: ModelRuntime):
    answer = rt.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
    total = sum(entry.logprob for entry in answer.logprobs)  # type: ignore[union-attr]
    picture = display.token_logprobs(answer)  # type: ignore[arg-type]
    assert f"3 tokens, {total:.6g}".replace("-", "−") in picture.facts
    score = rt.score([PROMPT])[0]
    total = sum(value for value in score.logprobs if value is not None)
    assert f"{total:.6g}".replace("-", "−") in display.token_logprobs(score).facts
    with pytest.raises(RequestError, match="log"):
        display.token_logprobs(rt.generate(PROMPT, SamplingParams(max_tokens=1)))  # type: ignore[arg-type]


def test_a_tree_has_each_stretch_once():
    tree = prefix_tree({"a": [1, 2, 3], "b": [1, 2], "c": [1, 2, 4, 5], "d": [1, 2, 3]})
    assert tree == Stretch((1, 2), ("b",), (Stretch((3,), ("a", "d")), Stretch((4, 5), ("c",))))
    assert prefix_tree({"a": [1], "b": [2]}) == Stretch((), (), (Stretch((1,), ("a",)), Stretch((2,), ("b",))))
    picture = display.session_tree([Handle(((1, 2, 3), (1, 2)), (3, 1))])
    assert "2 rows: 5 tokens, 3 without repetition" in picture.facts
    with pytest.raises(RequestError, match="a int"):
        display.session_tree([1])


def test_a_sweep_leaves_gaps_where_there_is_no_number():
    """Five points with a NaN in the middle: two lines."""
    picture = display.sweep([0, 1, 2, 3, 4], {"y": [1, 2, float("nan"), 4, 5]}, xlabel="x", ylabel="y")
    coloured = [line for line in drawn(picture).iter() if line.get("stroke") == "#0072b2"]
    assert sum(len((line.get("points") or "").split()) == 2 for line in coloured) >= 2
    assert not any(len((line.get("points") or "").split()) > 2 for line in coloured)
    for values, series in (([0], {}), ([0, 1], {"y": [1]}), ([float("inf")], {"y": [1]}), ([0], {"y": ["a"]})):
        with pytest.raises(RequestError):
            display.sweep(values, series, xlabel="", ylabel="")  # type: ignore[arg-type]


def test_colours_and_ticks():
    assert (magnitude(0), magnitude(1), magnitude(float("nan"))) == ("#440154", "#fde725", NAN)
    assert (signed(-1), signed(0), signed(5)) == ("#053061", "#f7f7f7", "#67001f")
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    np.testing.assert_allclose(ticks(0.11, 0.39), [0.2, 0.3])  # steps of 0.05 would be more than asked for
