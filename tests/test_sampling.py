"""The sampler against the definitions of its knobs, written out once more in float64 with sorts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

from jaxrt import sampling
from jaxrt.errors import RequestError
from jaxrt.knobs import make_knobs, neutral
from jaxrt.requests import SamplingParams

V = 24  # a small vocabulary
DRAWS = 20_000
LOGITS = np.random.default_rng(5).normal(scale=1.5, size=V).astype(np.float32)
PROMPT, OUTPUT = (1, 2, 3, 3), (4, 5, 4, 6, 1, 4)  # what stands before the drawn token
GREEDY = SamplingParams(temperature=0.0)

step = jax.jit(sampling.step, donate_argnums=2)
sample = jax.jit(sampling.sample)
advance = jax.jit(sampling.advance, donate_argnums=0)
distribution = jax.jit(lambda *given: sampling.distribution(sampling.sample(*given), given[1]))
score = jax.jit(sampling.score)


@jax.jit
def draws(logits, knobs, state, positions):
    """One token of a single row at every position, i32 [positions]."""
    return jax.vmap(lambda position: sampling.sample(logits, knobs, state, position[None]).tokens[0])(positions)


def knobs_of(*requests, vocab=V, bad_words=(), seed=3, **more):
    count = len(requests)
    given = {
        "prompts": [PROMPT] * count,
        "eos": (),
        "bad_words": [bad_words] * count,
        "seeds": [seed] * count,
        "samples": [0] * count,
    }
    return make_knobs(requests, vocab=vocab, **(given | more))


def state_after(tokens, rows=1, vocab=V):
    state = jax.jit(sampling.initial_state, static_argnums=(0, 1))(rows, vocab)
    for token in tokens:
        state = advance(state, np.full(rows, token, np.int32), np.ones(rows, bool))
    return state


def positions(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


# --- the definitions, in float64 --------------------------------------------------------------------------------------


def adjusted_logits(logits, params, bad_words=(), eos=()):
    """Logits after bias, bans and penalties, by the definitions."""
    logits = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -np.inf
    for *before, last in bad_words:
        if not before or tuple(before) == OUTPUT[-len(before) :]:
            logits[last] = -np.inf
    if len(OUTPUT) < params.min_tokens:
        logits[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
    for token in {*PROMPT, *OUTPUT}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    return logits


def filtered(probabilities, *, min_p=0.0, top_k=0, top_p=1.0):
    """Probabilities after the filters, by sorting; and how close a cumulated mass came to top_p."""
    kept = probabilities >= min_p * probabilities.max()
    if 0 < top_k < kept.sum():
        kept &= probabilities >= np.sort(np.where(kept, probabilities, 0))[::-1][top_k - 1]
    margin = np.inf
    if top_p < 1:
        order = np.sort(np.where(kept, probabilities, 0))[::-1]
        cumulated = np.cumsum(order) / order.sum()
        kept &= probabilities >= order[np.argmax(cumulated >= top_p)]
        margin = np.abs(cumulated - top_p).min()
    left = np.where(kept, probabilities, 0)
    return left / left.sum(), margin


def expected_probabilities(logits, params, bad_words=(), eos=()):
    scaled = adjusted_logits(logits, params, bad_words, eos) / params.temperature
    return filtered(softmax(scaled), min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)[0]


def p_value(tokens, expected):
    """Of the hypothesis that `tokens` were drawn from `expected`; zero if one is impossible."""
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    common = expected * len(tokens) >= 5  # the test wants five or more expected in each class
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*(expected[common] * len(tokens)), expected[~common].sum() * len(tokens)]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return chisquare(observed, wanted).pvalue if len(wanted) > 1 else 1.0


SAMPLED = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "filters": SamplingParams(temperature=1.3, min_p=0.05, top_k=9, top_p=0.8),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "rewarded repetition": SamplingParams(repetition_penalty=0.6),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "presence": SamplingParams(presence_penalty=-1.5),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=-0.4, presence_penalty=0.7, temperature=0.8),
    "logit_bias": SamplingParams(logit_bias={2: 3.0, 9: -2.5, 11: -100.0}),
    "bias before penalties": SamplingParams(logit_bias={4: 3.0}, repetition_penalty=2.0),
    "allowed": SamplingParams(allowed_token_ids=(1, 8, 9, 15), logit_bias={8: 1.0}),
    "too early to stop": SamplingParams(min_tokens=len(OUTPUT) + 1, stop_token_ids=(0, 12)),
    "late enough to stop": SamplingParams(min_tokens=len(OUTPUT), stop_token_ids=(0, 12)),
}


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED.keys())
def test_draws_follow_the_distribution_that_the_knobs_define(params):
    knobs = knobs_of(params, eos=(7,))
    tokens = np.asarray(draws(LOGITS[None], knobs, state_after(OUTPUT), positions(DRAWS)))
    assert p_value(tokens, expected_probabilities(LOGITS, params, eos=(7,))) > 1e-4


def test_bad_words_are_never_completed():
    # of one token; completed by it; of another past; too long for the output so far
    words = ((10,), (1, 4, 2), (2, 4, 3), (9, 4, 5, 4, 6, 1, 4, 8))
    tokens = np.asarray(
        draws(LOGITS[None], knobs_of(SamplingParams(), bad_words=words), state_after(OUTPUT), positions(DRAWS))
    )
    expected = expected_probabilities(LOGITS, SamplingParams(), words)
    assert list(np.flatnonzero(expected == 0)) == [2, 10]
    assert p_value(tokens, expected) > 1e-4


def test_the_longest_bad_word_is_matched_over_all_its_tokens():
    past = tuple(range(sampling.MAX_BAD_WORD_TOKENS - 1))
    word, other = (*past, 20), (5, *past[1:], 21)
    banned = sample(
        np.zeros((1, V), np.float32), knobs_of(GREEDY, bad_words=(word, other)), state_after(past), positions(1)
    )
    assert np.flatnonzero(np.isneginf(banned.adjusted[0])).tolist() == [20]


def test_the_chi_squared_test_would_notice_another_temperature():
    tokens = np.asarray(
        draws(LOGITS[None], knobs_of(SamplingParams(temperature=0.95)), state_after(OUTPUT), positions(DRAWS))
    )
    assert p_value(tokens, expected_probabilities(LOGITS, SamplingParams())) < 1e-4


# --- filters ----------------------------------------------------------------------------------------------------------

steps = st.lists(st.integers(-12, 12), min_size=V, max_size=V).map(lambda values: np.array(values, np.float32) / 4)
floats = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V).map(lambda values: np.array(values, np.float32))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=steps | floats,
    top_k=st.integers(0, V + 3),
    top_p=st.sampled_from([1e-30, 1e-6, 0.999999, 1.0]) | st.floats(1e-3, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
)
def test_filters_keep_what_a_sort_keeps(logits, top_k, top_p, min_p):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = softmax(logits.astype(np.float64))
    wanted, margin = filtered(probabilities, min_p=min_p, top_k=top_k, top_p=top_p)
    near = np.abs(np.log(probabilities / probabilities.max()) - np.log(max(min_p, 1e-300))).min()
    if margin < 1e-5 or near < 1e-5:
        return  # float32 may fall on either side
    scores = np.asarray(distribution(logits[None], knobs_of(params), state_after(()), positions(1)))[0]
    assert np.array_equal(np.isfinite(scores), wanted > 0)
    np.testing.assert_allclose(softmax(scores.astype(np.float64)), wanted, rtol=2e-5, atol=1e-12)


def test_every_top_k_keeps_exactly_the_largest_whatever_way_it_is_found():
    vocab = 200
    logits = np.random.default_rng(1).normal(size=vocab).astype(np.float32)
    order = np.sort(logits)[::-1]
    short = range(1, sampling.SHORT_TOP_K + 1)
    every = [*short, *range(sampling.SHORT_TOP_K + 1, vocab, 9), vocab - 1, vocab, vocab + 7]
    limits = {}
    for name, ks in (("short", short), ("every", every)):
        requests = [SamplingParams(top_k=k) for k in ks]
        state = state_after((), len(ks), vocab)
        given = np.tile(logits, (len(ks), 1)), knobs_of(*requests, vocab=vocab), state, positions(len(ks))
        kept = np.isfinite(np.asarray(distribution(*given)))
        assert np.array_equal(kept, [logits >= order[min(k, vocab) - 1] for k in ks])
        limits[name] = np.asarray(sample(*given).limit)
    assert np.array_equal(limits["short"], limits["every"][: len(short)])


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4), (1e-30, 1), (1.0, V)])
def test_top_p_keeps_the_smallest_sufficient_set_and_all_ties_at_its_edge(top_p, kept):
    logits = np.full(V, -40.0, np.float32)
    logits[[3, 8, 1, 20]] = np.log([0.5, 0.25, 0.125, 0.125])
    scores = distribution(logits[None], knobs_of(SamplingParams(top_p=top_p)), state_after(()), positions(1))
    assert np.isfinite(scores[0]).sum() == kept


def test_top_p_is_of_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    knobs = knobs_of(SamplingParams(top_k=2, top_p=0.5), vocab=4)  # the first has 0.4 of all and 0.57 of the two
    scores = distribution(logits[None], knobs, state_after((), vocab=4), positions(1))
    assert np.flatnonzero(np.isfinite(scores[0])).tolist() == [0]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (7, 0), (7, 3), (2**31 - 1, 1)])
def test_the_key_of_a_token_is_folded_from_seed_sample_and_position(seed, index):
    at = positions(300, start=40)
    tokens = draws(LOGITS[None], knobs_of(SamplingParams(), seed=seed, samples=[index]), state_after(()), at)
    base = jax.random.fold_in(jax.random.key(seed), index)
    bits = jax.jit(jax.vmap(lambda p: jax.random.bits(jax.random.fold_in(base, p), (V,), jnp.uint32)))(at)
    uniform = (np.asarray(bits, np.float64) + 0.5) / 2**32
    assert np.array_equal(tokens, np.argmax(LOGITS - np.log(-np.log1p(-uniform)), axis=-1))


def test_other_seeds_samples_and_positions_draw_other_tokens():
    state, at = state_after(()), positions(64)
    first = draws(LOGITS[None], knobs_of(SamplingParams(), seed=9), state, at)
    again = draws(LOGITS[None], knobs_of(SamplingParams(), seed=9), state, at)
    assert np.array_equal(first, again)
    others = [
        draws(LOGITS[None], knobs_of(SamplingParams(), seed=seed, samples=[index]), state, positions(64, start))
        for seed, index, start in ((9 + 2**32, 0, 0), (2**64 - 1, 0, 0), (9, 1, 0), (9, 0, 64))
    ]
    for other in others:
        assert not np.array_equal(first, other)


def test_noise_belongs_to_the_token_id_and_not_to_the_vocabulary():
    wide = np.concatenate([LOGITS, np.full(V, -np.inf, np.float32)])
    narrow_tokens = draws(LOGITS[None], knobs_of(SamplingParams()), state_after(()), positions(200))
    wide_tokens = draws(
        wide[None], knobs_of(SamplingParams(), vocab=2 * V), state_after((), vocab=2 * V), positions(200)
    )
    assert np.array_equal(narrow_tokens, wide_tokens)


def test_greedy_ignores_the_seed_and_takes_the_lowest_of_equal_tokens():
    logits = np.zeros((1, V), np.float32)
    logits[0, [5, 9]] = 2.0
    for seed in range(5):
        assert sample(logits, knobs_of(GREEDY, seed=seed), state_after(()), positions(1)).tokens[0] == 5


# --- rows, values, state ----------------------------------------------------------------------------------------------

MIXED = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(top_p=0.8, top_k=10, logprobs=0, logprobs_mode="processed"),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.2, top_k=20),
    SamplingParams(temperature=0.9, min_p=0.02, logit_bias={3: 2.0, 4: -0.5}, min_tokens=30, stop_token_ids=(1,)),
)
WORDS = ((), (), ((1, 4, 2), (7,)), ((3, 4),))


def rows_of(params, words, logits):
    """Eight steps of four rows; everything that came back, on the host."""
    knobs = make_knobs(
        params,
        vocab=V,
        prompts=[PROMPT] * 4,
        eos=(0,),
        bad_words=words,
        seeds=[11, 12, 13, 14],
        samples=[0, 1, 0, 2],
    )
    state, seen = state_after(OUTPUT, 4), []
    for position in range(8):
        tokens, state, ended, packed = step(
            logits[position], knobs, state, np.full(4, position, np.int32), np.ones(4, bool)
        )
        seen.append((np.asarray(tokens), np.asarray(ended), np.asarray(packed), np.array(state.counts)))
    return seen


def test_a_row_is_bitwise_the_same_whatever_its_neighbours_ask_for():
    logits = np.random.default_rng(2).normal(scale=2, size=(8, 4, V)).astype(np.float32)
    together = rows_of(MIXED, WORDS, logits)
    for row in range(4):
        params = [MIXED[row] if other == row else GREEDY for other in range(4)]
        words = [WORDS[row] if other == row else () for other in range(4)]
        for alone, mixed in zip(rows_of(params, words, logits), together, strict=True):
            for left, right in zip(alone, mixed, strict=True):
                assert np.array_equal(left[row], right[row])


def test_no_value_of_any_knob_compiles_anew():
    @jax.jit
    def fresh(*given):
        return sampling.step(*given)

    logits, active = np.tile(LOGITS, (2, 1)), np.ones(2, bool)
    asked = [*SAMPLED.values(), *MIXED, GREEDY]
    for first, second in zip(asked, asked[1:], strict=False):
        knobs = knobs_of(first, second, bad_words=((3,), (4, 5)), eos=(2,))
        fresh(logits, knobs, state_after((), 2), positions(2), active)
    assert fresh._cache_size() == 1


def test_rows_end_at_stop_tokens_and_limits_and_rest_when_not_active():
    logits = np.full((4, V), -1.0, np.float32)
    logits[:, 6] = 1.0
    stopping = replace(GREEDY, stop_token_ids=(6,))
    knobs = knobs_of(stopping, GREEDY, GREEDY, stopping, limits=[9, 3, 9, 9], eos=(2,))
    state = state_after((8, 6), rows=4)
    active = np.array([True, True, True, False])
    tokens, state, ended, packed = step(logits, knobs, state, positions(4), active)
    assert ended.tolist() == [True, True, False, False]  # stop token, limit, neither, resting
    assert sampling.unpack(np.asarray(packed)).tokens.tolist() == [6, 6, 6, -1]
    assert state.generated.tolist() == [3, 3, 3, 2]
    assert state.counts[:, 6].tolist() == [2, 2, 2, 1]
    assert state.recent[:, -3:].tolist() == [[8, 6, 6]] * 3 + [[-1, 8, 6]]
    assert tokens.dtype == jnp.int32


def test_end_of_sequence_is_a_stop_token_unless_ignored():
    knobs = knobs_of(GREEDY, replace(GREEDY, ignore_eos=True), eos=(2, 5))
    assert [np.flatnonzero(row).tolist() for row in knobs.stops] == [[2, 5], []]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.5, repetition_penalty=1.2)]
)
def test_rows_without_an_answer_are_flagged_and_end(params):
    logits = np.tile(LOGITS, (6, 1))
    logits[0] = np.nan
    logits[1, 17] = np.nan
    logits[2] = -np.inf
    logits[3, 4] = np.inf
    requests = [params] * 5 + [replace(params, allowed_token_ids=(9,))]
    words = [()] * 5 + [((9,),)]
    knobs = knobs_of(*requests, bad_words=None) if False else knobs_of(*requests, **{"bad_words": words})
    _, _, ended, packed = step(logits, knobs, state_after((), 6), positions(6), np.ones(6, bool))
    assert sampling.unpack(np.asarray(packed)).bad.tolist() == [True, True, True, True, False, True]
    assert ended.tolist() == [True, True, True, True, False, True]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def columns_of(logits, knobs, state=None):
    rows, vocab = logits.shape
    state = state_after((), rows, vocab) if state is None else state
    return sampling.unpack(np.asarray(step(logits, knobs, state, positions(rows), np.ones(rows, bool))[3]))


def assert_describes(columns, row, scores, token):
    """Columns of one row say what float64 says of `token` under log_softmax(scores)."""
    wanted = log_softmax(np.asarray(scores, np.float64))
    order = np.argsort(-wanted, kind="stable")[:20]
    assert columns.logprobs[row] == pytest.approx(wanted[token], abs=2e-5)
    assert columns.ranks[row] == 1 + (wanted > wanted[token]).sum()
    assert columns.top_tokens[row].tolist()[: len(order)] == order.tolist()
    np.testing.assert_allclose(columns.top_logprobs[row][: len(order)], wanted[order], atol=2e-5)


def test_raw_logprobs_are_of_the_models_own_distribution():
    logits = np.random.default_rng(8).normal(scale=2, size=(6, 50)).astype(np.float32)
    params = SamplingParams(temperature=4.0, top_k=30, logit_bias={3: 5.0}, logprobs=20)
    columns = columns_of(logits, knobs_of(*[params] * 6, vocab=50))
    assert len(set(columns.ranks.tolist())) > 1  # not only the likeliest were drawn
    for row in range(6):
        assert_describes(columns, row, logits[row], columns.tokens[row])


def test_processed_logprobs_are_of_the_distribution_that_was_sampled_from():
    params = SamplingParams(temperature=2.0, top_k=7, repetition_penalty=1.5, logprobs=5, logprobs_mode="processed")
    columns = columns_of(LOGITS[None], knobs_of(params), state_after(OUTPUT))
    with np.errstate(divide="ignore"):
        wanted = np.log(expected_probabilities(LOGITS, params))
    assert columns.logprobs[0] == pytest.approx(wanted[columns.tokens[0]], abs=2e-5)
    assert columns.top_tokens[0, :7].tolist() == np.argsort(-wanted)[:7].tolist()
    np.testing.assert_allclose(columns.top_logprobs[0, :7], np.sort(wanted)[::-1][:7], atol=2e-5)
    assert np.isneginf(columns.top_logprobs[0, 7:]).all()
    assert np.exp(columns.top_logprobs[0]).sum() == pytest.approx(1, abs=1e-5)


def test_processed_logprobs_of_a_greedy_row_are_of_the_penalised_logits():
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logprobs=5, logprobs_mode="processed")
    columns = columns_of(LOGITS[None], knobs_of(params), state_after(OUTPUT))
    assert_describes(columns, 0, adjusted_logits(LOGITS, params), columns.tokens[0])


def test_rows_that_did_not_ask_for_logprobs_get_zeros():
    columns = columns_of(np.tile(LOGITS, (2, 1)), knobs_of(GREEDY, replace(GREEDY, logprobs=1)))
    assert columns.logprobs[0] == columns.ranks[0] == 0
    assert not columns.top_tokens[0].any() and not columns.top_logprobs[0].any()
    assert columns.ranks[1] == 1 and columns.logprobs[1] < 0


def test_a_vocabulary_under_twenty_leaves_the_other_alternatives_out():
    columns = columns_of(LOGITS[None, :8], knobs_of(replace(GREEDY, logprobs=20), vocab=8))
    assert sorted(columns.top_tokens[0, :8].tolist()) == list(range(8))
    assert columns.top_tokens[0, 8:].tolist() == [-1] * 12
    assert np.isneginf(columns.top_logprobs[0, 8:]).all()


def test_scores_describe_given_targets():
    logits = np.random.default_rng(3).normal(scale=3, size=(7, 40)).astype(np.float32)
    targets = np.array([0, 39, 5, 5, 6, 7, 8], np.int32)
    logits[6, 2] = np.nan
    columns = sampling.unpack(np.asarray(score(logits, targets)))
    for row in range(6):
        assert_describes(columns, row, logits[row], targets[row])
    assert columns.tokens[:6].tolist() == logits[:6].argmax(-1).tolist()
    assert columns.bad.tolist() == [False] * 6 + [True]
    brief = sampling.unpack(np.asarray(score(logits, targets, False)))
    assert not brief.top_logprobs.any()
    assert np.array_equal(brief.logprobs[:6], columns.logprobs[:6])


# --- knobs on the host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(name):
    value = {V: 1.0} if name == "logit_bias" else (1, V)
    with pytest.raises(RequestError, match=f"{name}.*{V}"):
        knobs_of(SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([(1, 2)] * 129, "129"),
        ([tuple(range(17))], "17 tokens"),
        ([()], "0 tokens"),
        ([(1, V)], f"token id {V}"),
    ],
)
def test_bad_words_that_do_not_fit_are_refused(words, message):
    with pytest.raises(RequestError, match=f"bad_words.*{message}"):
        knobs_of(GREEDY, bad_words=words)


def test_what_is_off_is_the_cached_array_and_what_is_set_is_not():
    off = neutral(2, V)
    plain = knobs_of(GREEDY, GREEDY)
    assert all(getattr(plain, name) is getattr(off, name) for name in ("bias", "stops", "prompted", "banned"))
    biased = knobs_of(GREEDY, replace(GREEDY, logit_bias={1: 2.0}))
    assert biased.bias is not off.bias and biased.stops is off.stops
    assert not off.bias.any() and biased.bias[1, 1] == 2.0
    with pytest.raises(ValueError, match="read-only"):
        off.bias[0, 0] = 1


def test_rows_beyond_the_requests_are_neutral_and_fit_the_declared_shapes():
    knobs = knobs_of(SamplingParams(top_k=V), rows=3)
    for array, wanted in zip(jax.tree.leaves(knobs), jax.tree.leaves(sampling.abstract_knobs(3, V)), strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
    assert knobs.column("temperature").tolist() == [1, 0, 0]
    assert knobs.column("top_k").tolist() == [0, 0, 0]  # a top_k of the whole vocabulary is off
    assert knobs.greedy.tolist() == [False, True, True]
