"""Several models over classes whose chips they share: what is there is counted, not planned."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.chip_book import ChipBook
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy.rules import Rules
from autoscaling.records import Plan, SliceView
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState
from tests.autoscaling.policy.policy_world import PROFILE, RULES, World


@dataclass
class SharedWorld:
    """Worlds of models, and quotas that bind them whatever they plan."""

    quotas: tuple[ChipQuota, ...]
    members: Mapping[str, Member]
    worlds: Mapping[str, World]

    @classmethod
    def of(
        cls,
        max_chips: Mapping[str, int],
        members: tuple[Member, ...],
        terms: Mapping[str, tuple[ComputeClass, ...]],
        rules: Rules = RULES,
    ) -> "SharedWorld":
        """Models by `members` with their `terms`; quotas by class, for all of them."""
        everybody = frozenset(each.model for each in members)
        quotas = tuple(ChipQuota(name, most, everybody) for name, most in max_chips.items())
        worlds = {
            each.model: World(SlicewisePolicy(PROFILE, terms[each.model], rules), terms[each.model])
            for each in members
        }
        shared = cls(quotas, {each.model: each for each in members}, worlds)
        for model, world in worlds.items():
            world.has_room = lambda each, model=model: shared.has_room(model, each)
        return shared

    def has_room(self, model: str, wanted: SliceView) -> bool:
        """Whether the cloud gives one more slice to the model."""
        quota = next((it for it in self.quotas if it.compute_class == wanted.compute_class), None)
        if quota is None:
            return True
        return self.chips(quota.compute_class) + self.members[model].num_chips <= quota.max_chips

    def chips(self, name: str) -> int:
        """The chips of a class that are held."""
        return sum(
            self.members[model].num_chips
            for model, world in self.worlds.items()
            for each in world.slices
            if each.compute_class == name and each.state != SliceState.PROVISIONING
        )

    def step(
        self, rates: Mapping[str, float], waiting: Mapping[str, int] | None = None
    ) -> Mapping[str, Plan]:
        """One tick of all models, each planning after those that come before it."""
        num_waiting = {model: (waiting or {}).get(model, 0) for model in self.worlds}
        asked = {
            model: world.policy.ask(world.tick(rates[model], num_waiting=num_waiting[model]))
            for model, world in self.worlds.items()
        }
        book = ChipBook(self.quotas, tuple(self.members.values()), asked, {})
        plans = {}
        for model, share in book.in_turn(self.worlds):
            plans[model] = self.worlds[model].policy.plan(share)
            book.take(model, plans[model].targets)
        for model, plan in plans.items():
            self.worlds[model].carry_out(plan)
        return plans

    def run(self, rates: Mapping[str, float], for_s: float) -> Mapping[str, Plan]:
        for _ in range(round(for_s / 10.0)):
            plans = self.step(rates)
        return plans

    def ready(self, name: str | None = None) -> dict[str, int]:
        return {model: world.ready(name) for model, world in self.worlds.items()}
