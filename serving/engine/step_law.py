"""Fits the law of an engine's steps to what they took. Pure: times come in.

A weighted least squares fit of step times, the latest with the most weight, to the sequences and
prompt tokens in them. Taken are means of eight steps: which step computed which part of a prompt
nobody tells. An engine whose load does not change shows one sum of the three parts and not the
parts. So the fit holds to the parts of the usual law, as far as steps do not say otherwise.
"""

import numpy as np

from serving.domain.capacity.step_law import USUAL_LAW, StepLaw

_WINDOW_STEPS = 8
# In so many windows the past counts half; of fewer than these no law is known.
_HALF_LIFE_WINDOWS, _LEAST_WINDOWS = 512.0, 24
# To be off the usual part by all of it counts as much as this share of all squared step times: what
# explains more of them is believed.
_HELD = 1e-4
# Of the usual law's parts, scaled to the engine, the least and the most that is believed.
_LEAST_PART, _MOST_PART = 0.05, 20.0
# Steps that take so many times what they should were held up by something else, unless it goes on.
_ODD, _ODD_IN_A_ROW = 4.0, 8


class StepLawFit:
    """The law of one engine, as far as its steps have shown it.

    `law` is `None` while too little was seen.
    """

    def __init__(self) -> None:
        self.law: StepLaw | None = None
        self._num_steps = 0
        self._seconds = self._sequences = self._prompt_tokens = 0.0  # in them
        self._num_windows = 0
        self._num_odd = 0
        # Sums over windows, by their weights, of products of what is in a step with itself and with
        # its time, and of the time's square.
        self._products = np.zeros((3, 3))
        self._with_time = np.zeros(3)
        self._time_squares = 0.0

    def took(self, step_s: float, num_sequences: float, prompt_tokens: float) -> None:
        """Takes in a step that followed another at once."""
        self._num_steps += 1
        self._seconds += step_s
        self._sequences += num_sequences
        self._prompt_tokens += prompt_tokens
        count = self._num_steps
        if count >= _WINDOW_STEPS:
            self._take(self._seconds / count, self._sequences / count, self._prompt_tokens / count)
            self._num_steps = 0
            self._seconds = self._sequences = self._prompt_tokens = 0.0

    def _take(self, time_s: float, num_sequences: float, prompt_tokens: float) -> None:
        law = self.law
        if law is not None and time_s > _ODD * law.step_s(num_sequences, prompt_tokens):
            self._num_odd += 1
            if self._num_odd <= _ODD_IN_A_ROW:
                return
        else:
            self._num_odd = 0
        inside = np.array([1.0, num_sequences, prompt_tokens])
        kept = 0.5 ** (1 / _HALF_LIFE_WINDOWS)
        self._products = kept * self._products + np.outer(inside, inside)
        self._with_time = kept * self._with_time + time_s * inside
        self._time_squares = kept * self._time_squares + time_s**2
        self._num_windows += 1
        if self._num_windows >= _LEAST_WINDOWS and self._time_squares > 0:
            self.law = self._fitted()

    def _fitted(self) -> StepLaw:
        usual = np.array(USUAL_LAW)
        # As if only its pace were its own.
        usual *= (usual @ self._with_time) / (usual @ self._products @ usual)
        parts = _bounded_fit(
            self._products * np.outer(usual, usual),
            self._with_time * usual,
            _HELD * self._time_squares,
        )
        return StepLaw(*(parts * usual).tolist())


def _bounded_fit(products: np.ndarray, with_time: np.ndarray, held: float) -> np.ndarray:
    """Returns the parts that fit best, in multiples of the usual ones, each within its bounds."""
    products = products + held * np.eye(3)
    with_time = with_time + held
    parts = np.full(3, np.nan)
    free = np.ones(3, np.bool_)
    while free.any():
        fixed = ~free
        rest = with_time[free] - products[np.ix_(free, fixed)] @ parts[fixed]
        found = np.linalg.solve(products[np.ix_(free, free)], rest)
        bounded = np.clip(found, _LEAST_PART, _MOST_PART)
        wrong = np.abs(found - bounded)
        parts[free] = bounded
        if not wrong.any():
            break
        # The one that is most beyond its bound stays there, and the others are fitted anew.
        free[np.flatnonzero(free)[wrong.argmax()]] = False
    return parts
