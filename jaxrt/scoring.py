"""Scoring: the log-probability of every token of a given text, by the prefill programs that generation uses."""

from collections.abc import Sequence
from typing import Any

from jaxrt import knobs as knob_arrays
from jaxrt.edits import Lowered, Places, check, lower
from jaxrt.errors import ExecutionError, RequestError
from jaxrt.interventions import Intervention
from jaxrt.prompts import Request, requests_of
from jaxrt.requests import SamplingParams, Score
from jaxrt.sampling import unpack
from jaxrt.sessions.model import XlaModel
from jaxrt.sessions.session import XlaSession


def score(model: XlaModel, texts: Any, interventions: Sequence[Intervention] = ()) -> list[Score]:
    """One Score for each text or list of token ids, in a session of its own; no other session is touched.

    interventions: their rows are the places of the texts.

    Raises: RequestError, CapacityError before anything is dispatched.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise RequestError(
            f"texts of type {type(texts).__name__}", expected="a list of texts, or of lists of token ids"
        )
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = [requests_of(model, text, params, None, None, room=0) for text in texts]
    if not all(single for _, single in found):
        raise RequestError("a list of texts within the list", expected="a list of texts, or of lists of token ids")
    requests = [request for (request,), _ in found]
    changes = check(model.config, interventions, len(texts))
    session = XlaSession(model)
    try:
        return [
            _score(
                session, request.tokens, text if isinstance(text, str) else "", _edits(model, changes, requests, row)
            )
            for row, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]
    finally:
        session.close()


def _edits(model: XlaModel, changes: Sequence[Intervention], requests: Sequence[Request], row: int) -> Lowered:
    """What the interventions do to one of the texts."""
    if not changes:
        return Lowered()
    places = Places(tuple(range(len(requests))), tuple(len(request.tokens) for request in requests))
    return lower(model.config, changes, places, "prefill").row(row).placed(model.device)


def _score(session: XlaSession, tokens: tuple[int, ...], text: str, edits: Lowered) -> Score:
    knobs = knob_arrays.neutral(1, session.model.config.vocab)
    session.start_anew(len(tokens))
    columns = unpack(session.admit((0,), tokens, [knobs], score=1, edits=edits).read_scores())
    before = len(tokens) - 1  # the last position has no token to score
    if columns.bad[:before].any():
        raise ExecutionError("the logits are NaN or infinite", expected="finite ones", fix="check the weights")
    return Score(
        tokens=tokens,
        logprobs=(None, *(float(value) for value in columns.logprobs[:before])),
        greedy=(None, *(bool(g == t) for g, t in zip(columns.tokens[:before], tokens[1:], strict=True))),
        text=text,
    )
