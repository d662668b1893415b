"""Streamed text: what is handed out piece by piece is what decoding everything at once gives, cut at stop strings."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.text import TextStream
from tests.files import byte_tokenizer_json

# Bytes that make characters of one to four bytes, whole, broken and out of place
AWKWARD = [*b"ab \n", *"é€🚀\ufffd".encode(), 0x80, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xFF]
SPECIAL, PADDING = 257, 300  # a special token, an id beyond the tokenizer's vocabulary
TOKENS = st.lists(st.sampled_from([*AWKWARD, *range(258, 266), SPECIAL]) | st.integers(0, 265), max_size=90)


def byte_tokenizer(path: Path) -> Tokenizer:
    """Byte b is token b, 256 and 257 are special, 258 to 265 are pieces of several bytes that end within characters."""
    saved = json.loads(byte_tokenizer_json())
    vocabulary = saved["model"]["vocab"]
    letter = {number: text for text, number in vocabulary.items()}
    parts = (
        b" hello",
        "€".encode(),
        b"\xe2\x82",
        b"\x82\xac x",
        b"a\xf0\x9f",
        b"\x98\x80b",
        b"\xef\xbf",
        b"stop",
    )
    for number, part in enumerate(parts, 258):
        vocabulary["".join(letter[byte] for byte in part)] = number
    return tokenizer_of(path, saved)


def tokenizer_of(path: Path, saved: dict) -> Tokenizer:
    (path / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    return Tokenizer.from_files({"tokenizer.json": path / "tokenizer.json"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A decoder in the manner of SentencePiece: blanks belong to words, the first one is dropped, bytes are tokens."""
    saved = json.loads(byte_tokenizer_json()) | {"added_tokens": [], "pre_tokenizer": None}
    texts = ["▁", "▁a", "▁b", "c", "<0xE2>", "<0x82>", "<0xAC>", "<s>"]
    saved["model"] |= {"vocab": {text: number for number, text in enumerate(texts)}, "merges": []}
    saved["added_tokens"] = [
        {"id": 7, "content": "<s>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    saved["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return tokenizer_of(tmp_path_factory.mktemp("words"), saved)


def stream(
    tokenizer: Tokenizer,
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
    skip_special_tokens: bool = False,
    prompt_tail: tuple[int, ...] = (),
) -> TextStream:
    return TextStream(
        tokenizer,
        stop=stop,
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
        prompt_tail=prompt_tail,
    )


def deltas(text: TextStream, tokens: list[int]) -> list[str]:
    """What each token adds, and the rest."""
    pieces = [*(text.push(token) for token in tokens), text.finish()]
    assert "".join(pieces) == text.text
    for piece in pieces:
        piece.encode()  # raises for half a character
    return pieces


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The reference: search the whole text for the stop string that ends first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@settings(deadline=None, max_examples=300)
@given(tokens=TOKENS, skip=st.booleans())
def test_the_pieces_together_are_what_decoding_at_once_gives(tokenizer: Tokenizer, tokens: list[int], skip: bool):
    pieces = deltas(stream(tokenizer, skip_special_tokens=skip), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(tokens=TOKENS, include=st.booleans(), skip=st.booleans(), data=st.data())
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(
    tokenizer: Tokenizer, tokens: list[int], include: bool, skip: bool, data: st.DataObject
):
    whole = tokenizer.decode(tokens, skip_special_tokens=skip)
    places = data.draw(st.lists(st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 5)), max_size=4))
    stops = tuple({whole[start : start + length] for start, length in places} - {""}) + ("aab", "ab")
    text = stream(tokenizer, stops, include, skip)
    pieces = deltas(text, tokens)
    assert ("".join(pieces), text.stopped) == cut(whole, stops, include)


@settings(deadline=None, max_examples=100)
@given(before=st.text("ab é🚀", max_size=12), after=st.text("ab é🚀", max_size=12), split=st.integers(0, 3))
def test_text_goes_on_from_the_prompt(tokenizer: Tokenizer, before: str, after: str, split: int):
    tokens = tokenizer.encode(before + "🚀" + after)
    at = len(before.encode()) + split  # a prompt that ends within the rocket, of which it then shows nothing
    text = stream(tokenizer, prompt_tail=tuple(tokens[:at]))
    assert "".join(deltas(text, tokens[at:])) == "🚀" + after


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(st.sampled_from([[0], [1], [2], [3], [4, 5, 6]]), max_size=40))
def test_words_and_bytes_together_are_what_decoding_at_once_gives(words: Tokenizer, pieces: list[list[int]]):
    tokens = [token for piece in pieces for token in piece]
    assert "".join(deltas(stream(words), tokens)) == words.decode(tokens)


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer):
    assert deltas(stream(tokenizer), [*"a🚀b".encode()]) == ["a", "", "", "", "🚀", "b", ""]
    assert deltas(stream(tokenizer), [*"a🚀".encode()[:3]]) == ["a", "", "", "\ufffd"]


def test_only_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer):
    text = stream(tokenizer, ("stop",))
    assert deltas(text, [*b"xsty"]) == ["x", "", "", "sty", ""]
    assert text.stopped is None
    text = stream(tokenizer, ("stop",))
    assert deltas(text, [*b"ssto"]) == ["", "s", "", "", "sto"]
    text = stream(tokenizer, ("stop",))
    assert deltas(text, [*b"astopb"]) == ["a", "", "", "", "", "", ""]
    assert (text.text, text.stopped) == ("a", "stop")
    text = stream(tokenizer, ("stop",), include_stop=True)
    assert deltas(text, [*b"astopb"]) == ["a", "", "", "", "stop", "", ""]


@pytest.mark.parametrize(
    ("stops", "text", "stopped"),
    [
        (("abcd", "c"), "xab", "c"),  # the one that ends first, though another began earlier
        (("abc", "bc"), "x", "abc"),  # of two that end together, the longer one
        (("d", "zz"), "xabc", "d"),
        (("aa",), "xabcde", None),
    ],
)
def test_of_several_stop_strings_the_first_to_end_wins(
    tokenizer: Tokenizer, stops: tuple[str, ...], text: str, stopped: str | None
):
    result = stream(tokenizer, stops)
    deltas(result, [*b"xabcde"])
    assert (result.text, result.stopped) == (text, stopped)


def test_a_stop_string_within_one_token_cuts_the_token(tokenizer: Tokenizer):
    text = stream(tokenizer, ("el",))
    assert deltas(text, [258, ord("x")]) == [" h", "", ""]


def test_no_stop_string_ends_the_text_before_it_is_looked_for(tokenizer: Tokenizer):
    text = stream(tokenizer, ("ab",))
    text.armed = False
    assert [text.push(token) for token in b"aba"] == ["a", "b", "a"]
    text.armed = True
    assert [text.push(token) for token in b"bab"] == ["b", "", ""]  # the earlier "a" begins none
    assert (text.text, text.stopped) == ("abab", "ab")


def test_special_tokens_and_padding_of_the_vocabulary_have_no_text(tokenizer: Tokenizer):
    tokens = [ord("a"), SPECIAL, PADDING, ord("b")]
    assert deltas(stream(tokenizer, skip_special_tokens=True), tokens) == ["a", "", "", "b", ""]
    assert deltas(stream(tokenizer), tokens) == ["a", "</s>", "", "b", ""]


def test_blanks_between_words_survive_whatever_comes_between(words: Tokenizer):
    a, b, c, special = 1, 2, 3, 7
    assert deltas(stream(words), [a, b, c, a]) == ["a", " b", "c", " a", ""]
    assert deltas(stream(words, skip_special_tokens=True), [a, special, b]) == ["a", "", " b", ""]
    assert deltas(stream(words, prompt_tail=(a, b)), [a, b]) == [" a", " b", ""]
    assert "".join(deltas(stream(words), [a, b, c] * 40)) == words.decode([a, b, c] * 40)


def test_bytes_of_a_character_join_whatever_decoder_it_is(words: Tokenizer):
    assert deltas(stream(words), [1, 4, 5, 6, 3]) == ["a", "", "", "€", "c", ""]
    assert deltas(stream(words), [1, 4, 5, 3]) == ["a", "", "", "\ufffd\ufffdc", ""]
    assert "".join(deltas(stream(words), [1, *[4, 5, 6] * 50, 2])) == "a" + "€" * 50 + " b"


class CountingTokenizer(Tokenizer):
    """The same tokenizer; counts the tokens it decodes."""

    decoded = 0

    def decode(self, tokens, skip_special_tokens=False):
        self.decoded += len(tokens)
        return super().decode(tokens, skip_special_tokens)


@pytest.mark.parametrize("tokens", [[258], [0x80], [*"🚀".encode()], [0xE2, 0x82], [0xF0]], ids=str)
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokens: list[int], tmp_path: Path):
    byte_tokenizer(tmp_path)
    counting = CountingTokenizer.from_files({"tokenizer.json": tmp_path / "tokenizer.json"})
    assert isinstance(counting, CountingTokenizer)
    deltas(stream(counting, ("zz",)), tokens * (2000 // len(tokens)))
    assert counting.decoded < 2000 * 40
