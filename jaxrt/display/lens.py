"""The logit lens: what a model would say if each layer were its last (nostalgebraist 2020)."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrt.context import InferenceContext
from jaxrt.display.colours import ink, magnitude
from jaxrt.display.lettering import CELL, cells, label, piece, shorten
from jaxrt.display.picture import Picture
from jaxrt.display.scene import Box, Grid, Label, Scene, Shape
from jaxrt.errors import RequestError
from jaxrt.models import decoder
from jaxrt.nn.layers import rms_norm
from jaxrt.observations import layer_path
from jaxrt.program import Program
from jaxrt.prompts import requests_of
from jaxrt.requests import is_list, is_whole, shown

if TYPE_CHECKING:
    from jaxrt.runtime import ModelRuntime
    from jaxrt.sessions.model import XlaModel

MOST_CELLS = 8_192  # of a picture: each costs about 400 bytes of markup
MOST_TOP = 64
BLOCK = 32  # positions whose logits are held at once

_SIZE, _WIDE, _HIGH = 11.0, 9, 20.0  # of letters; letters in a cell; pixels of a cell


@dataclass(frozen=True, eq=False)
class Lens:
    """The likeliest tokens after each layer and position, likeliest first."""

    layers: tuple[int, ...]  # L of them
    tokens: np.ndarray  # int32 [L, T, k]
    probabilities: np.ndarray  # float32 [L, T, k]
    prompt: tuple[int, ...]  # the T tokens read; a cell says what follows its token

    def __post_init__(self) -> None:
        shape = np.shape(self.tokens)
        fits = len(shape) == 3 and shape[:2] == (len(self.layers), len(self.prompt)) and shape[2] > 0
        if not fits or np.shape(self.probabilities) != shape:
            raise RequestError(
                f"tokens of shape {list(shape)} and probabilities of shape {list(np.shape(self.probabilities))}",
                expected=f"[{len(self.layers)}, {len(self.prompt)}, k] for both",
            )


def logit_lens(
    runtime: "ModelRuntime", prompt: str | Sequence[int], *, layers: Sequence[int] | None = None, top: int = 5
) -> Picture:
    """What the model would say next after each layer, at each token of a prompt.

    A line for each layer, the last one at the bottom; a column for each token. A cell holds the likeliest next token,
    coloured by its probability; pointing at it lists the `top` likeliest.

    Raises: RequestError for a layer that is not there, top beyond 1 to 64, or more cells than 8,192; and what
    `rt.inspect` raises.
    """
    return draw_lens(read_lens(runtime, prompt, layers=layers, top=top), runtime.session.model.tokenizer)  # type: ignore[attr-defined]


def read_lens(
    runtime: "ModelRuntime", prompt: str | Sequence[int], *, layers: Sequence[int] | None = None, top: int = 5
) -> Lens:
    """What `logit_lens` draws, as arrays. Raises: as it does, but for the number of cells."""
    model: XlaModel = runtime.session.model  # type: ignore[attr-defined]
    chosen = _layers(layers, len(model.config.layers))
    if not is_whole(top) or not 1 <= top <= min(MOST_TOP, model.config.vocab):
        raise RequestError(f"top={shown(top)}", expected=f"1 to {min(MOST_TOP, model.config.vocab)}")
    requests, single = requests_of(model, prompt, None, None, None, room=0)
    if not single:
        raise RequestError(f"{len(requests)} prompts", expected="one: text or token ids")
    tokens = requests[0].tokens
    paths = [layer_path(layer, "output") for layer in chosen]
    seen = runtime.inspect(list(tokens), paths)
    streams = np.stack([seen[path].data[0] for path in paths])  # type: ignore[union-attr]
    return lens_of(model, tokens, dict(zip(chosen, streams, strict=True)), int(top))


def lens_of(model: "XlaModel", prompt: Sequence[int], streams: Mapping[int, np.ndarray], top: int) -> Lens:
    """The lens over residual streams read before.

    streams: layer -> float32 [T, D], the output of that layer at each token of `prompt`. They pass through the final
    norm and the head in the model's own dtype, `BLOCK` positions at a time, so that [T, V] is never held.
    Blocks: until the device is done.
    """
    stacked = np.stack([streams[layer] for layer in streams])
    count, length, width = stacked.shape
    flat = stacked.reshape(-1, width)
    flat = np.pad(flat, [(0, -len(flat) % BLOCK), (0, 0)]).reshape(-1, BLOCK, width)
    context = InferenceContext(model.device)
    context["weights"] = dataclasses.replace(model.weights, layers=())  # type: ignore[type-var]  # shared, not copied
    context["streams"] = flat
    tokens, probabilities = context.realize_many(_reader(model.config.norm_eps, top), ["tokens", "probabilities"])
    shape = count, length, top
    read = count * length
    return Lens(
        tuple(streams),
        tokens.reshape(-1, top)[:read].reshape(shape),
        probabilities.reshape(-1, top)[:read].reshape(shape),
        tuple(prompt),
    )


def _reader(eps: float, top: int) -> Program:
    """Shapes: streams [blocks, BLOCK, D] to tokens int32 and probabilities float32 [blocks, BLOCK, top]."""

    def read(values: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, jax.Array]:
        weights = values["weights"]

        def block(stream: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = rms_norm(stream.astype(weights.embedding.dtype), weights.final_norm, eps)
            logits = decoder.logits(weights, hidden)
            best, tokens = jax.lax.top_k(logits, top)
            return tokens, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

        tokens, probabilities = jax.lax.map(block, values["streams"])
        return {"tokens": tokens, "probabilities": probabilities}

    return Program(read, name="logit_lens")


def _layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(count))
    found = list(layers) if is_list(layers) or isinstance(layers, range) else [layers]
    for layer in found:
        if not is_whole(layer) or not 0 <= layer < count:  # type: ignore[operator]
            raise RequestError(f"layer {shown(layer)}", expected=f"0 to {count - 1}")
    if not found or len(set(found)) < len(found):
        raise RequestError(f"layers={shown(layers)}", expected="each layer once, at least one")
    return tuple(sorted(map(int, found)))  # type: ignore[arg-type]


# --- layout -----------------------------------------------------------------------------------------------------------


def draw_lens(lens: Lens, tokenizer: Any = None) -> Picture:
    """The picture of a lens; token ids in place of texts where there is no tokenizer.

    Raises: RequestError for more than 8,192 cells.
    """
    rows, columns, _ = lens.tokens.shape
    if rows * columns > MOST_CELLS:
        raise RequestError(
            f"{rows} layers x {columns} tokens",
            expected=f"at most {MOST_CELLS:,} cells",
            fix=f"choose some layers, as in layers=range(0, {lens.layers[-1] + 1}, 4), or shorten the prompt",
        )
    names = {int(token): label(piece(int(token), tokenizer)) for token in {*lens.tokens.flat, *lens.prompt}}
    width, left, top = _WIDE * _SIZE * CELL + 6, 66.0, 92.0
    shapes: list[Shape] = [
        Label(0, 16, "logit lens", 13, bold=True),
        Label(0, 34, "each cell: the likeliest next token, if the model ended with that layer", opacity=0.65),
        *_key(0, 44),
    ]
    for t, token in enumerate(lens.prompt):
        x, name = left + t * width, names[token]
        room = (x, top - 22, width, 18)
        shapes.append(Label(x + 4, top - 9, shorten(name, _WIDE), _SIZE, bold=True, room=room, title=f"{t} {name}"))
    for row, layer in enumerate(lens.layers):
        y = top + row * _HIGH
        shapes.append(Label(left - 8, y + 14, f"layer {layer}", _SIZE, "end", opacity=0.8))
        for t, token in enumerate(lens.prompt):
            likely = zip(lens.tokens[row, t], lens.probabilities[row, t], strict=True)
            lines = [f"layer {layer}, after {t} {names[token]}"]
            lines += [f"{probability:7.2%}  {names[int(each)]}" for each, probability in likely]
            first, share = names[int(lens.tokens[row, t, 0])], float(lens.probabilities[row, t, 0])
            fill, room = magnitude(share), (left + t * width, y, width - 1, _HIGH - 1)
            shapes.append(Box(*room, fill, title="\n".join(lines)))
            shapes.append(Label(room[0] + 4, y + 14, shorten(first, _WIDE), _SIZE, colour=ink(fill), room=room))
    says, share = names[int(lens.tokens[-1, -1, 0])], float(lens.probabilities[-1, -1, 0])
    facts = f"{rows} layers x {columns} tokens, at the end {says} with {share:.1%}"
    scene = Scene(max(left + columns * width, 500), top + rows * _HIGH, shapes)
    return Picture(f"logit lens of layers {lens.layers[0]}-{lens.layers[-1]}", facts, scene)


def _key(x: float, y: float) -> list[Shape]:
    """What the colours mean."""
    text, steps = "probability  0", 60
    start = x + cells(text) * 10 * CELL + 8
    return [
        Label(x, y + 9, text, 10, opacity=0.8),
        Grid(start, y, 2, 10, [[magnitude(step / (steps - 1)) for step in range(steps)]]),
        Label(start + 2 * steps + 6, y + 9, "1", 10, opacity=0.8),
    ]
