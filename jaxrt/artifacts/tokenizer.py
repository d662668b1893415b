"""Text to tokens and back, over the `tokenizers` library; from a `tokenizer.json` or from a GGUF file's metadata."""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxrt.artifacts import chat
from jaxrt.artifacts.files import printable, read_json_object, regular_size, unreadable
from jaxrt.artifacts.gguf_tokenizer import END_ROLES, gguf_tokenizer
from jaxrt.errors import ArtifactError, RequestError

MAX_FILE_BYTES = 256 << 20
_ROLES = ("bos_token", *END_ROLES, "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
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
        roles = [name for name in ("bos_token", *END_ROLES) if name in special]
        self._ids = {name: self._id_of(name, special[name]) for name in roles}

    @classmethod
    def from_files(cls, files: Mapping[str, Path]) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory.

        files: paths by name: `tokenizer.json`; where they exist also `tokenizer_config.json`,
        `special_tokens_map.json`, `chat_template.jinja` or `chat_template.json`. Raises: ArtifactError.
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
            templates |= _named_templates(read_json_object(json_path, MAX_FILE_BYTES).get("chat_template"), json_path)
        tokenizer = cls(backend, special=special, templates=templates, path=config_path or path)
        tokenizer._add_ends(*(_flag(config, name, config_path) for name in ("add_bos_token", "add_eos_token")))
        return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: object) -> "Tokenizer":
        """The tokenizer that a GGUF file's metadata describes (`tokenizer.ggml.*`).

        Raises: ArtifactError for malformed metadata, UnsupportedModel for a kind of tokenizer jaxrt does not have.
        """
        read = gguf_tokenizer(metadata, path)
        tokenizer = cls(read.backend, special=read.special, templates=read.templates, path=path)
        tokenizer._add_ends(read.adds_bos, read.adds_eos)
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, also the BOS (and EOS) the model was trained to see.

        Special tokens written out in `text` become those tokens. Raises: RequestError for what is not Unicode text.
        """
        if not isinstance(text, str):
            raise RequestError(f"text of type {type(text).__name__}", expected="a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}",
                expected="Unicode text",
                fix="decode the bytes it came from with errors='replace'",
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

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

        messages: dicts with a `role` and a `content`. variables: what else the template asks for, such as
        `enable_thinking`. chat_template: Jinja source to use instead of the model's own.
        The template writes the special tokens, so encoding adds none: there is never a second BOS.
        Raises: RequestError for messages the template cannot take, ArtifactError for a broken template.
        """
        for name in _FOREIGN_ARGUMENTS:
            if name in variables:
                raise RequestError(f"{name}= is no argument of jaxrt's apply_chat_template", fix="leave it out")
        roles = {name: text for name, text in self._special.items() if name not in ("bos_token", "eos_token")}
        text = chat.render(
            chat_template if chat_template is not None else self._template(tools),
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
        return tuple(dict.fromkeys(self._ids[name] for name in END_ROLES if name in self._ids))

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's vocabulary may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def longest_token(self) -> int:
        """Most characters one token can stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

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
        try:
            self._backend.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=[(self._special[name], self._ids[name]) for name in names]
            )
        except ValueError as error:  # a token whose text the library's notation cannot hold, such as "a:b"
            raise ArtifactError(
                f"{printable(str(single))} around a text: {printable(str(error))}", path=self._path, field="bos_token"
            ) from error

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
    for name in _ROLES:
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


def _flag(config: Mapping[str, Any], name: str, path: object) -> bool | None:
    flag = config.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise ArtifactError(printable(repr(flag)), path=path, field=name, expected="true or false")
    return flag
