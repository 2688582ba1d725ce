"""Decides which model has how many slices of classes whose quota does not suffice for all. Pure.

While all that models want of a quota fits into it, each has what it wants. Otherwise:

1. *Cover.* A slice that a model could have nowhere else goes before one that it could have of
   another class. Batches come last, and a model of higher priority before the others. Of equals,
   work that is there goes before work that is foreseen, and then the model of whose need the
   smallest part is covered, slice by slice.
2. *Save.* What is left goes where a chip saves most: what the model would pay for the next best
   class, or the floor that it would lack. All pay from one purse, so priority has no part in this.

Who has a slice keeps it where another would have it for little more: a move is paid for while an
engine loads. What can be relied on is covered first, then what there would be if the classes that
are shared delivered; so one that backs off is asked for by whoever needs it most. A model that
lacks slices and may choose between classes gets one that the fewest others depend on. Shares of one
quota are right; those of several are good, for such choices are not taken back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaling.policy.mix.portfolio import ClassOption, Portfolio, cheapest_portfolio
from autoscaling.policy.quotas.records import ChipQuota, Member, SlicesAsked

# Slices by model and class; only classes with a quota, and only where they are not fixed.
Shares = dict[str, dict[str, int]]
_Options = Mapping[str, Sequence[ClassOption]]
# Savings of less, in USD per hour and chip, are rounding errors.
_LEAST_SAVED = 1e-6
# What a chip saves where it is counts so many times.
_MOVE_FACTOR = 1.2
# What is left is given in steps of one part of so many at first.
_NUM_STEPS = 16


@dataclass(frozen=True, slots=True)
class Shared:
    """The `shares` of all models, and which quotas are `short`: more is wanted of them.

    `covering` is the part of the shares that covers what a model has nowhere else, and `pressing`
    the part of that for work that is there now.
    """

    shares: Shares
    covering: Shares
    pressing: Shares
    short: frozenset[ChipQuota] = frozenset()


def shares_of(
    quotas: Sequence[ChipQuota],
    members: Mapping[str, Member],
    asked: Mapping[str, SlicesAsked],
    fixed: Mapping[str, Mapping[str, int]],
) -> Shared:
    """Returns what each model is to have, by what they `asked` for.

    `fixed` are slices that models have whatever is decided here: a class of a model that is named
    there is not planned for. A model that is not in `asked` has nothing but those.
    """
    sharing = _Sharing(quotas, members, asked, fixed)
    wanted = sharing.wanted()
    short = sharing.short_of(wanted)
    if not short:
        return Shared(wanted, _copied(sharing.shares), _copied(sharing.shares))
    sharing.give_least()
    sharing.cover(sharing.reliable)
    sharing.cover(sharing.shared)
    covering = _copied(sharing.shares)
    sharing.save(sharing.shared)
    return Shared(sharing.shares, covering, sharing.pressing, short)


class _Sharing:
    """Quotas on their way to the models.

    `reliable` is what can be relied on, `shared` the same if what has a quota delivers.
    """

    def __init__(
        self,
        quotas: Sequence[ChipQuota],
        members: Mapping[str, Member],
        asked: Mapping[str, SlicesAsked],
        fixed: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._members = members
        self._asked = asked
        self._known: dict[object, Portfolio] = {}
        self._quotas = {
            model: {
                each.compute_class: each
                for each in quotas
                if model in each.models
                and each.compute_class not in fixed.get(model, {})
                and any(option.name == each.compute_class for option in asks.ideal)
            }
            for model, asks in asked.items()
        }
        self._left = {
            each: each.max_chips
            - sum(
                members[model].chips_of(each.compute_class)
                * fixed.get(model, {}).get(each.compute_class, 0)
                for model in each.models
            )
            for each in quotas
        }
        self.shares: Shares = {
            model: dict.fromkeys(classes, 0) for model, classes in self._quotas.items()
        }
        self.pressing = _copied(self.shares)
        self.reliable: _Options = {
            model: [_fixed(each, fixed.get(model, {})) for each in asks.reliable]
            for model, asks in asked.items()
        }
        self.shared: _Options = {
            model: [
                best if best.name in self._quotas[model] else sure
                for best, sure in zip(asks.ideal, self.reliable[model], strict=True)
            ]
            for model, asks in asked.items()
        }

    def wanted(self) -> Shares:
        """Returns what each model would have if no other one had anything."""
        found: Shares = {}
        for model, asks in self._asked.items():
            mixes = [
                self._cheapest(asks, options[model]).slices
                for options in (self.reliable, self.shared)
            ]
            found[model] = {name: max(mix[name] for mix in mixes) for name in self._quotas[model]}
        return found

    def short_of(self, wanted: Shares) -> frozenset[ChipQuota]:
        """Returns the quotas that do not suffice for what is wanted of them."""
        taken = dict.fromkeys(self._left, 0)
        for model, classes in wanted.items():
            for name, count in classes.items():
                taken[self._quotas[model][name]] += count * self._members[model].chips_of(name)
        return frozenset(each for each, left in self._left.items() if taken[each] > max(0, left))

    def give_least(self) -> None:
        """Gives each model what it is to have at any load."""
        for model in sorted(self._asked, key=lambda name: (-self._members[name].priority, name)):
            for option in self.shared[model]:
                if option.name in self._quotas[model]:
                    most = min(option.at_least, self._num_left(model, option.name))
                    self._give(model, option.name, most)

    def cover(self, options: _Options) -> None:
        """Gives slices to models that could not have them of another class, one by one."""
        while True:
            short = {
                model: covered
                for model, asks in self._asked.items()
                if (covered := self._covered(model, options[model])) < asks.whole
                and self._open(model, options[model])
            }
            if not short:
                return
            model = min(short, key=lambda name: self._turn(name, short[name]))
            others = [self._open(other, options[other]) for other in short if other != model]
            mine = self._open(model, options[model])
            name = min(mine, key=lambda name: (sum(name in it for it in others), mine[name], name))
            self.pressing[model][name] += short[model] < self._asked[model].pressing
            self._give(model, name, 1)

    def save(self, options: _Options) -> None:
        """Gives what is left to whoever saves most by it."""
        rooms = [
            self._room(model, name, options[model])
            for model, classes in self._quotas.items()
            for name in classes
        ]
        step = max(1, max(rooms, default=0) // _NUM_STEPS)
        costs = {model: self._mix(model, options[model], {}) for model in self._asked}
        while step:
            best = max(
                (
                    (self._worth(model, name, count, options[model], costs[model]), model, name)
                    for model in self._asked
                    for name in self._quotas[model]
                    if (count := self._num_next(model, name, step, options[model])) > 0
                ),
                default=None,
            )
            if best is None or best[0][:3] <= (0, 0, _LEAST_SAVED):
                step //= 2
                continue
            _, model, name = best
            self._give(model, name, self._num_next(model, name, step, options[model]))
            costs[model] = self._mix(model, options[model], {})

    def _num_next(self, model: str, name: str, step: int, options: Sequence[ClassOption]) -> int:
        """Returns how many slices are given next: first those that the model has already."""
        here = self._asked[model].held.get(name, 0) - self.shares[model][name]
        return min(step, self._room(model, name, options), here if here > 0 else step)

    def _turn(self, model: str, covered: float) -> tuple[bool, int, int, float, bool, str]:
        """Orders models that lack slices."""
        asks, priority = self._asked[model], self._members[model].priority
        levels = (asks.pressing, asks.need, asks.whole)
        level = next(place for place, count in enumerate(levels) if covered < count)
        part = covered / levels[level]
        has_more = any(asks.held.get(name, 0) > count for name, count in self.shares[model].items())
        return covered >= asks.need, -priority, level, part, not has_more, model

    def _covered(self, model: str, options: Sequence[ClassOption]) -> float:
        """Returns what the slices carry that the model can have, of all classes together."""
        shares = self.shares[model]
        return sum(
            each.weight * min(each.at_most, shares.get(each.name, each.at_most)) for each in options
        )

    def _open(self, model: str, options: Sequence[ClassOption]) -> dict[str, float]:
        """Returns the classes with a quota of which the model could have one more; their prices."""
        return {
            each.name: each.usd_per_hour
            for each in options
            if each.name in self._quotas[model] and self._room(model, each.name, options) > 0
        }

    def _room(self, model: str, name: str, options: Sequence[ClassOption]) -> int:
        at_most = next(each.at_most for each in options if each.name == name)
        return min(at_most - self.shares[model][name], self._num_left(model, name))

    def _num_left(self, model: str, name: str) -> int:
        num_chips = self._members[model].chips_of(name)
        return max(0, self._left[self._quotas[model][name]]) // num_chips

    def _give(self, model: str, name: str, count: int) -> None:
        self.shares[model][name] += count
        self._left[self._quotas[model][name]] -= count * self._members[model].chips_of(name)

    def _mix(
        self, model: str, options: Sequence[ClassOption], more: Mapping[str, int]
    ) -> Portfolio:
        """Returns the cheapest mix of a model within its shares, and so many slices `more`."""
        asks, shares = self._asked[model], self.shares[model]
        bounded = [
            _at_most(each, shares[each.name] + more.get(each.name, 0))
            if each.name in shares
            else each
            for each in options
        ]
        return self._cheapest(asks, bounded)

    def _cheapest(self, asks: SlicesAsked, options: Sequence[ClassOption]) -> Portfolio:
        """Returns the cheapest mix, kept: what one model gets changes nothing for the others."""
        bounds = asks.whole, asks.floor, asks.max_slices
        asked = (*bounds, tuple(options))
        if asked not in self._known:
            whole, floor, max_slices = bounds
            self._known[asked] = cheapest_portfolio(whole, floor, options, max_slices)
        return self._known[asked]

    def _worth(
        self, model: str, name: str, count: int, options: Sequence[ClassOption], now: Portfolio
    ) -> tuple[float, float, float, bool, int]:
        """Returns what a chip of `count` more slices is worth; what is less comes later."""
        then = self._mix(model, options, {name: count})
        member = self._members[model]
        has_it = self._asked[model].held.get(name, 0) > self.shares[model][name]
        num_chips = count * member.chips_of(name)
        saved_usd = (now.usd_per_hour - then.usd_per_hour) / num_chips
        return (
            (now.missing - then.missing) / num_chips,
            (now.unsafe - then.unsafe) / num_chips,
            round(saved_usd * (_MOVE_FACTOR if has_it else 1.0), 6),
            has_it,
            member.priority,
        )


def _copied(shares: Shares) -> Shares:
    return {model: dict(classes) for model, classes in shares.items()}


def _fixed(option: ClassOption, fixed: Mapping[str, int]) -> ClassOption:
    if option.name not in fixed:
        return option
    return replace(option, at_least=fixed[option.name], at_most=fixed[option.name])


def _at_most(option: ClassOption, count: int) -> ClassOption:
    most = min(option.at_most, count)
    return replace(option, at_least=min(option.at_least, most), at_most=most)
