"""What one gateway knows of the room in one engine. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.link.messages import Room


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of an engine.

    `num_tokens` have to be in its cache before the next one; so many more are expected to come. Of
    the first ones `num_cached` are there; `None` if that is not known.
    """

    num_tokens: int
    num_expected: int = 0
    num_cached: int | None = None

    def num_computed(self, ratio: float) -> int:
        """Returns how many tokens have to be computed: by `ratio`, if nothing is known."""
        if self.num_cached is None:
            return round(self.num_tokens * ratio)
        return max(1, self.num_tokens - self.num_cached)


@dataclass(slots=True)
class KnownRoom:
    """What the engine's host told last, less what was sent since.

    While nothing was told, nothing is to be sent: the host tells as soon as the link is open.
    """

    told: Room | None = None
    _num_sent: int = 0
    _unseen: deque[Need] = field(default_factory=deque)
    _is_shut: bool = False

    def tell(self, room: Room) -> None:
        """Takes in what the host tells."""
        if self._is_shut:
            return
        self.told = room
        while len(self._unseen) > self._num_sent - room.num_taken:
            self._unseen.popleft()

    def sent(self, need: Need) -> None:
        """Counts a request that is on its way."""
        self._num_sent += 1
        self._unseen.append(need)

    def shut(self) -> None:
        """Has no room from now on, whatever the host still tells: nothing can be sent to it."""
        self.told, self._is_shut = None, True

    @classmethod
    def like(cls, other: "KnownRoom") -> "KnownRoom":
        """Returns one that knows the same, to try what fits."""
        return cls(other.told, other._num_sent, deque(other._unseen))

    @property
    def has_place(self) -> bool:
        """True if the engine can have another request now, if not any."""
        room = self.told
        return room is not None and self._has_place(room, room.num_requests - room.num_for_moved)

    @property
    def has_place_for_moved(self) -> bool:
        """True if it can have another one that was on an engine before."""
        room = self.told
        return room is not None and self._has_place(room, room.num_requests)

    def _has_place(self, room: Room, num_requests: int) -> bool:
        return num_requests > len(self._unseen) and room.prefill_tokens > self._computed(room)

    @property
    def has_full_line(self) -> bool:
        """True if only the line of prompts is full: there is room again within a step or two."""
        room = self.told
        return room is not None and not self.has_place and room.num_places > len(self._unseen)

    def has_room_for_moved(self, need: Need) -> bool:
        """Returns whether the engine can have this request now, which is on another one yet.

        An engine without any gets one, whatever it needs: there will never be more room.
        """
        room = self.told
        if room is None or not self.has_place_for_moved:
            return False
        left = self.kv_tokens_left
        return left is None or not self.num_sequences or left >= self._kv(room, need)

    @property
    def kv_tokens_left(self) -> int | None:
        """The tokens that are left in the cache for what comes; `None` if they are not bounded."""
        room = self.told
        if room is None or room.kv_tokens is None:
            return None
        return room.kv_tokens - sum(self._kv(room, each) for each in self._unseen)

    @property
    def is_kept_free(self) -> bool:
        """True if what is left is kept for work that does not leave room for others."""
        room = self.told
        if room is None or room.num_dealt is None:
            return False
        return room.num_dealt <= len(self._unseen)

    @property
    def computed_ratio(self) -> float:
        """The share of prompt tokens that the engine lately had to compute, 0 to 1."""
        return 1.0 if self.told is None else self.told.computed_ratio

    @property
    def num_sequences(self) -> int:
        """The sequences that the engine has, of all gateways, as far as that is known here."""
        return len(self._unseen) + (0 if self.told is None else self.told.num_sequences)

    @property
    def backlog_tokens(self) -> int:
        """The tokens that stand in line there, as far as that is known here."""
        room = self.told
        return 0 if room is None else room.backlog_tokens + self._computed(room)

    def _computed(self, room: Room) -> int:
        if not self._unseen:
            return 0
        return sum(each.num_computed(room.computed_ratio) for each in self._unseen)

    @staticmethod
    def _kv(room: Room, need: Need) -> int:
        return need.num_computed(room.computed_ratio) + need.num_expected


class ToldToLeave:
    """Who leaves what is kept for others, as engines have told."""

    def __init__(self) -> None:
        self._told: dict[str, Room] = {}  # by engine id, where one has told of any
        self._for_batch = 0  # engines that all batch work leaves room on
        self._accounts: Counter[tuple[int, str]] = Counter()  # by how many engines

    def tell(self, engine_id: str, room: Room) -> None:
        """Takes in what an engine tells."""
        before = self._told.get(engine_id, _NOBODY_LEAVES)
        if (room.is_batch_leaving, room.leaving) != (before.is_batch_leaving, before.leaving):
            self.forget(engine_id)
            self._told[engine_id] = room
            self._count(room, 1)

    def forget(self, engine_id: str) -> None:
        """Forgets what an engine has told, if it has."""
        room = self._told.pop(engine_id, None)
        if room is not None:
            self._count(room, -1)

    def has(self, account: tuple[int, str]) -> bool:
        """Returns whether any engine has told that this account leaves room for others."""
        if self._for_batch and account[0] == ServiceClass.BATCH:
            return True
        return account in self._accounts

    def _count(self, room: Room, by: int) -> None:
        self._for_batch += by * room.is_batch_leaving
        for account in room.leaving:
            self._accounts[account] += by
        self._accounts = +self._accounts  # without those that nobody tells of any more


_NOBODY_LEAVES = Room(0, 0, 0)
