"""Text to tokens and back, over the `tokenizers` library; from a `tokenizer.json` or from a GGUF file's metadata."""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxrt.artifacts import chat
from jaxrt.artifacts.files import printable, read_json_object, regular_size, unreadable
from jaxrt.errors import ArtifactError, RequestError, UnsupportedModel, nearest

MAX_FILE_BYTES = 256 << 20
_END_NAMES = ("eos_token", "eot_token", "eom_token")  # end of text, of a turn, of a message: each ends an answer
_SPECIAL_NAMES = ("bos_token", *_END_NAMES, "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Arguments of transformers' method of the same name that are no template variables: refused rather than ignored.
_FOREIGN_ARGUMENTS = ("continue_final_message", "padding", "truncation", "return_tensors", "return_dict")


class Tokenizer:
    """A vocabulary with its rules, its special tokens by name, and its chat templates.

    special: text of the special tokens by role ("bos_token", "eos_token", ...). templates: chat templates by name;
    "default", and "tool_use" where a model has another one for requests with tools.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str],
        templates: Mapping[str, str],
        path: object = "",
    ) -> None:
        backend.no_truncation()  # a saved training set-up must not shorten or pad prompts
        backend.no_padding()
        self._backend, self._special, self._templates, self._path = backend, dict(special), dict(templates), path
        roles = [name for name in ("bos_token", *_END_NAMES) if name in special]
        self._ids = {name: self._id_of(name, special[name]) for name in roles}

    @classmethod
    def from_files(cls, files: Mapping[str, Path]) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory.

        files: paths by name: `tokenizer.json`; where they exist also `tokenizer_config.json`, `special_tokens_map.json`,
        `chat_template.jinja` or `chat_template.json`. Raises: ArtifactError.
        """
        if "tokenizer.json" not in files:
            raise ArtifactError(
                f"no tokenizer.json among {', '.join(sorted(files)) or 'no files'}",
                fix="save the tokenizer with transformers' save_pretrained, which writes one",
            )
        path = files["tokenizer.json"]
        text = _read_text(path)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(
                f"not a tokenizer: {printable(str(error))}", path=path, fix="save it again with a current `tokenizers`"
            ) from error
        config_path, map_path = files.get("tokenizer_config.json"), files.get("special_tokens_map.json")
        config, special = {}, {}
        if map_path is not None:
            special |= _special_texts(read_json_object(map_path, MAX_FILE_BYTES), map_path)
        if config_path is not None:
            config = read_json_object(config_path, MAX_FILE_BYTES)
            special |= _special_texts(config, config_path)
        templates = _named_templates(config.get("chat_template"), config_path)
        if (jinja_path := files.get("chat_template.jinja")) is not None:
            templates["default"] = _read_text(jinja_path)
        elif (json_path := files.get("chat_template.json")) is not None:
            templates |= _named_templates(
                read_json_object(json_path, MAX_FILE_BYTES).get("chat_template"), json_path
            )
        tokenizer = cls(backend, special=special, templates=templates, path=config_path or path)
        tokenizer._add_ends(
            _flag(config, "add_bos_token", config_path, None), _flag(config, "add_eos_token", config_path, None)
        )
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: object) -> "Tokenizer":
        """The tokenizer that a GGUF file's metadata describes (`tokenizer.ggml.*`).

        Raises: ArtifactError for malformed metadata, UnsupportedModel for a kind of tokenizer jaxrt does not have.
        """
        rules = _byte_level_rules(metadata, path)
        vocabulary = _vocabulary(metadata, path)
        special = {
            name: vocabulary.texts[token]
            for name, key in _GGUF_SPECIAL
            if (token := _gguf_id(metadata, key, len(vocabulary.texts), path)) is not None
        }
        templates = {
            key.removeprefix(_GGUF_TEMPLATE).removeprefix(".") or "default": _gguf_text(metadata, key, path)
            for key in metadata
            if key == _GGUF_TEMPLATE or key.startswith(_GGUF_TEMPLATE + ".")
        }
        backend = _byte_level_bpe(rules, vocabulary, special, path)
        tokenizer = cls(backend, special=special, templates=templates, path=path)
        begins = _flag(metadata, _GGUF + "add_bos_token", path, rules.adds_bos)
        tokenizer._add_ends(begins, _flag(metadata, _GGUF + "add_eos_token", path, False))
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, also the BOS (and EOS) the model was trained to see.

        Special tokens written out in `text` become those tokens. Raises: RequestError for what is not Unicode text.
        """
        if not isinstance(text, str):
            raise RequestError(f"text of type {type(text).__name__}", expected="a str")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}",
                expected="Unicode text",
                fix="decode the bytes it came from with errors='replace'",
            ) from None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD. Raises: RequestError for ids out of range."""
        ids = [self._checked(token) for token in tokens]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> str:
        """What one token looks like inside a text, leading blank included; for display. Raises: RequestError."""
        token = self._checked(token)
        anchor, text = self._anchor
        return self._backend.decode([*anchor, token], skip_special_tokens=False)[len(text) :]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The conversation as the model was trained to see it: token ids, or text with `tokenize=False`.

        messages: dicts with a `role` and a `content`. variables: what else the template asks for (`enable_thinking`, ...).
        The template writes the special tokens, so encoding adds none: there is never a second BOS.
        Raises: RequestError for messages the template cannot take, ArtifactError for a broken template.
        """
        for name in _FOREIGN_ARGUMENTS:
            if name in variables:
                raise RequestError(f"{name}= is no argument of jaxrt's apply_chat_template", fix="leave it out")
        template = chat_template if chat_template is not None else self._template(tools)
        if template is None:
            raise RequestError(
                "this model came without a chat template", fix="give the prompt as text, or pass chat_template="
            )
        roles = {name: text for name, text in self._special.items() if name not in ("bos_token", "eos_token")}
        text = chat.render(
            template,
            messages,
            bos_token=self._special.get("bos_token"),
            eos_token=self._special.get("eos_token"),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(roles | variables),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one; whether `encode` adds it is another matter."""
        return self._ids.get("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: end of text, of turn, of message; without repetitions."""
        return tuple(dict.fromkeys(self._ids[name] for name in _END_NAMES if name in self._ids))

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's vocabulary may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `decode(..., skip_special_tokens=True)` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template for requests without tools, if there is one."""
        return self._template(None)

    def json(self) -> str:
        """The text of a tokenizer.json that makes this tokenizer."""
        return self._backend.to_str()

    def config(self) -> dict[str, Any]:
        """The content of a tokenizer_config.json that goes with `json()`: special tokens and chat templates."""
        begins, ends = self._adds()
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special}
        config |= {"add_bos_token": begins, "add_eos_token": ends, "clean_up_tokenization_spaces": False}
        if set(self._templates) == {"default"}:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self._templates.items()]
        return config

    def _template(self, tools: object) -> str | None:
        return self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default")

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return ids, self._backend.decode(ids, skip_special_tokens=False)

    def _adds(self) -> tuple[bool, bool]:
        """Whether encoding adds a BOS, and an EOS."""
        around = self._backend.encode("", add_special_tokens=True).ids
        begins = bool(around) and around[0] == self.bos_token_id
        return begins, len(around) > begins and around[-1] == self._ids.get("eos_token")

    def _add_ends(self, begins: bool | None, ends: bool | None) -> None:
        """Make encoding add the BOS (`begins`) and the EOS (`ends`); None leaves that one as it is.

        An explicit flag overrules tokenizer.json, as in transformers 5; without such a token there is nothing to add.
        """
        now = self._adds()
        begins = (now[0] if begins is None else begins) and "bos_token" in self._ids
        ends = (now[1] if ends is None else ends) and "eos_token" in self._ids
        if (begins, ends) == now:
            return
        names = ["bos_token"] * begins + ["eos_token"] * ends
        single = [self._special[name] + ":0" for name in names]
        single.insert(int(begins), "$A:0")
        self._backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(self._special[name], self._ids[name]) for name in names]
        )

    def _id_of(self, name: str, text: str) -> int:
        token = self._backend.token_to_id(text)
        if token is None:
            raise ArtifactError(
                f"{printable(text)!r} is not in the vocabulary", path=self._path, field=name, expected="a token"
            )
        return token

    def _checked(self, token: int) -> int:
        try:
            index = operator.index(token)  # numpy's integers too
        except TypeError:
            raise RequestError(f"token {token!r}", expected="a whole number") from None
        if isinstance(token, bool) or not 0 <= index < self.vocab_size:
            raise RequestError(f"token {token!r}", expected=f"an id from 0 to {self.vocab_size - 1}")
        return index


def _read_text(path: Path) -> str:
    size = regular_size(path)
    if size > MAX_FILE_BYTES:
        raise ArtifactError(f"{size:,} bytes", path=path, expected=f"at most {MAX_FILE_BYTES:,} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"not UTF-8: {error}", path=path, fix="copy or download it again") from error


def _special_texts(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Texts of the special tokens a configuration names: strings, or objects with a `content`."""
    texts = {}
    for name in _SPECIAL_NAMES:
        entry = config.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            texts[name] = text
        elif entry is not None:
            raise ArtifactError(printable(repr(entry)), path=path, field=name, expected="the text of a token")
    return texts


def _named_templates(entry: object, path: object) -> dict[str, str]:
    """Chat templates by name, from one source or a list of {"name", "template"}."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    templates = {}
    for item in entry if isinstance(entry, list) else [None]:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArtifactError(
                printable(repr(item if isinstance(entry, list) else entry)),
                path=path,
                field="chat_template",
                expected='text, or a list of {"name": ..., "template": ...}',
            )
        templates[name] = text
    return templates


def _flag(values: Mapping[str, Any], name: str, path: object, default: bool | None) -> bool | None:
    flag = values.get(name)
    if flag is None:
        return default
    if not isinstance(flag, bool):
        raise ArtifactError(printable(repr(flag)), path=path, field=name, expected="true or false")
    return flag


# GGUF. A file names its tokenizer's rules and lists vocabulary, kinds and merges; the regular expressions are published
# with the models those names stand for.

_GGUF = "tokenizer.ggml."
_GGUF_TEMPLATE = "tokenizer.chat_template"
_GGUF_SPECIAL = (
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("eot_token", "eot_token_id"),
    ("eom_token", "eom_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
)
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
    "qwen2": _ByteLevelRules(
        "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _PUNCTUATION_AND_BLANKS)), compose=True
    ),
}


@dataclass(frozen=True)
class _Vocabulary:
    texts: Sequence[str]  # by token id
    kinds: Sequence[int]  # by token id: _KINDS
    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]


def _byte_level_rules(metadata: Mapping[str, Any], path: object) -> _ByteLevelRules:
    model = _gguf_text(metadata, _GGUF + "model", path)
    if model != "gpt2":
        raise UnsupportedModel(
            f"{path}: {_GGUF}model is {printable(model)!r}",
            expected="'gpt2' (byte-level BPE)",
            fix="load the model from a directory with a tokenizer.json",
        )
    name = _gguf_text(metadata, _GGUF + "pre", path)
    rules = _BYTE_LEVEL.get(name)
    if rules is None:
        raise UnsupportedModel(
            f"{path}: {_GGUF}pre is {printable(name)!r}",
            expected="rules for splitting text that jaxrt knows",
            fix=nearest(name, _BYTE_LEVEL),
        )
    return rules


def _vocabulary(metadata: Mapping[str, Any], path: object) -> _Vocabulary:
    texts = _gguf_list(metadata, _GGUF + "tokens", str, path)
    kinds = _gguf_list(metadata, _GGUF + "token_type", int, path)
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
    for text in _gguf_list(metadata, _GGUF + "merges", str, path):
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
    roles = {special[name] for name in ("bos_token", *_END_NAMES) if name in special}
    for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True):
        if kind in _SPECIAL_KINDS or kind == _USER_DEFINED or text in roles:
            backend.add_tokens([AddedToken(text, normalized=False, special=kind != _USER_DEFINED or text in roles)])
    return backend


def _gguf_value(metadata: Mapping[str, Any], key: str, path: object) -> Any:
    if key not in metadata:
        raise ArtifactError("is missing", path=path, field=key, fix="convert the model to GGUF again")
    return metadata[key]


def _gguf_text(metadata: Mapping[str, Any], key: str, path: object) -> str:
    value = _gguf_value(metadata, key, path)
    if not isinstance(value, str):
        raise ArtifactError(f"a {type(value).__name__}", path=path, field=key, expected="text")
    return value


def _gguf_list(metadata: Mapping[str, Any], key: str, kind: type, path: object) -> list[Any]:
    values = _gguf_value(metadata, key, path)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ArtifactError(
            "another kind of value", path=path, field=key, expected=f"an array of {kind.__name__}"
        )
    return values


def _gguf_id(metadata: Mapping[str, Any], key: str, count: int, path: object) -> int | None:
    token = metadata.get(_GGUF + key)
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < count:
        raise ArtifactError(
            printable(repr(token)), path=path, field=_GGUF + key, expected=f"a token id from 0 to {count - 1}"
        )
    return token
