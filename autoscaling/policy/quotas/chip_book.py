"""The book of one decision: models take from quotas in turn, and nothing is given twice. Pure.

A share (`shares`) is what a model is to have. What it may have *now* is bounded by the chips that
others still have: a model that is to give slices up for money only keeps them until it has others
in their place, and until then nobody relies on them. Where another model lacks slices they may
have to go at once (`giving`). What no share needs is for whoever comes first, by priority:
slices for a need that is foreseen, or in place of those that end soon.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autoscaling.policy.quotas.giving import Giving
from autoscaling.policy.quotas.records import ChipQuota, ChipShare, Member, SlicesAsked
from autoscaling.policy.quotas.shares import shares_of


class ChipBook:
    """Who has what of the quotas at one decision.

    Each model `in_turn` gets its share, plans, and says by `take` what it planned.
    """

    def __init__(
        self,
        quotas: Sequence[ChipQuota],
        members: Sequence[Member],
        asked: Mapping[str, SlicesAsked | None],
        fixed: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Takes what each model asked for; `None`: its last plan stands, and is in `fixed`.

        `fixed` are slices by model and class that no quota decides about.
        """
        self._members = {each.model: each for each in members}
        self._quotas = quotas
        self._asked = {
            model: each
            for model, each in asked.items()
            if each is not None and model in self._members
        }
        self._fixed = fixed
        self._shared = shares_of(quotas, self._members, self._asked, fixed)
        self._given_up = {each: self._goes_at_once(each) for each in quotas}
        self._room = {each: each.max_chips - self._kept_chips(each) for each in quotas}
        self._spare = {each: each.max_chips - self._promised_chips(each) for each in quotas}

    def in_turn(self, models: Iterable[str]) -> Iterator[tuple[str, ChipShare]]:
        """Yields models by `place_of` them, each with its share after those before it took.

        The caller takes for one before it asks for the next.
        """
        for model in sorted(models, key=self.place_of):
            yield model, self.share_of(model)

    def place_of(self, model: str) -> tuple[int, str]:
        """The place of a model in the order in which they take, as a key to sort by."""
        member = self._members.get(model)
        return (0 if member is None else -member.priority), model

    def share_of(self, model: str) -> ChipShare:
        """Returns what the model may have, after what the models before it took."""
        most: dict[str, int] = {}
        given_up: dict[str, int] = {}
        full, words = set(), []
        for quota in self._quotas_of(model):
            name = quota.compute_class
            num_chips = self._members[model].chips_of(name)
            share = self._shared.shares[model][name]
            kept = self._kept(quota, model)
            spare = max(0, self._spare[quota]) // num_chips
            room = max(0, self._room[quota]) // num_chips
            most[name] = min(share + spare, kept + room)
            if goes := self._given_up[quota].get(model, 0):
                given_up[name] = goes
            if quota.max_chips - self._chips_in_use(quota) < num_chips:
                full.add(name)
            if quota in self._shared.short:
                words.append(self._words(quota, model, most[name]))
        return ChipShare(most, given_up, frozenset(full), "; ".join(words))

    def take(self, model: str, targets: Mapping[str, int]) -> None:
        """Notes the slices by class that the model planned."""
        for quota in self._quotas_of(model):
            name = quota.compute_class
            num_chips = self._members[model].chips_of(name)
            target = targets.get(name, 0)
            self._room[quota] -= num_chips * max(0, target - self._kept(quota, model))
            promised = max(self._shared.shares[model][name], self._kept(quota, model))
            self._spare[quota] -= num_chips * max(0, target - promised)

    def _quotas_of(self, model: str) -> list[ChipQuota]:
        shares = self._shared.shares.get(model, {})
        return [
            each for each in self._quotas if model in each.models and each.compute_class in shares
        ]

    def _goes_at_once(self, quota: ChipQuota) -> Mapping[str, int]:
        """Returns the slices that models give up now, because others lack them."""
        name = quota.compute_class
        asked = {
            model: each
            for model, each in self._asked.items()
            if model in quota.models and name in self._shared.shares[model]
        }
        num_free = quota.max_chips - self._held_chips(quota)
        return Giving(quota, self._members, asked, self._shared, num_free).given_up()

    def _held_chips(self, quota: ChipQuota) -> int:
        """Returns the chips of slices that are there and stay, or are fixed."""
        name = quota.compute_class
        return sum(self._chips(quota, each, self._held(each, name)) for each in quota.models)

    def _chips(self, quota: ChipQuota, model: str, num_slices: int) -> int:
        """Returns the chips of so many of the model's slices of the quota's class."""
        return self._members[model].chips_of(quota.compute_class) * num_slices

    def _held(self, model: str, name: str) -> int:
        fixed = self._fixed.get(model, {})
        if name in fixed:
            return fixed[name]
        asked = self._asked.get(model)
        return 0 if asked is None else asked.held.get(name, 0)

    def _kept(self, quota: ChipQuota, model: str) -> int:
        goes = self._given_up[quota].get(model, 0)
        return self._held(model, quota.compute_class) - goes

    def _kept_chips(self, quota: ChipQuota) -> int:
        return sum(self._chips(quota, each, self._kept(quota, each)) for each in quota.models)

    def _promised_chips(self, quota: ChipQuota) -> int:
        """Returns the chips of all shares, and of what is kept beyond them for the time being."""
        name = quota.compute_class
        shares = {each: self._shared.shares.get(each, {}).get(name, 0) for each in quota.models}
        return sum(
            self._chips(quota, each, max(self._kept(quota, each), share))
            for each, share in shares.items()
        )

    def _chips_in_use(self, quota: ChipQuota) -> int:
        name = quota.compute_class
        leaving = sum(
            self._chips(quota, model, each.leaving.get(name, 0))
            for model, each in self._asked.items()
            if model in quota.models
        )
        return self._held_chips(quota) + leaving

    def _words(self, quota: ChipQuota, model: str, most: int) -> str:
        name = quota.compute_class
        others = [
            f"{count} with {each}"
            for each in sorted(quota.models - {model})
            if (count := self._chips(quota, each, self._kept(quota, each)))
        ]
        text = f"of the {quota.max_chips} chips of {name} {most} slices at most are for it now"
        text += f" ({', '.join(others)})" if others else ""
        if goes := self._given_up[quota].get(model, 0):
            text += f"; {goes} go at once to who lacks them"
        return text
