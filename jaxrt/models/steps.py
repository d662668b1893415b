"""The programs of a session as pure functions of named values: make, prefill, first, decode, move, grow, copy.

What a step changes (cache, state) goes in and comes out, to be donated; what the host reads (packed columns, logits)
is never donated. The sampler stands in `first` and `decode` alone: it takes XLA as long to compile as a layer stack
does.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrt import cache, sampling
from jaxrt.config import ModelConfig
from jaxrt.models import decoder
from jaxrt.observations import LOGITS_PATH
from jaxrt.taps import PLAIN, Tap, Taps

FREE, HALT = -1, -2  # in place of a forced token: go on with the sampled one; make no more steps
SCORE_ROWS = 32  # positions scored at a time: bounds the [rows, V] logits in memory

Targets = dict[str, Any]
Fn = Callable[[Mapping[str, Any], Mapping[str, Array]], Targets]


@struct.dataclass
class RowState:
    """What a session knows of its rows beside the cache."""

    lengths: Array  # int32 [B] tokens in the cache
    tokens: Array  # int32 [B] last sampled token, not in the cache yet
    done: Array  # bool [B] no further steps until the next prompt
    sampler: sampling.SamplerState


def empty_state(rows: int, vocab: int) -> RowState:
    """State of `rows` rows that hold nothing."""
    zeros = jnp.zeros((rows,), jnp.int32)
    return RowState(zeros, zeros, jnp.ones((rows,), bool), sampling.initial_state(rows, vocab))


def make(config: ModelConfig, rows: int, capacity: int, dtype: jnp.dtype) -> Fn:
    """An empty cache and state: {} -> kv, state."""

    def program(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
        kv = cache.abstract(config, rows, capacity, dtype)
        kv = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kv)
        return {"kv": kv, "state": empty_state(rows, config.vocab)}

    return program


def grow(capacity: int) -> Fn:
    """A cache of the new capacity with the same entries: kv -> kv_next."""
    return lambda values, env: {"kv_next": cache.grow(values["kv"], capacity)}


def copy(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
    """Buffers of one's own with the same contents: kv, state -> kv_next, state_next."""
    kv, state = jax.tree.map(jnp.copy, (values["kv"], values["state"]))
    return {"kv_next": kv, "state_next": state}


def prefill(config: ModelConfig, taps: Taps = PLAIN) -> Fn:
    """A chunk of one row's prompt.

    values: weights, kv and state of one row, tokens int32 [1, T], following int32 [T] (the token after each, for
    scores); edits, where the taps have any.
    env: count of real tokens in the chunk; whether to score it (1), with the likeliest alternatives (2).
    Targets: kv_next, state_next, logits float32 [1, V] of the last real token, scores [T, C] (zeros unless asked for);
    observed, where the taps do: {path: array}.
    """

    def program(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
        weights, state, count = values["weights"], values["state"], env["count"]
        tap = _tap(taps, values)
        hidden, kv = decoder.forward(config, weights, values["kv"], values["tokens"], state.lengths, tap)
        positions = state.lengths[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]

        def score(part: Array, places: Array) -> Array:
            return tap.edit(LOGITS_PATH, decoder.logits(weights, part)[None], places[None])[0]

        scores = jax.lax.cond(
            env["score"] > 0,
            lambda: _scores(score, hidden[0], positions[0], values["following"], env["score"] > 1),
            lambda: jnp.zeros((hidden.shape[1], sampling.COLUMNS), jnp.int32),
        )
        if LOGITS_PATH in taps.observed:
            tap(LOGITS_PATH, decoder.logits(weights, hidden), positions)
        last = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1)
        place = jax.lax.dynamic_slice_in_dim(positions, count - 1, 1, axis=1)
        logits = tap.edit(LOGITS_PATH, decoder.logits(weights, last[:, 0])[:, None], place)[:, 0]
        state = state.replace(lengths=state.lengths + count)
        return {"kv_next": kv, "state_next": state, "logits": logits, "scores": scores, "observed": tap.seen}

    return program


def first(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
    """The first token of a request, sampled from a prompt's logits by a sampler that has seen nothing yet.

    values: state of one row, logits float32 [1, V], knobs. Targets: state_next, packed [1, 1, C].
    """
    fresh = sampling.initial_state(1, values["logits"].shape[-1])
    state = values["state"].replace(done=jnp.zeros((1,), bool), sampler=fresh)
    state, packed = _sample(values["logits"], values["knobs"], state)
    return {"state_next": state, "packed": packed[:, None]}


def decode(config: ModelConfig, positions: int, *, counted: bool, taps: Taps = PLAIN) -> Fn:
    """Up to `positions` further tokens of every row that is not done; exactly one where the taps observe.

    values: weights, kv, state, knobs, forced int32 [B] (a token to feed first instead of the sampled one; FREE; or
    HALT); edits, where the taps have any. env, when `counted`: count of positions to run; the loop then also ends once
    every row is done.
    Targets: kv_next, state_next, logits float32 [B, V] of the last position, packed [B, positions, C], -1 where
    nothing ran; observed, where the taps do: {path: array}.
    """

    def program(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
        weights, knobs, state, forced = values["weights"], values["knobs"], values["state"], values["forced"]
        rows = state.tokens.shape[0]
        feeding = forced >= 0
        done = jnp.where(feeding, False, state.done | (forced == HALT))
        state = state.replace(tokens=jnp.where(feeding, forced, state.tokens), done=done)

        tap = _tap(taps, values)

        def step(index: Array, carry: tuple) -> tuple:
            kv, state, packed, logits = carry
            active = ~state.done
            hidden, kv = decoder.forward(config, weights, kv, state.tokens[:, None], state.lengths, tap)
            scored = tap(LOGITS_PATH, decoder.logits(weights, hidden[:, 0])[:, None], state.lengths[:, None])
            logits = jnp.where(active[:, None], scored[:, 0], logits)
            state = state.replace(lengths=state.lengths + active.astype(jnp.int32))
            state, columns = _sample(logits, knobs, state)
            return kv, state, jax.lax.dynamic_update_slice(packed, columns[:, None], (0, index, 0)), logits

        packed = jnp.full((rows, positions, sampling.COLUMNS), -1, jnp.int32)
        logits = jnp.zeros((rows, config.vocab), jnp.float32)
        carry = (values["kv"], state, packed, logits)
        if taps.observed:  # of one position, which is what its targets hold
            carry = step(jnp.int32(0), carry)
        elif counted:
            _, carry = jax.lax.while_loop(
                lambda loop: (loop[0] < env["count"]) & ~jnp.all(loop[1][1].done),
                lambda loop: (loop[0] + 1, step(loop[0], loop[1])),
                (jnp.int32(0), carry),
            )
        else:
            carry = jax.lax.fori_loop(0, positions, step, carry)
        kv, state, packed, logits = carry
        return {"kv_next": kv, "state_next": state, "logits": logits, "packed": packed, "observed": tap.seen}

    return program


def move(values: Mapping[str, Any], env: Mapping[str, Array]) -> Targets:
    """Put the lane (one row) into a row of the batch, or take that row out into the lane.

    values: kv and state of B rows, lane_kv and lane_state of one. env: row; take (0: put, 1: take out).
    Targets: kv_next, state_next, lane_kv_next, lane_state_next; afterwards the lane and the row hold the same.
    """
    row, take = env["row"], env["take"] > 0

    def moved(one: Array, many: Array) -> Array:
        return jnp.where(take, jax.lax.dynamic_slice_in_dim(many, row, 1, axis=0), one)

    def put(one: Array, many: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(many, one, row, 0)

    batch, lane = (values["kv"], values["state"]), (values["lane_kv"], values["lane_state"])
    lane = jax.tree.map(moved, lane, batch)
    batch = jax.tree.map(put, lane, batch)
    return {"kv_next": batch[0], "state_next": batch[1], "lane_kv_next": lane[0], "lane_state_next": lane[1]}


def _sample(logits: Array, knobs: sampling.Knobs, state: RowState) -> tuple[RowState, Array]:
    """The next token of every row that is not done. `state.lengths` already counts the token that gave the logits."""
    with jax.named_scope("sample"):
        active = ~state.done
        tokens, sampler, ended, packed = sampling.step(logits, knobs, state.sampler, state.lengths, active)
        tokens = jnp.where(active, tokens, state.tokens)
        return RowState(state.lengths, tokens, state.done | ended, sampler), packed


def _tap(taps: Taps, values: Mapping[str, Any]) -> Tap:
    return Tap(taps, values["edits"] if taps.edits else ())


def _scores(
    logits: Callable[[Array, Array], Array], hidden: Array, positions: Array, following: Array, alternatives: Array
) -> Array:
    """Packed scores of each position's following token, with the likeliest token in place of a sampled one.

    logits: of hidden states at positions. alternatives: bool, whether the 20 likeliest are wanted.
    Shapes: hidden [T, D]; positions and following int32 [T]; result [T, C].
    """
    rows = math.gcd(SCORE_ROWS, hidden.shape[0])

    def block(part: tuple[Array, Array, Array]) -> Array:
        return sampling.score(logits(part[0], part[1]), part[2], alternatives)

    parts = (hidden, positions, following)
    blocks = tuple(part.reshape(-1, rows, *part.shape[1:]) for part in parts)
    return jax.lax.map(block, blocks).reshape(hidden.shape[0], sampling.COLUMNS)
