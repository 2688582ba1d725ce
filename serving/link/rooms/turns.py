"""Whose turn it is at one engine, of the tenants of all its gateways, and who leaves room there.

Owns what each tenant has had of the engine, who waits for it and who has come lately. Does not own
the places (`dealing`). Pure: no clock, no I/O.

The turns are those of `tenant_shares`. Besides, some room is kept for those who come now and then
and have nothing waiting: who has more waiting than it may have would else have taken all of it.
"""

import itertools
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TypeVar

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.usage.tenant_shares import TenantShares, work_of
from serving.link.messages import TokenRequest

# Whose work it is: the class of service and the tenant.
EngineAccount = tuple[int, str]
_Key = TypeVar("_Key")

# Room is kept for who has come within so many seconds.
LATELY_S = 10.0
# Who has had something waiting for so long asks for more than it gets; before, it has only asked
# for its place. A step with long prompts takes half a second: with 0.25 s in place of two, one slow
# moment turned those who ask for little into such ones. It stays so for a while when nothing waits.
ASKING_S = 2.0
STAYS_S = 1.0
# So many are told of.
_MOST_LEAVING = 16
# Of what all of its class had lately, who had less is forgotten.
_LEAST_PART = 1e-3


@dataclass(slots=True)
class _ClassUse:
    """What the tenants of a class had, each with its weight, and the sums."""

    tenants: dict[str, tuple[float, float]] = field(default_factory=dict)
    work: float = 0.0
    weight: float = 0.0

    def add(self, tenant: str, work: float, weight: float) -> None:
        before, old_weight = self.tenants.get(tenant, (0.0, 0.0))
        self.tenants[tenant] = before + work, weight
        self.work += work
        self.weight += weight - old_weight


class RecentUse:
    """The work that accounts have had: what is `LATELY_S` old counts half."""

    def __init__(self) -> None:
        self._classes: dict[int, _ClassUse] = {}  # all work in a unit that shrinks
        self._began_s = -math.inf  # when the unit was 1

    def add(self, account: EngineAccount, work: float, weight: float, now_s: float) -> None:
        """Counts work that an account has now."""
        if now_s - self._began_s >= LATELY_S:
            self._begin_anew(now_s)
        of_class = self._classes.setdefault(account[0], _ClassUse())
        of_class.add(account[1], work * 2.0 ** ((now_s - self._began_s) / LATELY_S), weight)

    def is_over_share(self, account: EngineAccount) -> bool:
        """Returns whether an account had more than its part, by weight, of what its class had."""
        of_class = self._classes.get(account[0])
        if of_class is None or account[1] not in of_class.tenants:
            return False
        work, weight = of_class.tenants[account[1]]
        return work * of_class.weight > weight * of_class.work

    def _begin_anew(self, now_s: float) -> None:
        factor = 2.0 ** (-(now_s - self._began_s) / LATELY_S)
        self._began_s = now_s
        for service_class, before in self._classes.items():
            self._classes[service_class] = of_class = _ClassUse()
            for tenant, (work, weight) in before.tenants.items():
                if work > _LEAST_PART * before.work:
                    of_class.add(tenant, work * factor, weight)


@dataclass(slots=True)
class ChargedRequest:
    """What an account was charged for a request that an engine has, and what that has taken so far.

    The `work` is 0 for a request that has been charged before, on another engine.
    """

    account: EngineAccount
    weight: float
    work: float
    prompt_tokens: int
    num_cached: int = 0  # of the prompt, as the engine says with the first output
    num_outputs: int = 0  # tokens

    @classmethod
    def of(cls, request: TokenRequest) -> "ChargedRequest":
        """Returns what its gateway has charged for a request."""
        account = request.service_class, request.tenant
        return cls(account, request.weight, request.work, len(request.prompt_token_ids))

    @property
    def tenant(self) -> str:
        """Whose work it is; empty if nobody is named."""
        return self.account[1]

    @property
    def num_too_many(self) -> float:
        """The work that was charged and not done; negative if more was done."""
        return self.work - work_of(self.prompt_tokens - self.num_cached, self.num_outputs)


class TenantTurns:
    """The turns at one engine. `now_s` is of one clock, whichever it is.

    An account that has had something waiting for a while is backlogged: it asks for more than it
    gets. One that has come lately, and does not wait for as long, is a late comer: room is kept for
    it.
    """

    def __init__(self) -> None:
        self._shares = TenantShares()
        self._use = RecentUse()
        self._came: dict[int, dict[str, float]] = {}  # by class, when tenants came last: in order
        self._since: dict[EngineAccount, float] = {}  # who has something waiting, and since when
        self._until: dict[EngineAccount, float] = {}  # who was backlogged, and until when: in order

    def had(self, account: EngineAccount) -> float:
        """Returns the work that an account has had, by its weight."""
        return self._shares.had(account)

    def wait(self, accounts: Set[EngineAccount], now_s: float) -> None:
        """Takes in which accounts have something waiting now, at any gateway."""
        for account in self._since.keys() - accounts:
            if self._waits_long(account, now_s):
                self._until[account] = now_s
            del self._since[account]
        _forget_before(self._until, now_s - STAYS_S)
        for account in accounts - self._since.keys():
            others = (each for each in self._since if each[0] == account[0])
            self._shares.begins_to_wait(account, others)
            self._since[account] = now_s
            if self._until.pop(account, None) is not None:
                self._since[account] -= ASKING_S  # it goes on

    def charge(self, request: ChargedRequest, now_s: float) -> None:
        """Charges an account for a request that the engine has taken."""
        if not request.work:
            return
        account = request.account
        self._shares.has_turn(account, request.work, request.weight)
        self._use.add(account, request.work, request.weight, now_s)
        came = self._came.setdefault(account[0], {})
        came.pop(account[1], None)
        came[account[1]] = now_s
        _forget_before(came, now_s - LATELY_S)

    def settle(self, request: ChargedRequest) -> None:
        """Puts right what was charged for a request that is over."""
        if request.work:
            self._shares.settle(request.account, request.num_too_many, request.weight)

    def is_batch_leaving(self, now_s: float) -> bool:
        """Returns whether all batch work leaves room for others, because other work comes."""
        return self._has_above(ServiceClass.BATCH, now_s)

    def leaves_room(self, account: EngineAccount, now_s: float) -> bool:
        """Returns whether an account leaves room for late comers.

        A backlogged one does for those of classes above, and for those of its own while it has had
        more than its share lately. Batch work can wait in any case.
        """
        service_class, tenant = account
        if service_class != ServiceClass.BATCH and not self._is_backlogged(account, now_s):
            return False
        if self._has_above(service_class, now_s):
            return True
        if service_class != ServiceClass.BATCH and not self._use.is_over_share(account):
            return False
        return any(each != tenant for each in self._late_comers(service_class, now_s))

    def leaving(self, now_s: float) -> list[EngineAccount]:
        """Returns the accounts that leave room, as far as gateways have to hear of them.

        They hear of those that have nothing waiting by now too: much of it may come at once.
        """
        known = itertools.chain(self._since, self._until)
        leaving = (account for account in known if self.leaves_room(account, now_s))
        return list(itertools.islice(leaving, _MOST_LEAVING))

    def _has_above(self, service_class: int, now_s: float) -> bool:
        return any(
            next(self._late_comers(above, now_s), None) is not None
            for above in ServiceClass
            if above < service_class
        )

    def _late_comers(self, service_class: int, now_s: float) -> Iterator[str]:
        """Yields those of a class, the last one first."""
        for tenant, at_s in reversed(self._came.get(service_class, {}).items()):
            if at_s < now_s - LATELY_S:
                return
            if not self._waits_long((service_class, tenant), now_s):
                yield tenant

    def _waits_long(self, account: EngineAccount, now_s: float) -> bool:
        return now_s - self._since.get(account, now_s) > ASKING_S

    def _is_backlogged(self, account: EngineAccount, now_s: float) -> bool:
        """Returns whether an account asks for more than it gets, or did a moment ago."""
        if account in self._since:
            return self._waits_long(account, now_s)
        return self._until.get(account, -math.inf) >= now_s - STAYS_S


def _forget_before(times: dict[_Key, float], at_s: float) -> None:
    """Takes those before `at_s` from times in order."""
    while times and times[first := next(iter(times))] < at_s:
        del times[first]
