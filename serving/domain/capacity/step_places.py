"""How many sequences an engine may have, for its steps to keep an objective. Pure.

An engine takes longer over each step the more sequences it has. With as many as its memory has room
for it gives the most tokens, and none of its answers keeps the objective for later tokens. What is
too many depends on prompts and answers of the moment, so it is measured: by Little's law as many as
the tokens that it gives in a second, times the seconds that one may take.
"""

import math
from dataclasses import dataclass, replace

# Of the objective for later tokens, what a token may take on average: of one engine's answers some
# take longer than others. Chosen on the conversations that settings are chosen on
# (docs/results/policies.md): with 0.8 service is 0.1 points better at 1.05 times the cost, with 1
# it is 0.1 to 0.4 points worse.
PLACES_SHARE = 0.9
# How often it is looked at, in seconds, and in how many seconds of steps the past counts half. An
# answer is as slow as all of its steps together: one second of long prompts says little.
LOOK_S, HALF_LIFE_S = 1.0, 5.0
# With fewer seconds of steps nothing is known yet: the first steps of a burst are long.
LEAST_BUSY_S = 0.5
# Of what its scheduler may have, one of so many an engine always may: steps that are too long then
# are so for other reasons, as prompts are, or an objective that no engine keeps.
LEAST_OF = 16
# If they are too long with no more than twice that, it has what there is for so many seconds: no
# request is to wait for an objective that cannot be kept.
OPEN_S = 60.0
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class StepSums:
    """What an engine has done: output tokens, steps, and the seconds in these.

    `num_turns` are the steps as often as a sequence had tokens by one on average: as many as steps,
    and more where drafts are accepted besides.
    """

    num_tokens: float = 0.0
    num_turns: float = 0.0
    busy_s: float = 0.0

    def then(self, done: "StepSums") -> "StepSums":
        """Returns these and what was done after them; the longer ago, the less it counts."""
        kept = 0.5 ** (done.busy_s / HALF_LIFE_S)
        return StepSums(
            kept * self.num_tokens + done.num_tokens,
            kept * self.num_turns + done.num_turns,
            kept * self.busy_s + done.busy_s,
        )


@dataclass(frozen=True, slots=True)
class Places:
    """How many sequences an engine may have, by what it `lately` did.

    Until `open_until_s` nothing it does changes that.
    """

    num: int
    lately: StepSums = StepSums()
    open_until_s: float = -math.inf

    def after(self, done: StepSums, now_s: float, *, most: int, token_s: float) -> "Places":
        """Returns what it may have by what it has done since the last look, `most` at most.

        A token may take `token_s` seconds on average. While tokens take longer, it comes down to
        what the engine would keep that with. While they do not, it is never less than before: an
        engine that has little to do says nothing of what it could. It goes half of the way: after a
        second without new prompts steps are short, and many at once would make them long.
        """
        lately = self.lately.then(done)
        same = replace(self, lately=lately)
        if lately.num_tokens <= 0 or lately.busy_s < LEAST_BUSY_S or now_s < self.open_until_s:
            return same
        kept = min(lately.num_tokens / lately.busy_s * token_s, most)
        if lately.busy_s <= token_s * lately.num_turns:
            # Rounded up, since of one or two it would else never become more.
            more = math.ceil((self.num + kept) / 2 - _ROUNDING)
            return replace(same, num=max(self.num, more))
        least = max(1, most // LEAST_OF)
        if kept >= least or lately.num_tokens > 2 * least * lately.num_turns:
            fewer = min(self.num, (kept + min(self.num, 2 * kept)) / 2)
            return replace(same, num=max(int(fewer + _ROUNDING), least))
        return same if self.num > least else Places(most, lately, now_s + OPEN_S)
