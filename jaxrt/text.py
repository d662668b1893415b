"""Tokens as they come to text as it may be shown: whole characters only, cut at stop strings."""

from collections import deque
from collections.abc import Iterable, Sequence

from jaxrt.artifacts.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or none yet
_OPEN = 3  # most replacements at the end of a text that later bytes may still turn into a character (of 4 bytes)
_CONTEXT = 4  # tokens kept before the newest ones, so that a word keeps the blank before it
_WINDOW = 16  # tokens decoded together before old ones are dropped
_LONGEST_WINDOW = 64  # tokens after which decoding starts anew even where no good place to cut was found


class TextStream:
    """The text of a growing sequence of tokens, handed out in pieces that are never taken back.

    Each piece is valid Unicode, and together they are what decoding all tokens at once gives, up to the first stop
    string: the one that ends first; of several that end at one place, the longest. The stop string is cut off, or kept
    with `include_stop`. What could still become a character or a stop string is held back. `prompt_tail` is the end of
    the prompt: the text then continues it (its leading blank included).
    """

    armed: bool  # whether stop strings are looked for; text pushed meanwhile is no part of one
    stopped: str | None  # the stop string that was found

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self.armed, self.stopped = True, None
        self._decoder = _Decoder(tokenizer, skip_special_tokens, prompt_tail)
        self._stops = StopStrings(stop)
        self._include_stop = include_stop
        self._held = ""  # an open beginning of a stop string
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._parts)

    def push(self, token: int) -> str:
        """Take the next token; the text that is now certain. After a stop string, nothing."""
        return "" if self.stopped is not None else self._hand_out(self._decoder.push(token))

    def finish(self) -> str:
        """End of the tokens: the rest, with U+FFFD for a character that never became whole."""
        if self.stopped is not None:
            return ""
        rest = self._hand_out(self._decoder.finish())
        if self._held:
            rest, self._held = rest + self._held, ""
            self._parts[-1] = rest
        return rest

    def _hand_out(self, new: str) -> str:
        if not self.armed:
            self._stops.reset()
            certain, self._held = self._held + new, ""
        else:
            certain = self._match(new)
        self._parts.append(certain)
        return certain

    def _match(self, new: str) -> str:
        text = self._held + new
        found, end = self._stops.find(new)
        if found is None:
            certain = len(text) - self._stops.open
            self._held = text[certain:]
            return text[:certain]
        self.stopped, end, self._held = found, end + len(text) - len(new), ""
        return text[: end if self._include_stop else end - len(found)]


class StopStrings:
    """Aho and Corasick's automaton: finds the first of many strings in text that comes piece by piece."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by state: the states one character further
        self._depth = [0]  # by state: how many characters of a stop string have been read
        self._shorter = [0]  # by state: the state of the longest proper suffix that begins a stop string
        self._found: list[str | None] = [None]  # by state: the longest stop string that ends here
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0

    @property
    def open(self) -> int:
        """Characters at the end of the text that could still become a stop string."""
        return self._depth[self._state]

    def reset(self) -> None:
        """Forget the text so far."""
        self._state = 0

    def find(self, text: str) -> tuple[str | None, int]:
        """Read on: the first stop string that ends within `text` and where it ends, or None and 0."""
        if len(self._next) > 1:
            for place, character in enumerate(text, 1):
                self._state = self._step(self._state, character)
                if (found := self._found[self._state]) is not None:
                    return found, place
        return None, 0

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._shorter.append(0)
                self._found.append(None)
            state = self._next[state][character]
        self._found[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())  # breadth first: shorter states are linked before longer ones
        while queue:
            state = queue.popleft()
            for character, longer in self._next[state].items():
                self._shorter[longer] = shorter = self._step(self._shorter[state], character)
                if self._found[longer] is None:
                    self._found[longer] = self._found[shorter]
                queue.append(longer)


class _Decoder:
    """Text of tokens one by one at bounded cost: decodes a window of the last ones and hands out what is new in it.

    The window is shortened where its text is the end of the longer window's text, so that no character is cut.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._vocab = tokenizer.vocab_size
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window = [token for token in context[-_WINDOW:] if self._has_text(token)]
        self._text = self._decode(self._window)
        self._done = _certain(self._text)  # characters of the window's text that were handed out
        self._whole = 0  # tokens of the window after which nothing was held back
        self._take(self._done)

    def _has_text(self, token: int) -> bool:
        # a model's vocabulary may be padded beyond the tokenizer's: such tokens stand for no text
        return token < self._vocab and token not in self._skipped

    def push(self, token: int) -> str:
        if not self._has_text(token):
            return ""
        handed_out = self._text[: self._done]
        self._window.append(token)
        self._text = self._decode(self._window)
        if self._whole and not self._text.startswith(handed_out):
            # a decoder that gives up on a run of bytes as a whole, its finished characters too: start after those
            self._window = self._window[self._whole :]
            self._text, self._done, self._whole = self._decode(self._window), 0, 0
        new = self._take(_certain(self._text))
        if len(self._window) > _WINDOW:
            new += self._shorten()
        return new

    def finish(self) -> str:
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        new = self._text[self._done : end]
        self._done = max(self._done, end)
        if self._done == len(self._text):
            self._whole = len(self._window)
        return new

    def _shorten(self) -> str:
        """Drop old tokens; gives the text that this makes certain, normally none."""
        window, text, pending = self._window, self._text, len(self._text) - self._done
        for start in range(len(window) - _CONTEXT, 0, -1):
            tail = self._decode(window[start:])
            if len(tail) <= pending or not text.endswith(tail):
                continue
            # a tail that begins with a character was cut between characters; of one that begins with a replacement
            # this is only known if nothing changes on either side
            if tail[0] != _REPLACEMENT or self._decode(window[:start]) + tail == text:
                self._window, self._text, self._done = window[start:], tail, len(tail) - pending
                self._whole = max(0, self._whole - start)
                return ""
        if len(window) <= _LONGEST_WINDOW:
            return ""
        rest = self.finish()  # only a decoder that rewrites earlier text, or endless tokens without any, comes here
        self._window, self._text, self._done, self._whole = [], "", 0, 0
        return rest


def _certain(text: str) -> int:
    """How many characters of a decoded text no later token can change."""
    end = len(text)
    while end > max(0, len(text) - _OPEN) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end
