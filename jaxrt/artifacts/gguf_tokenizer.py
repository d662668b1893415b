"""The tokenizer that a GGUF file's metadata describes, rebuilt with the `tokenizers` library's components."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxrt.artifacts.files import printable
from jaxrt.errors import ArtifactError, UnsupportedModel, nearest

_GGUF = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_ROLES = (
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("eot_token", "eot_token_id"),
    ("eom_token", "eom_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
)
END_ROLES = ("eos_token", "eot_token", "eom_token")  # end of text, of a turn, of a message: each ends an answer
_KINDS = range(1, 7)  # normal, unknown, control, user-defined, unused, byte
_SPECIAL_KINDS = (2, 3)
_USER_DEFINED = 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _ByteLevelRules:
    """What a byte-level BPE tokenizer does before it merges."""

    split: str | None = None  # a regular expression; None: GPT-2's, which the library has built in
    single_digits: bool = False  # every digit is a piece of its own
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a piece that is in the vocabulary is taken before any merging
    adds_bos: bool = False  # where the file does not say


_BYTE_LEVEL = {
    "gpt-2": _ByteLevelRules(),
    "smollm": _ByteLevelRules(single_digits=True),
    "llama-bpe": _ByteLevelRules(
        "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _PUNCTUATION_AND_BLANKS)), whole_words=True, adds_bos=True
    ),
    "qwen2": _ByteLevelRules("|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _PUNCTUATION_AND_BLANKS)), compose=True),
}


@dataclass(frozen=True)
class _Vocabulary:
    texts: Sequence[str]  # by token id
    kinds: Sequence[int]  # by token id: _KINDS
    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]


class GgufTokenizer(NamedTuple):
    """What a GGUF file says of its tokenizer."""

    backend: tokenizers.Tokenizer  # adds no BOS or EOS yet
    special: dict[str, str]  # text of the special tokens by role: "bos_token", ...
    templates: dict[str, str]  # chat templates by name
    adds_bos: bool
    adds_eos: bool


def gguf_tokenizer(metadata: Mapping[str, Any], path: object) -> GgufTokenizer:
    """The tokenizer that `metadata` describes; `path` is for errors.

    Raises: ArtifactError for malformed metadata, UnsupportedModel for a kind of tokenizer jaxrt does not have.
    """
    rules = _byte_level_rules(metadata, path)
    vocabulary = _vocabulary(metadata, path)
    special = {
        role: vocabulary.texts[token]
        for role, key in _ROLES
        if (token := _id(metadata, key, len(vocabulary.texts), path)) is not None
    }
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": _text(metadata, key, path)
        for key in metadata
        if key == _TEMPLATE or key.startswith(_TEMPLATE + ".")
    }
    return GgufTokenizer(
        _byte_level_bpe(rules, vocabulary, special, path),
        special,
        templates,
        _flag(metadata, "add_bos_token", path, rules.adds_bos),
        _flag(metadata, "add_eos_token", path, False),
    )


def _byte_level_rules(metadata: Mapping[str, Any], path: object) -> _ByteLevelRules:
    model = _text(metadata, _GGUF + "model", path)
    if model != "gpt2":
        raise UnsupportedModel(
            f"{path}: {_GGUF}model is {printable(model)!r}",
            expected="'gpt2' (byte-level BPE)",
            fix="load the model from a directory with a tokenizer.json",
        )
    name = _text(metadata, _GGUF + "pre", path)
    rules = _BYTE_LEVEL.get(name)
    if rules is None:
        raise UnsupportedModel(
            f"{path}: {_GGUF}pre is {printable(name)!r}",
            expected="rules for splitting text that jaxrt knows",
            fix=nearest(name, _BYTE_LEVEL),
        )
    return rules


def _vocabulary(metadata: Mapping[str, Any], path: object) -> _Vocabulary:
    texts = _list(metadata, _GGUF + "tokens", str, path)
    kinds = _list(metadata, _GGUF + "token_type", int, path)
    if len(kinds) != len(texts):
        raise ArtifactError(
            f"{len(kinds)} entries", path=path, field=_GGUF + "token_type", expected=f"{len(texts)}, one for each token"
        )
    if wrong := set(kinds).difference(_KINDS):
        raise ArtifactError(
            f"kind {min(wrong)}", path=path, field=_GGUF + "token_type", expected=f"{_KINDS[0]} to {_KINDS[-1]}"
        )
    ids = {text: token for token, text in enumerate(texts)}
    if len(ids) < len(texts):
        token = next(token for token, text in enumerate(texts) if ids[text] != token)
        raise ArtifactError(
            f"tokens {token} and {ids[texts[token]]} are both {printable(texts[token])!r}",
            path=path,
            field=_GGUF + "tokens",
            expected="different texts",
        )
    merges = []
    for text in _list(metadata, _GGUF + "merges", str, path):
        left, blank, right = text.partition(" ")
        if not (left and blank and right):
            raise ArtifactError(
                printable(repr(text)), path=path, field=_GGUF + "merges", expected="two tokens and a blank between them"
            )
        merges.append((left, right))
    return _Vocabulary(texts, kinds, ids, merges)


def _byte_level_bpe(
    rules: _ByteLevelRules, vocabulary: _Vocabulary, special: Mapping[str, str], path: object
) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(dict(vocabulary.ids), list(vocabulary.merges), ignore_merges=rules.whole_words)
    except Exception as error:  # the library raises plain Exception: a merge whose parts or whole are no tokens
        raise ArtifactError(
            printable(str(error)), path=path, field=_GGUF + "merges", expected="pairs of tokens"
        ) from error
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None)]
    if rules.split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    if rules.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    # a token with a role is special even where the file forgot to mark it
    roles = {special[name] for name in ("bos_token", *END_ROLES) if name in special}
    added = [
        AddedToken(text, normalized=False, special=kind in _SPECIAL_KINDS or text in roles)
        for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True)
        if kind in (*_SPECIAL_KINDS, _USER_DEFINED) or text in roles
    ]
    backend.add_tokens(added)
    return backend


def _value(metadata: Mapping[str, Any], key: str, path: object) -> Any:
    if key not in metadata:
        raise ArtifactError("is missing", path=path, field=key, fix="convert the model to GGUF again")
    return metadata[key]


def _text(metadata: Mapping[str, Any], key: str, path: object) -> str:
    value = _value(metadata, key, path)
    if not isinstance(value, str):
        raise ArtifactError(f"a {type(value).__name__}", path=path, field=key, expected="text")
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type, path: object) -> list[Any]:
    values = _value(metadata, key, path)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ArtifactError("another kind of value", path=path, field=key, expected=f"an array of {kind.__name__}")
    return values


def _id(metadata: Mapping[str, Any], key: str, count: int, path: object) -> int | None:
    token = metadata.get(_GGUF + key)
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < count:
        raise ArtifactError(
            printable(repr(token)), path=path, field=_GGUF + key, expected=f"a token id from 0 to {count - 1}"
        )
    return token


def _flag(metadata: Mapping[str, Any], key: str, path: object, default: bool) -> bool:
    flag = metadata.get(_GGUF + key, default)
    if not isinstance(flag, bool):
        raise ArtifactError(printable(repr(flag)), path=path, field=_GGUF + key, expected="true or false")
    return flag
