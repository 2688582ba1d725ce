"""Batch work is asked back for another gateway: the newest first, once, until it has left."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.link.rooms.ways import PATIENCE_S, Ways

GATEWAYS = ("a", "b", "c")


def ways_of(**requests: str) -> Ways[str]:
    ways: Ways[str] = Ways()
    for request_id, gateway in requests.items():
        ways.began(request_id, gateway)
    return ways


def test_the_newest_of_others_is_asked_back() -> None:
    ways = ways_of(r1="b", r2="c", r3="a")
    ways.ask("a", 0.0)
    assert (ways.to_yield("b"), ways.to_yield("c"), ways.to_yield("a")) == ([], ["r2"], [])
    assert [ways.num_of_others(gateway) for gateway in GATEWAYS] == [1, 1, 2]
    ways.ask("a", 0.0)
    assert ways.to_yield("b") == ["r1"]
    assert ways.num_over("a") == 0


def test_it_is_over_when_the_request_has_left_however_it_did() -> None:
    ways = ways_of(r1="b")
    ways.ask("a", 0.0)
    ways.ended("r1")
    assert (ways.num_over("a"), ways.to_yield("b")) == (1, [])
    ways.ended("r1")
    assert ways.num_over("a") == 1


def test_it_is_over_at_once_where_there_is_nothing_of_others() -> None:
    ways = ways_of(r1="a")
    ways.ask("a", 0.0)
    assert (ways.num_over("a"), ways.to_yield("a")) == (1, [])


def test_what_was_asked_back_for_a_gateway_that_has_gone_stays() -> None:
    ways = ways_of(r1="b")
    ways.ask("a", 0.0)
    ways.left("a")
    assert (ways.to_yield("b"), ways.num_of_others("c")) == ([], 1)
    ways.ended("r1")
    assert ways.num_over("a") == 0


def test_what_its_gateway_keeps_is_not_waited_for_nor_asked_back_again() -> None:
    ways = ways_of(r1="b", r2="b")
    ways.ask("a", 0.0)
    ways.look(PATIENCE_S / 2)
    assert (ways.num_over("a"), ways.to_yield("b")) == (0, ["r2"])
    ways.look(PATIENCE_S)
    assert (ways.num_over("a"), ways.to_yield("b"), ways.num_of_others("a")) == (1, [], 1)
    ways.ask("a", PATIENCE_S)
    assert ways.to_yield("b") == ["r1"]
    ways.ended("r2")
    assert ways.num_over("a") == 1


class WaysMachine(RuleBasedStateMachine):
    """Whatever happens: each request is counted once, and every wish is over some time."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: Ways[str] = Ways()
        self.there: dict[str, str] = {}
        self.num_asked = dict.fromkeys(GATEWAYS, 0)
        self.number = 0
        self.kept: set[str] = set()  # what was waited for in vain
        self.now_s = 0.0

    @rule(gateway=st.sampled_from(GATEWAYS))
    def begin(self, gateway: str) -> None:
        self.number += 1
        self.there[f"r{self.number}"] = gateway
        self.ways.began(f"r{self.number}", gateway)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.there)))
        del self.there[request_id]
        self.ways.ended(request_id)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def ask(self, gateway: str) -> None:
        self.num_asked[gateway] += 1
        self.ways.ask(gateway, self.now_s)

    @rule()
    def wait_in_vain(self) -> None:
        self.kept.update(name for gateway in GATEWAYS for name in self.ways.to_yield(gateway))
        self.now_s += PATIENCE_S
        self.ways.look(self.now_s)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def leave(self, gateway: str) -> None:
        for request_id in [name for name, of in self.there.items() if of == gateway]:
            del self.there[request_id]
            self.ways.ended(request_id)
        self.ways.left(gateway)
        self.num_asked[gateway] = 0

    @invariant()
    def counts_hold(self) -> None:
        asked_back = [name for gateway in GATEWAYS for name in self.ways.to_yield(gateway)]
        assert len(asked_back) == len(set(asked_back))
        assert set(asked_back) <= self.there.keys()
        out = self.kept.union(asked_back)
        left = {name: of for name, of in self.there.items() if name not in out}
        for gateway in GATEWAYS:
            assert all(self.there[name] == gateway for name in self.ways.to_yield(gateway))
            others = [name for name, of in left.items() if of != gateway]
            assert self.ways.num_of_others(gateway) == len(others)
        pending = sum(self.num_asked.values()) - sum(map(self.ways.num_over, GATEWAYS))
        assert pending == len(asked_back)


TestWays = WaysMachine.TestCase
