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
advance = jax.jit(sampling.advance, donate_argnums=0)
score = jax.jit(sampling.score)
initial_state = jax.jit(sampling.initial_state, static_argnums=(0, 1))


@jax.jit
def sample(logits, knobs, state, positions):
    """What was sampled, and where tokens were kept by the filters."""
    sampled = sampling.sample(logits, knobs, state, positions)
    return sampled, sampling.distribution(sampled, knobs)


@jax.jit
def draws(logits, knobs, state, start):
    """DRAWS tokens of a single row, at the positions from `start` on."""
    at = start + jnp.arange(DRAWS)
    return jax.vmap(lambda position: sampling.sample(logits, knobs, state, position[None]).tokens[0])(at)


def knobs_of(*requests, vocab=V, bad_words=(), seed=3, **more):
    count = len(requests)
    given = {"prompts": [PROMPT] * count, "eos": (), "seeds": [seed] * count, "samples": [0] * count}
    return make_knobs(requests, vocab=vocab, bad_words=[bad_words] * count, **(given | more))


def state_after(tokens, rows=1, vocab=V):
    state = initial_state(rows, vocab)
    for token in tokens:
        state = advance(state, np.full(rows, token, np.int32), np.ones(rows, bool))
    return state


def kept(logits, params):
    """The tokens that the filters leave of one row, and the scores of all."""
    scores = np.asarray(sample(logits[None], knobs_of(params), state_after(()), FIRST)[1])[0]
    return np.flatnonzero(np.isfinite(scores)).tolist(), scores


FIRST = np.zeros(1, np.int32)  # positions of a single row


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
    tokens = np.asarray(draws(LOGITS[None], knobs, state_after(OUTPUT), 0))
    assert p_value(tokens, expected_probabilities(LOGITS, params, eos=(7,))) > 1e-4


def test_bad_words_are_never_completed():
    # of one token; completed by it; of another past; too long for the output so far
    words = ((10,), (1, 4, 2), (2, 4, 3), (9, 4, 5, 4, 6, 1, 4, 8))
    tokens = np.asarray(draws(LOGITS[None], knobs_of(SamplingParams(), bad_words=words), state_after(OUTPUT), 0))
    expected = expected_probabilities(LOGITS, SamplingParams(), words)
    assert list(np.flatnonzero(expected == 0)) == [2, 10]
    assert p_value(tokens, expected) > 1e-4


def test_the_longest_bad_word_is_matched_over_all_its_tokens():
    past = tuple(range(sampling.MAX_BAD_WORD_TOKENS - 1))
    word, other = (*past, 20), (5, *past[1:], 21)
    banned = sample(np.zeros((1, V), np.float32), knobs_of(GREEDY, bad_words=(word, other)), state_after(past), FIRST)[
        0
    ]
    assert np.flatnonzero(np.isneginf(banned.adjusted[0])).tolist() == [20]


def test_the_chi_squared_test_would_notice_another_temperature():
    tokens = np.asarray(draws(LOGITS[None], knobs_of(SamplingParams(temperature=0.95)), state_after(OUTPUT), 0))
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
    tokens, scores = kept(logits, params)
    assert tokens == np.flatnonzero(wanted).tolist()
    np.testing.assert_allclose(softmax(scores.astype(np.float64)), wanted, rtol=2e-5, atol=1e-12)


def test_every_top_k_keeps_exactly_the_largest_whichever_way_it_is_found():
    vocab, rows = 200, 64
    logits = np.random.default_rng(1).normal(size=vocab).astype(np.float32)
    order = np.sort(logits)[::-1]
    short = [*range(1, sampling.SHORT_TOP_K + 1)]
    long = [*short[:40], *range(sampling.SHORT_TOP_K + 1, vocab, 6)[:22], vocab - 1, vocab + 7]
    limits = []
    for ks in (short, long):
        knobs = knobs_of(*[SamplingParams(top_k=k) for k in ks], vocab=vocab)
        state, at = initial_state(rows, vocab), np.zeros(rows, np.int32)
        sampled, scores = sample(np.tile(logits, (rows, 1)), knobs, state, at)
        assert np.array_equal(np.isfinite(scores), [logits >= order[min(k, vocab) - 1] for k in ks])
        limits.append(np.asarray(sampled.limit))
    assert np.array_equal(limits[0][:40], limits[1][:40])


@pytest.mark.parametrize(("top_p", "count"), [(0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4), (1e-30, 1), (1.0, V)])
def test_top_p_keeps_the_smallest_sufficient_set_and_all_ties_at_its_edge(top_p, count):
    logits = np.full(V, -40.0, np.float32)
    logits[[3, 8, 1, 20]] = np.log([0.5, 0.25, 0.125, 0.125])
    assert len(kept(logits, SamplingParams(top_p=top_p))[0]) == count


def test_top_p_is_of_what_top_k_left():
    logits = np.full(V, -np.inf, np.float32)
    logits[:4] = np.log([0.4, 0.3, 0.2, 0.1])  # the first has 0.4 of all, and 0.57 of the first two
    assert kept(logits, SamplingParams(top_k=2, top_p=0.5))[0] == [0]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (7, 0), (7, 3), (2**31 - 1, 1)])
def test_the_key_of_a_token_is_folded_from_seed_sample_and_position(seed, index):
    knobs = knobs_of(SamplingParams(), seed=seed, samples=[index])
    base = jax.random.fold_in(jax.random.key(seed), index)
    for position in (0, 1, 700):
        bits = jax.random.bits(jax.random.fold_in(base, position), (V,), jnp.uint32)
        gumbel = -np.log(-np.log1p(-(np.asarray(bits, np.float64) + 0.5) / 2**32))
        token = sample(LOGITS[None], knobs, state_after(()), np.array([position], np.int32))[0].tokens[0]
        assert token == np.argmax(LOGITS + gumbel)


def test_other_seeds_samples_and_positions_draw_other_tokens():
    def tokens(seed=9, index=0, start=0):
        knobs = knobs_of(SamplingParams(), seed=seed, samples=[index])
        return np.asarray(draws(LOGITS[None], knobs, state_after(()), start))

    assert np.array_equal(tokens(), tokens())
    assert np.array_equal(tokens()[5:], tokens(start=5)[:-5])
    for other in (tokens(seed=9 + 2**32), tokens(seed=2**64 - 1), tokens(index=1), tokens(start=1)):
        assert np.mean(tokens() == other) < 0.2


def test_noise_belongs_to_the_token_id_and_not_to_the_vocabulary():
    narrow, wide = np.tile(LOGITS, (4, 1)), np.full((4, 2 * V), -np.inf, np.float32)
    wide[:, :V] = narrow
    for start in range(0, 40, 4):
        at, active = np.arange(start, start + 4, dtype=np.int32), np.ones(4, bool)
        found = [
            step(logits, knobs_of(*[SamplingParams()] * 4, vocab=vocab), state_after((), 4, vocab), at, active)[0]
            for logits, vocab in ((narrow, V), (wide, 2 * V))
        ]
        assert np.array_equal(*found)


def test_greedy_ignores_the_seed_and_takes_the_lowest_of_equal_tokens():
    logits = np.zeros((1, V), np.float32)
    logits[0, [5, 9]] = 2.0
    for seed in range(5):
        assert sample(logits, knobs_of(GREEDY, seed=seed), state_after(()), FIRST)[0].tokens[0] == 5


# --- rows, values, state ----------------------------------------------------------------------------------------------

MIXED = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(top_p=0.8, top_k=10, logprobs=0, logprobs_mode="processed"),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.2, top_k=20, logprobs=20, logprobs_mode="processed"),
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
    logits[0, :, 2] = 9.0  # the end of a bad word of one row
    logits[:, :, ::5] = -60.0  # too unlikely for any top_p under 1
    together = rows_of(MIXED, WORDS, logits)
    for row in range(4):
        params = [MIXED[row] if other == row else GREEDY for other in range(4)]
        words = [WORDS[row] if other == row else () for other in range(4)]
        for alone, mixed in zip(rows_of(params, words, logits), together, strict=True):
            for left, right in zip(alone, mixed, strict=True):
                assert np.array_equal(left[row], right[row])


def test_no_value_of_any_knob_compiles_anew():
    def run(*requests):
        knobs = knobs_of(*requests, bad_words=((3,), (4, 5)), eos=(2,))
        step(np.tile(LOGITS, (4, 1)), knobs, state_after((), 4), np.arange(4, dtype=np.int32), np.ones(4, bool))

    run(*[GREEDY] * 4)
    compiled = step._cache_size()
    asked = [*SAMPLED.values(), *MIXED, GREEDY]
    for four in zip(asked, asked[1:], asked[2:], asked[3:], strict=False):
        run(*four)
    assert step._cache_size() == compiled


def test_rows_end_at_stop_tokens_and_limits_and_rest_when_not_active():
    logits = np.full((4, V), -1.0, np.float32)
    logits[:, 6] = 1.0
    stopping = replace(GREEDY, stop_token_ids=(6,))
    knobs = knobs_of(stopping, GREEDY, GREEDY, stopping, limits=[9, 3, 9, 9], eos=(2,))
    state = state_after((8, 6), rows=4)
    active = np.array([True, True, True, False])
    tokens, state, ended, packed = step(logits, knobs, state, np.zeros(4, np.int32), active)
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
    for cause, bad in ((np.nan, True), (np.inf, True), (-np.inf, False)):
        logits = np.tile(LOGITS, (4, 1))
        logits[0, 17] = cause
        logits[1] = cause
        requests = [params, params, params, replace(params, allowed_token_ids=(9,))]
        knobs = make_knobs(
            requests,
            vocab=V,
            prompts=[PROMPT] * 4,
            eos=(),
            bad_words=[(), (), (), ((9,),)],
            seeds=[1] * 4,
            samples=[0] * 4,
        )
        _, _, ended, packed = step(logits, knobs, state_after((), 4), np.arange(4, dtype=np.int32), np.ones(4, bool))
        assert sampling.unpack(np.asarray(packed)).bad.tolist() == [bad, True, False, True]
        assert ended.tolist() == [bad, True, False, True]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def columns_of(logits, *requests, output=()):
    """Columns of four rows, the last request repeated."""
    requests = [*requests, *requests[-1:] * (4 - len(requests))]
    vocab = logits.shape[-1]
    at, active = np.arange(4, dtype=np.int32), np.ones(4, bool)
    knobs, state = knobs_of(*requests, vocab=vocab), state_after(output, 4, vocab)
    return sampling.unpack(np.asarray(step(np.broadcast_to(logits, (4, vocab)), knobs, state, at, active)[3]))


def assert_describes(columns, row, scores, token):
    """Columns of one row say what float64 says of `token` under log_softmax(scores)."""
    wanted = log_softmax(np.asarray(scores, np.float64))
    order = np.argsort(-wanted, kind="stable")[:20]
    assert columns.logprobs[row] == pytest.approx(wanted[token], abs=2e-5)
    assert columns.ranks[row] == 1 + (wanted > wanted[token]).sum()
    assert columns.top_tokens[row].tolist()[: len(order)] == order.tolist()
    np.testing.assert_allclose(columns.top_logprobs[row][: len(order)], wanted[order], atol=2e-5)


def test_raw_logprobs_are_of_the_models_own_distribution():
    logits = np.random.default_rng(8).normal(scale=2, size=(4, 2 * V)).astype(np.float32)
    params = SamplingParams(temperature=4.0, top_k=30, logit_bias={3: 5.0}, logprobs=20)
    columns = columns_of(logits, params)
    assert len(set(columns.ranks.tolist())) > 1  # not only the likeliest were drawn
    for row in range(4):
        assert_describes(columns, row, logits[row], columns.tokens[row])


def test_processed_logprobs_are_of_the_distribution_that_was_sampled_from():
    params = SamplingParams(temperature=2.0, top_k=7, repetition_penalty=1.5, logprobs=5, logprobs_mode="processed")
    columns = columns_of(LOGITS, params, output=OUTPUT)
    with np.errstate(divide="ignore"):
        wanted = np.log(expected_probabilities(LOGITS, params))
    assert columns.logprobs[0] == pytest.approx(wanted[columns.tokens[0]], abs=2e-5)
    assert columns.top_tokens[0, :7].tolist() == np.argsort(-wanted)[:7].tolist()
    np.testing.assert_allclose(columns.top_logprobs[0, :7], np.sort(wanted)[::-1][:7], atol=2e-5)
    assert np.isneginf(columns.top_logprobs[0, 7:]).all()
    assert np.exp(columns.top_logprobs[0]).sum() == pytest.approx(1, abs=1e-5)


def test_processed_logprobs_of_a_greedy_row_are_of_the_penalised_logits():
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logprobs=5, logprobs_mode="processed")
    columns = columns_of(LOGITS, params, output=OUTPUT)
    assert_describes(columns, 0, adjusted_logits(LOGITS, params), columns.tokens[0])


def test_rows_that_did_not_ask_for_logprobs_get_zeros():
    columns = columns_of(LOGITS, GREEDY, replace(GREEDY, logprobs=1))
    assert columns.logprobs[0] == columns.ranks[0] == 0
    assert not columns.top_tokens[0].any() and not columns.top_logprobs[0].any()
    assert columns.ranks[1] == 1 and columns.logprobs[1] < 0


def test_a_vocabulary_under_twenty_leaves_the_other_alternatives_out():
    columns = sampling.unpack(np.asarray(score(LOGITS[None, :8], FIRST)))
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
