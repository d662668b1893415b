"""Tokenizers: rebuilt from GGUF as the models' own tokenizer.json has them, read from a directory, refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrt.artifacts.gguf import open_gguf
from jaxrt.artifacts.tokenizer import Tokenizer
from jaxrt.errors import ArtifactError, RequestError, UnsupportedModel
from tests.files import byte_tokenizer_json

LETTERS = list(json.loads(byte_tokenizer_json())["model"]["vocab"])[:256]  # the byte-level letter of each byte
CONTROL, USER_DEFINED = 3, 4
# Merged pieces, in the order of their ids from 256 on; "xyz" is in the vocabulary but nothing merges into it
MERGES = ["1 2", "12 3", "123 4", "' L", "'L L", "Ċ Ċ", "Ġ Ġ"]
PIECES = ["12", "123", "1234", "'L", "'LL", "ĊĊ", "ĠĠ", "xyz"]
BOS, EOS, TURN, TOOL = 264, 265, 266, 267


def metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer; a change of None leaves the key out."""
    tokens = [*LETTERS, *PIECES, "<bos>", "<eos>", "<turn>", "<tool>"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * BOS + [CONTROL, CONTROL, CONTROL, USER_DEFINED],
        "merges": list(MERGES),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def gguf(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(pre, **changes), "model.gguf")


def directory(path: Path, config: dict[str, Any] | None = None, **files: str) -> dict[str, Path]:
    """A directory with the byte tokenizer; further files by name, a dot written as __."""
    texts = {"tokenizer.json": byte_tokenizer_json()} | {name.replace("__", "."): text for name, text in files.items()}
    if config is not None:
        texts["tokenizer_config.json"] = json.dumps(config)
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")
    return {name: path / name for name in texts}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.piece(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(demo_path).metadata, demo_path)


def test_the_demo_model_reads_text_as_its_authors_tokenizer_does(demo: Tokenizer, golden: dict[str, dict[str, Any]]):
    for name, entry in golden.items():
        tokens = demo.apply_chat_template(entry["messages"]) if "messages" in entry else demo.encode(entry["prompt"])
        assert tokens == entry["tokens"], name
        assert demo.decode(tokens) == entry["rendered"]
        assert demo.decode(entry["greedy"]) == entry["greedy_text"]


def test_the_demo_model_knows_its_special_tokens(demo: Tokenizer):
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_ids) == (49152, 1, (2,))
    assert demo.special_token_ids == frozenset(range(17))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "'", "L", "L"]),
        ("smollm", ["1", "2", "3", "4", "'", "L", "L"]),
        ("llama-bpe", ["123", "4", "'LL"]),
        ("qwen2", ["1", "2", "3", "4", "'LL"]),
    ],
)
def test_digits_and_contractions_are_split_by_the_named_rules(pre: str, expected: list[str]):
    assert pieces(gguf(pre), "1234'LL") == expected


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])])
def test_llama_takes_a_whole_word_before_it_merges(pre: str, expected: list[str]):
    assert pieces(gguf(pre), "xyz") == expected


@pytest.mark.parametrize(("pre", "expected"), [("qwen2", "\u00e9"), ("llama-bpe", "e\u0301"), ("smollm", "e\u0301")])
def test_qwen_composes_combining_marks(pre: str, expected: str):
    tokenizer = gguf(pre)
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧 🚀🇩🇪",
        "東京は日本の首都です。",
        "def f(x):\n\treturn x**2  # no\r\n\r\n",
        "   a  \n \n\t b   ",
        "don't WE'LL 12 345 6,789.01 ٣٤",
        "nul \x00 and \ufeff and \u200b",
        "",
    ],
)
def test_awkward_text_comes_back_unchanged(pre: str, text: str):
    tokenizer = gguf(pre)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_special_tokens_in_text_are_tokens_and_only_control_tokens_are_skipped():
    tokenizer = gguf()
    tokens = tokenizer.encode("a<turn>b<tool>c")
    assert tokens == [ord("a"), TURN, ord("b"), TOOL, ord("c")]
    assert tokenizer.decode(tokens) == "a<turn>b<tool>c"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "ab<tool>c"
    assert tokenizer.special_token_ids == {BOS, EOS, TURN}


def test_a_token_with_a_role_is_special_even_where_the_file_forgot_to_mark_it():
    tokenizer = gguf(token_type=[1] * (TOOL + 1))
    assert tokenizer.encode("a<eos>") == [ord("a"), EOS]
    assert tokenizer.special_token_ids == {BOS, EOS}


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [97]),
        ("llama-bpe", {}, [BOS, 97]),  # the family's own habit
        ("llama-bpe", {"add_bos_token": False}, [97]),
        ("gpt-2", {"add_bos_token": True}, [BOS, 97]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [BOS, 97, EOS]),
        ("gpt-2", {"add_eos_token": True}, [97, EOS]),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": None}, [97]),  # there is none to add
    ],
)
def test_begin_and_end_of_text_are_added_as_the_file_says(pre: str, flags: dict[str, Any], expected: list[int]):
    assert gguf(pre, **flags).encode("a") == expected
    assert gguf(pre, **flags).encode("a", add_special_tokens=False) == [97]


def test_every_token_that_ends_an_answer_is_known():
    assert gguf(eot_token_id=TURN).eos_token_ids == (EOS, TURN)
    assert gguf(eot_token_id=EOS).eos_token_ids == (EOS,)
    assert gguf(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
        ({"token_type": None}, "token_type"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [*LETTERS, 3]}, "tokens"),
        ({"tokens": [*metadata()["tokenizer.ggml.tokens"][:-1], "a"]}, "tokens"),
        ({"token_type": [1] * 100}, "token_type"),
        ({"token_type": [1] * TOOL + [9]}, "token_type"),
        ({"token_type": [1.0] * (TOOL + 1)}, "token_type"),
        ({"merges": ["12"]}, "merges"),
        ({"merges": ["1 "]}, "merges"),
        ({"merges": ["1 nowhere"]}, "merges"),
        ({"eos_token_id": TOOL + 1}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"bos_token_id": True}, "bos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"model": 3}, "model"),
        ({"pre": None}, "pre"),
    ],
)
def test_malformed_metadata_is_refused_naming_file_and_field(changes: dict[str, Any], field: str):
    with pytest.raises(ArtifactError) as caught:
        gguf(**changes)
    assert (caught.value.path, caught.value.field) == ("model.gguf", f"tokenizer.ggml.{field}")


def test_tokenizers_jaxrt_does_not_have_are_refused_naming_what_was_found():
    with pytest.raises(UnsupportedModel, match=r"pre is 'qwen3'.*did you mean 'qwen2'"):
        gguf("qwen3")
    with pytest.raises(UnsupportedModel, match="model is 'llama'"):
        gguf(model="llama")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_what_convert_writes_loads_back_as_the_same_tokenizer(pre: str, tmp_path: Path):
    values = metadata(pre, add_bos_token=True, eot_token_id=TURN)
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    one = Tokenizer.from_gguf(values | templates, "model.gguf")
    files = directory(tmp_path, one.config(), tokenizer__json=one.json())
    two = Tokenizer.from_files(files)
    text = "1234 I'LL e\u0301 xyz <turn><tool>\n\n"
    assert two.encode(text) == one.encode(text)
    assert two.encode(text)[0] == BOS
    assert (two.bos_token_id, two.eos_token_ids, two.config()) == (BOS, (EOS, TURN), one.config())
    assert two.special_token_ids == one.special_token_ids
    assert two.apply_chat_template([], tokenize=False, tools=[{}]) == "tools"
    assert two.chat_template == "plain"


def test_text_that_is_no_unicode_is_refused():
    tokenizer = gguf()
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D800\) at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="bytes"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, TOOL + 1, 1 << 70, 1.0, True, None])
def test_ids_that_are_no_tokens_are_refused(token: Any):
    with pytest.raises(RequestError, match="token "):
        gguf().decode([97, token])
    with pytest.raises(RequestError, match="token "):
        gguf().piece(token)


def test_numpy_ids_and_bytes_that_are_no_character_decode():
    assert gguf().decode(np.array([97, 0xE2, 0x82, 98], np.int32)) == "a\ufffdb"  # type: ignore[arg-type]


def test_a_directory_names_its_special_tokens_as_text_or_as_objects(tmp_path: Path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "[not a token]"}
    tokenizer = Tokenizer.from_files(directory(tmp_path, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    assert tokenizer.encode("a") == [97]  # tokenizer.json adds nothing, and nobody asked for it


def test_special_tokens_map_fills_in_what_the_config_leaves_out(tmp_path: Path):
    files = directory(
        tmp_path, {"eos_token": "<s>"}, special_tokens_map__json='{"bos_token": "<s>", "eos_token": "</s>"}'
    )
    tokenizer = Tokenizer.from_files(files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (256,))


def test_an_explicit_flag_overrules_tokenizer_json(tmp_path: Path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = Tokenizer.from_files(directory(tmp_path, config))
    assert tokenizer.encode("a") == [256, 97]
    again = directory(tmp_path, config | {"add_bos_token": False}, tokenizer__json=tokenizer.json())
    assert Tokenizer.from_files(again).encode("a") == [97]


def test_settings_saved_from_training_do_not_shorten_or_pad_prompts(tmp_path: Path):
    saved = json.loads(byte_tokenizer_json())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    saved["padding"] = padding | {"strategy": {"Fixed": 16}}
    tokenizer = Tokenizer.from_files(directory(tmp_path, tokenizer__json=json.dumps(saved)))
    assert tokenizer.encode("abcde") == [*b"abcde"]


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (None, {"tokenizer__json": "{"}, "not a tokenizer"),
        (None, {"tokenizer__json": '{"model": {"type": "New"}}'}, "not a tokenizer"),
        (None, {"tokenizer_config__json": "[]"}, "expected an object"),
        ({"eos_token": "<nowhere>"}, {}, "eos_token: '<nowhere>' is not in the vocabulary"),
        ({"eos_token": 3}, {}, "eos_token: 3"),
        ({"add_bos_token": "yes"}, {}, "add_bos_token: 'yes'"),
        ({"chat_template": 3}, {}, "chat_template: 3"),
        ({"chat_template": [{"name": "default"}]}, {}, "chat_template: "),
    ],
)
def test_a_malformed_directory_is_refused(config: Any, files: dict[str, str], message: str, tmp_path: Path):
    with pytest.raises(ArtifactError, match=message) as caught:
        Tokenizer.from_files(directory(tmp_path, config, **files))
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_tokenizer_json_says_what_to_do():
    with pytest.raises(ArtifactError, match=r"no tokenizer.json among tokenizer.model; .*save_pretrained"):
        Tokenizer.from_files({"tokenizer.model": Path("tokenizer.model")})


def test_the_chat_template_comes_from_its_own_file_first(tmp_path: Path):
    config = {"chat_template": "from config"}
    assert Tokenizer.from_files(directory(tmp_path, config)).chat_template == "from config"
    files = directory(tmp_path, config, chat_template__json='{"chat_template": "from json"}')
    assert Tokenizer.from_files(files).chat_template == "from json"
    files = directory(tmp_path, config, chat_template__jinja="from jinja")
    assert Tokenizer.from_files(files).chat_template == "from jinja"


def test_a_template_that_writes_the_bos_gives_one_bos():
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    values = metadata("llama-bpe") | {"tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(values, "model.gguf")
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages) == [BOS, 97, EOS]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>a<eos>"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ style }}", style="b") == [98]


def test_requests_the_chat_template_cannot_serve_say_so():
    with pytest.raises(RequestError, match=r"without a chat template; .*as text, or pass chat_template="):
        gguf().apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError, match="continue_final_message"):
        gguf().apply_chat_template([], continue_final_message=True)


def test_a_piece_keeps_its_leading_blank_where_decoding_alone_would_lose_it(tmp_path: Path):
    assert gguf().piece(ord(" ")) == " "
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    saved = json.loads(byte_tokenizer_json()) | {"pre_tokenizer": metaspace, "decoder": metaspace}
    saved["model"] |= {"vocab": {"▁": 0, "a": 1, "b": 2, "▁b": 3}, "merges": [["▁", "b"]]}
    saved["added_tokens"] = []
    tokenizer = Tokenizer.from_files(directory(tmp_path, tokenizer__json=json.dumps(saved)))
    assert tokenizer.decode([3]) == "b"
    assert tokenizer.piece(3) == " b"
