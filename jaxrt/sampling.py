"""Logits to tokens: every sampling knob as pure functions of arrays and a key, and how likely the chosen tokens were.

Rows are independent: a branch taken because a neighbour asked for something leaves every other row's bits alone, since
a knob that is off multiplies by one, adds zero, or is deselected per row. A knob that no row uses costs a predicate.

Filters keep tokens by how far their scaled logit lies below the row's best: `gap = (best - logit) / temperature`, never
negative, so that its bit pattern, read as an integer, is ordered like the gap. min_p, top_k and top_p are each a
largest gap to keep; ties at that gap are kept. Nothing is sorted: with 49,152 logits on two cores (jax 0.10.2) `sort`
takes 11-27 ms, bisection over 31 bits 0.4 ms for a count and 0.5-0.8 ms for a mass, `lax.top_k` of 64 0.1-0.3 ms. So
top_k up to 64 is `lax.top_k`, larger k and top_p bisect, and all give the very gap that a sort would have found.
`jnp.argmax` takes 0.08 ms there, the maximum and then the first index that equals it 0.15 ms.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrt.requests import GREEDY_BELOW, MAX_LOGPROBS

MAX_BAD_WORDS = 128  # W: bad words of two or more tokens a row may have
MAX_BAD_WORD_TOKENS = 16  # M: tokens in one of them
SHORT_TOP_K = 64  # up to here `lax.top_k` is faster than bisection

# Columns of the packed scalars. Packed, because every leaf costs some 3 us a call.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = (
    "top_k",  # 0: off
    "min_tokens",
    "limit",  # most new tokens
    "sample",  # index among the request's n
    "logprobs",  # alternatives wanted; -1: no log-probabilities
    "processed",  # 1: log-probabilities of the distribution that was sampled from
    "biased",  # 1: `bias` has something in this row
    "bad_words",  # how many rows of `banned` are in use
)

Leaf = Any  # a jax.Array; numpy when the host made it; a ShapeDtypeStruct in `abstract_knobs`


@struct.dataclass
class Knobs:
    """What each row asked for. Constant during a request, never donated."""

    floats: Leaf  # f32 [B, len(FLOATS)]
    ints: Leaf  # i32 [B, len(INTS)]
    keys: Leaf  # u32 [B, 2]: threefry key of the seed, high word first
    bias: Leaf  # f32 [B, V]: added to the logits; -inf for tokens that are not allowed
    stops: Leaf  # bool [B, V]: tokens that end the generation
    prompted: Leaf  # bool [B, V]: tokens of the prompt; read by the repetition penalty only
    banned: Leaf  # i32 [B, W, M]: bad words of two or more tokens, padded with -1 in front

    def column(self, name: str) -> jax.Array:
        """[B] values of one packed scalar: a name of FLOATS or INTS."""
        if name in FLOATS:
            return self.floats[:, FLOATS.index(name)]
        return self.ints[:, INTS.index(name)]

    @property
    def greedy(self) -> jax.Array:
        """bool [B]: the likeliest token is taken and nothing is drawn."""
        return self.column("temperature") < GREEDY_BELOW


@struct.dataclass
class SamplerState:
    """What sampling remembers of a generation. Donated to every step, which returns the next."""

    counts: jax.Array  # i32 [B, V]: how often each token was generated
    recent: jax.Array  # i32 [B, M - 1]: the last generated tokens, latest last; -1 where there is none
    generated: jax.Array  # i32 [B]: tokens generated so far


@struct.dataclass
class Sampled:
    """One chosen token per row, and what is needed to say how likely it was."""

    tokens: jax.Array  # i32 [B]
    bad: jax.Array  # bool [B]: no answer: a logit is NaN or +inf, or no token is allowed. The token means nothing then
    stopped: jax.Array  # bool [B]: the token is one of the row's stop tokens
    adjusted: jax.Array  # f32 [B, V]: logits after bias, bans and penalties
    limit: jax.Array  # f32 [B]: largest gap below the best that top_k, top_p and min_p kept; +inf for greedy rows


@struct.dataclass
class Likelihoods:
    """Log-probabilities in nat."""

    logprobs: jax.Array  # f32 [B]: of the given token
    ranks: jax.Array  # i32 [B]: one more than the number of likelier tokens
    top_tokens: jax.Array  # i32 [B, 20], likeliest first; -1 beyond the vocabulary
    top_logprobs: jax.Array  # f32 [B, 20]; -inf for what cannot be chosen


class Columns(NamedTuple):
    """What the host reads of tokens: numpy views of a packed array, leading dimensions kept."""

    tokens: np.ndarray  # i32 [...]: of `step` the new token, -1 where the row was not active; of `score` the likeliest
    bad: np.ndarray  # bool [...]: no answer: a logit is NaN or +inf, or no token is allowed
    logprobs: np.ndarray  # f32 [...]
    ranks: np.ndarray  # i32 [...]
    top_tokens: np.ndarray  # i32 [..., 20]
    top_logprobs: np.ndarray  # f32 [..., 20]


COLUMNS = 4 + 2 * MAX_LOGPROBS  # int32 of one packed token; floats by their bits


def unpack(packed: np.ndarray) -> Columns:
    """The columns of i32 [..., COLUMNS], as `step` and `score` give them."""
    floats = packed.view(np.float32)
    tops = packed[..., 4 : 4 + MAX_LOGPROBS], floats[..., 4 + MAX_LOGPROBS :]
    return Columns(packed[..., 0], packed[..., 1] > 0, floats[..., 2], packed[..., 3], *tops)


def abstract_knobs(rows: int, vocab: int) -> Knobs:
    """Shapes and dtypes of the knobs of `rows` rows."""
    return Knobs(
        floats=jax.ShapeDtypeStruct((rows, len(FLOATS)), jnp.float32),
        ints=jax.ShapeDtypeStruct((rows, len(INTS)), jnp.int32),
        keys=jax.ShapeDtypeStruct((rows, 2), jnp.uint32),
        bias=jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        stops=jax.ShapeDtypeStruct((rows, vocab), jnp.bool_),
        prompted=jax.ShapeDtypeStruct((rows, vocab), jnp.bool_),
        banned=jax.ShapeDtypeStruct((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), jnp.int32),
    )


def initial_state(rows: int, vocab: int) -> SamplerState:
    """The state before the first token. Call it inside jit, so that its buffers are the device's own."""
    return SamplerState(
        counts=jnp.zeros((rows, vocab), jnp.int32),
        recent=jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), -1, jnp.int32),
        generated=jnp.zeros((rows,), jnp.int32),
    )


def step(
    logits: jax.Array, knobs: Knobs, state: SamplerState, positions: jax.Array, active: jax.Array
) -> tuple[jax.Array, SamplerState, jax.Array, jax.Array]:
    """One token for every row that is `active` (bool [B]): `sample`, `advance` and `logprobs`, packed for the host.

    Gives tokens i32 [B] (meaningless in rows that are not active), the next state, ended bool [B] (an active row has
    reached a stop token or its limit, or has no answer) and packed i32 [B, COLUMNS], -1 in rows that are not active.
    """
    sampled = sample(logits, knobs, state, positions)
    state = advance(state, sampled.tokens, active)
    ended = active & (sampled.stopped | sampled.bad | (state.generated >= knobs.column("limit")))
    packed = _pack(sampled.tokens, sampled.bad, logprobs(logits, sampled, knobs))
    return sampled.tokens, state, ended, jnp.where(active[:, None], packed, -1)


def advance(state: SamplerState, tokens: jax.Array, active: jax.Array) -> SamplerState:
    """The state after `tokens` [B] were generated in the rows that are `active` (bool [B]); other rows keep theirs."""
    rows = jnp.arange(tokens.shape[0])
    recent = jnp.concatenate([state.recent[:, 1:], tokens[:, None]], axis=1)
    return SamplerState(
        counts=state.counts.at[rows, tokens].add(active.astype(jnp.int32)),
        recent=jnp.where(active[:, None], recent, state.recent),
        generated=state.generated + active.astype(jnp.int32),
    )


def sample(logits: jax.Array, knobs: Knobs, state: SamplerState, positions: jax.Array) -> Sampled:
    """Choose one token per row from `logits` f32 [B, V].

    positions: i32 [B], the absolute position the new token will have; with seed and sample index it is the random key.
    In order: bias, bad words and min_tokens; repetition, frequency and presence penalty; then greedy rows take the
    likeliest token, and the others divide by temperature, filter by min_p, top_k and top_p (each on what the one
    before left), and draw. Among equally likely tokens greedy takes the lowest id.
    """
    adjusted = _penalised(_masked(logits, knobs, state), knobs, state)
    likeliest = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    best = _at(adjusted, likeliest)  # NaN if any logit is: argmax takes NaN for the largest

    def draw() -> tuple[jax.Array, jax.Array]:
        gaps = _gaps(adjusted, best, knobs)
        limit = _limit(gaps, knobs)
        noisy = jnp.where(gaps <= limit[:, None], -gaps, -jnp.inf) + _gumbel(knobs, positions, logits.shape[-1])
        drawn = lax.top_k(noisy, 1)[1][:, 0]  # argmax would be fused with the noise and run 3 ms instead of 0.7
        return jnp.where(knobs.greedy, likeliest, drawn), jnp.where(knobs.greedy, jnp.inf, limit)

    def take() -> tuple[jax.Array, jax.Array]:
        return likeliest, jnp.full_like(best, jnp.inf)

    tokens, limit = lax.cond(jnp.all(knobs.greedy), take, draw)
    stopped = _at(knobs.stops, tokens)
    return Sampled(tokens, ~jnp.isfinite(best), stopped, adjusted, limit)


def distribution(sampled: Sampled, knobs: Knobs) -> jax.Array:
    """f32 [B, V]: unnormalised log-probabilities of what `sample` drew from; -inf for what was filtered out.

    Of a greedy row, which draws nothing: the logits after bias, bans and penalties.
    """
    best = jnp.max(sampled.adjusted, axis=-1)
    gaps = _gaps(sampled.adjusted, best, knobs)
    return jnp.where(gaps <= sampled.limit[:, None], -gaps, -jnp.inf)


def logprobs(logits: jax.Array, sampled: Sampled, knobs: Knobs) -> Likelihoods:
    """How likely the sampled tokens were, in the rows that asked; zeros in the others, at no cost when nobody asked.

    logits: f32 [B, V] as the model gave them; rows in "processed" mode are measured on `distribution` instead.
    """
    wanted = knobs.column("logprobs") >= 0

    def measure() -> Likelihoods:
        processed = knobs.column("processed") != 0
        scores = jnp.where(processed[:, None], distribution(sampled, knobs), logits)
        found = _likelihoods(scores, sampled.tokens, True)
        return jax.tree.map(lambda x: jnp.where(wanted.reshape(-1, *[1] * (x.ndim - 1)), x, 0), found)

    def nothing() -> Likelihoods:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure))

    return lax.cond(jnp.any(wanted), measure, nothing)


def score(logits: jax.Array, targets: jax.Array, alternatives: jax.Array | bool = True) -> jax.Array:
    """How likely `targets` i32 [T] are under `logits` f32 [T, V], packed i32 [T, COLUMNS] with the likeliest as tokens.

    alternatives: whether to find the 20 likeliest too; may be traced, and where it is false they are zeros at no cost.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    bad = ~jnp.isfinite(_at(logits, likeliest))
    return _pack(likeliest, bad, _likelihoods(logits, targets, alternatives))


def _pack(tokens: jax.Array, bad: jax.Array, found: Likelihoods) -> jax.Array:
    single = [tokens, bad.astype(jnp.int32), lax.bitcast_convert_type(found.logprobs, jnp.int32), found.ranks]
    top_logprobs = lax.bitcast_convert_type(found.top_logprobs, jnp.int32)
    return jnp.concatenate([jnp.stack(single, axis=-1), found.top_tokens, top_logprobs], axis=-1)


def _masked(logits: jax.Array, knobs: Knobs, state: SamplerState) -> jax.Array:
    too_early = state.generated < knobs.column("min_tokens")

    def masked() -> jax.Array:
        # the last M-1 tokens against all but the last of every bad word; -1 in front matches anything
        expected, last = knobs.banned[:, :, :-1], knobs.banned[:, :, -1]
        matches = jnp.all((expected < 0) | (expected == state.recent[:, None, :]), axis=-1) & (last >= 0)
        rows = jnp.arange(logits.shape[0])[:, None]
        biased = jnp.where(too_early[:, None] & knobs.stops, -jnp.inf, logits + knobs.bias)
        return biased.at[rows, jnp.where(matches, last, logits.shape[-1])].min(-jnp.inf, mode="drop")

    used = (knobs.column("biased") > 0) | (knobs.column("bad_words") > 0) | too_early
    return lax.cond(jnp.any(used), masked, lambda: logits)


def _penalised(logits: jax.Array, knobs: Knobs, state: SamplerState) -> jax.Array:
    repetition, frequency, presence = (
        knobs.column(name) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )

    def penalised() -> jax.Array:
        seen = knobs.prompted | (state.counts > 0)
        factor = repetition[:, None]
        repeated = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        repeated -= frequency[:, None] * state.counts.astype(jnp.float32)
        return repeated - presence[:, None] * (state.counts > 0).astype(jnp.float32)

    used = (repetition != 1) | (frequency != 0) | (presence != 0)
    return lax.cond(jnp.any(used), penalised, lambda: logits)


def _gaps(adjusted: jax.Array, best: jax.Array, knobs: Knobs) -> jax.Array:
    """f32 [B, V], zero or more: how far each token lies below the row's best, in units of the row's temperature."""
    temperature = jnp.where(knobs.greedy, 1, knobs.column("temperature"))
    return (best[:, None] - adjusted) / temperature[:, None]


def _limit(gaps: jax.Array, knobs: Knobs) -> jax.Array:
    """f32 [B]: the largest gap that min_p, top_k and top_p let pass."""
    limit = -jnp.log(knobs.column("min_p"))  # +inf where it is 0
    top_k, top_p = knobs.column("top_k"), knobs.column("top_p")

    def smallest_k() -> jax.Array:
        return jnp.where(top_k > 0, jnp.minimum(limit, _kth_smallest(gaps, top_k)), limit)

    limit = lax.cond(jnp.any(top_k > 0), smallest_k, lambda: limit)

    def nucleus() -> jax.Array:
        masses = jnp.where(gaps <= limit[:, None], jnp.exp(-gaps), 0)
        reached = _smallest(gaps, masses, top_p * jnp.sum(masses, axis=-1))
        # fmin: where rounding keeps a top_p next to 1 from being reached, `reached` is NaN and everything stays
        return jnp.where(top_p < 1, jnp.fmin(limit, reached), limit)

    return lax.cond(jnp.any(top_p < 1), nucleus, lambda: limit)


def _kth_smallest(gaps: jax.Array, k: jax.Array) -> jax.Array:
    """f32 [B]: the k-th smallest gap of each row; rows with k = 0 get any."""
    short = min(SHORT_TOP_K, gaps.shape[-1])

    def by_top_k() -> jax.Array:
        return -_at(lax.top_k(-gaps, short)[0], jnp.maximum(k, 1) - 1)

    def by_bisection() -> jax.Array:
        return _smallest(gaps, jnp.ones_like(gaps), k.astype(jnp.float32))  # float counts are exact up to 2**24

    return lax.cond(jnp.all(k <= short), by_top_k, by_bisection)


def _smallest(gaps: jax.Array, masses: jax.Array, targets: jax.Array) -> jax.Array:
    """f32 [B]: the smallest limit whose tokens, those of gap <= limit, have masses that reach the target; else NaN.

    Decided bit by bit from the highest: floats that are not negative are ordered like the integers with their bits.
    Masses are not negative, so that a sum in fixed order never falls when a token joins, however it is rounded.
    """
    bits = lax.bitcast_convert_type(jnp.abs(gaps), jnp.int32)  # abs: no -0.0

    def decide(step: jax.Array, low: jax.Array) -> jax.Array:
        middle = low + (jnp.int32(1) << (30 - step))
        reached = jnp.sum(jnp.where(bits < middle[:, None], masses, 0), axis=-1) >= targets
        return jnp.where(reached, low, middle)

    low = lax.fori_loop(0, 31, decide, jnp.zeros(gaps.shape[:1], jnp.int32))
    return lax.bitcast_convert_type(low, jnp.float32)


def _gumbel(knobs: Knobs, positions: jax.Array, vocab: int) -> jax.Array:
    """f32 [B, V]: Gumbel noise; entry [b, v] depends on the row's seed, sample index and position, and on v.

    From all 32 bits where `jax.random.gumbel` uses 23, for the same time: the noise of a token is then exact down to
    probabilities of 1e-9, which the tail of a large vocabulary needs.
    """

    def bits(key: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample), position), (vocab,), jnp.uint32)

    drawn = jax.vmap(bits)(knobs.keys, knobs.column("sample"), positions)
    uniform = drawn.astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))  # never 1: no token's noise is -inf


def _likelihoods(scores: jax.Array, tokens: jax.Array, alternatives: jax.Array | bool) -> Likelihoods:
    """scores: f32 [B, V], unnormalised log-probabilities; alternatives: whether to find the 20 likeliest."""
    total = jax.nn.logsumexp(scores, axis=-1)
    chosen = _at(scores, tokens)
    width = min(MAX_LOGPROBS, scores.shape[-1])
    missing = ((0, 0), (0, MAX_LOGPROBS - width))  # of a vocabulary under 20

    def likeliest() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(scores, width)
        values = values - total[:, None]
        return jnp.pad(ids, missing, constant_values=-1), jnp.pad(values, missing, constant_values=-jnp.inf)

    def nothing() -> tuple[jax.Array, jax.Array]:
        shape = (scores.shape[0], MAX_LOGPROBS)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_tokens, top_logprobs = lax.cond(alternatives, likeliest, nothing)
    ranks = 1 + jnp.sum(scores > chosen[:, None], axis=-1, dtype=jnp.int32)
    return Likelihoods(chosen - total, ranks, top_tokens, top_logprobs)


def _at(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """[B] entries `rows[b, columns[b]]`."""
    return jnp.take_along_axis(rows, columns[:, None], axis=-1)[:, 0]
