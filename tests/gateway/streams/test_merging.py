"""What is held and what is joined: no token is lost, doubled or overtaken."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.streams.merging import TokenMerge
from serving.link.messages import Finish, TokenOutput

STOP = int(Finish.STOP)


def merge_of(*held: str) -> TokenMerge[str]:
    """A merge in which the tokens of these requests may be held; an output is owned by its id."""
    merge: TokenMerge[str] = TokenMerge()
    for request_id in held:
        merge.allow_hold(request_id)
    return merge


def take(merge: TokenMerge[str], *outputs: TokenOutput, holds: bool = False) -> None:
    merge.take([(output.request_id, output) for output in outputs], 1.0, holds=holds)


def drained(merge: TokenMerge[str]) -> list[TokenOutput]:
    pairs = merge.drain()
    assert all(owner == output.request_id for owner, output in pairs)
    return [output for _, output in pairs]


def test_what_lies_ready_for_one_request_becomes_one_output() -> None:
    merge = merge_of()
    take(merge, TokenOutput("a", [1]), TokenOutput("b", [5]))
    take(merge, TokenOutput("a", [2, 3]))
    take(merge, TokenOutput("a", [4], STOP, 4), TokenOutput("b", [6]))
    assert drained(merge) == [TokenOutput("a", [1, 2, 3, 4], STOP, 4), TokenOutput("b", [5, 6])]
    assert drained(merge) == []


def test_output_that_was_drained_is_not_joined_to() -> None:
    merge = merge_of()
    take(merge, TokenOutput("a", [1]))
    (first,) = drained(merge)
    take(merge, TokenOutput("a", [2]))
    assert (first.token_ids, drained(merge)) == ([1], [TokenOutput("a", [2])])


def test_output_with_more_than_tokens_stays_as_it_came_and_where_it_came() -> None:
    merge = merge_of()
    outputs = [[1], [2], [3], [4], [5]]
    payloads = [b"first", None, None, b"logprobs", None]
    for token_ids, payload in zip(outputs, payloads, strict=True):
        take(merge, TokenOutput("a", token_ids, payload=[payload] if payload else None))
    take(merge, TokenOutput("a", [6], STOP, payload=[b"metrics"]))
    assert [(output.token_ids, output.payload) for output in drained(merge)] == [
        ([1], [b"first"]), ([2, 3], None), ([4], [b"logprobs"]), ([5], None), ([6], [b"metrics"]),
    ]  # fmt: skip


def test_first_tokens_and_the_end_do_not_wait_and_the_rest_does() -> None:
    merge = merge_of("a")
    take(merge, TokenOutput("a", [1]), holds=True)
    assert drained(merge) == [TokenOutput("a", [1])]
    take(merge, TokenOutput("a", [2]), holds=True)
    take(merge, TokenOutput("a", [3]), holds=True)
    assert (merge.has_held, merge.has_ready) == (True, False)
    take(merge, TokenOutput("a", [4], STOP), holds=True)
    assert drained(merge) == [TokenOutput("a", [2, 3, 4], STOP)]
    assert not merge.has_held


def test_output_without_tokens_is_not_the_first() -> None:
    merge = merge_of("a")
    take(merge, TokenOutput("a", []), holds=True)
    take(merge, TokenOutput("a", [1]), holds=True)
    assert drained(merge) == [TokenOutput("a", [1])]


def test_what_is_held_goes_before_an_output_with_more_than_tokens() -> None:
    merge = merge_of("a")
    take(merge, TokenOutput("a", [1]), holds=True)
    take(merge, TokenOutput("a", [2]), holds=True)
    take(merge, TokenOutput("a", [3], payload=[b"resumed"]), holds=True)
    take(merge, TokenOutput("a", [4]), holds=True)
    assert [output.token_ids for output in drained(merge)] == [[1, 2], [3]]
    assert merge.release(2.0) == ["a"]
    assert drained(merge) == [TokenOutput("a", [4])]


def test_request_that_may_not_be_held_is_not() -> None:
    merge = merge_of()
    for token_id in (1, 2):
        take(merge, TokenOutput("with stop strings", [token_id]), holds=True)
        assert [output.token_ids for output in drained(merge)] == [[token_id]]


def test_what_is_held_when_nothing_waits_any_more_is_not_overtaken() -> None:
    merge = merge_of("a")
    for token_id in (1, 2):
        take(merge, TokenOutput("a", [token_id]), holds=True)
    take(merge, TokenOutput("a", [3]), holds=False)
    merge.release(2.0)
    assert drained(merge) == [TokenOutput("a", [1, 2, 3])]


def test_failure_gets_what_is_ready_and_what_is_held_and_leaves_others_alone() -> None:
    merge = merge_of("a", "b")
    for token_id in (1, 2):
        take(merge, TokenOutput("a", [token_id]), TokenOutput("b", [token_id]), holds=True)
    left = [output for _, output in merge.flush(["a", "nobody"])]
    assert left == [TokenOutput("a", [1, 2])]
    merge.release(2.0)
    assert drained(merge) == [TokenOutput("b", [1, 2])]


def test_abort_forgets_what_is_ready_and_what_is_held() -> None:
    merge = merge_of("a", "b")
    for token_id in (1, 2):
        take(merge, TokenOutput("a", [token_id]), TokenOutput("b", [token_id]), holds=True)
    merge.forget(["a", "nobody"])
    merge.release(2.0)
    assert drained(merge) == [TokenOutput("b", [1, 2])]
    assert merge.flush(["a"]) == []


def test_time_of_the_oldest_that_is_ready_does_not_count_what_is_held() -> None:
    merge = merge_of("a")
    assert merge.ready_since_s is None
    merge.take([("a", TokenOutput("a", [1]))], 3.0, holds=True)
    merge.take([("a", TokenOutput("a", [2]))], 4.0, holds=False)
    assert merge.ready_since_s == 3.0
    merge.drain()
    merge.take([("a", TokenOutput("a", [3]))], 5.0, holds=True)
    assert merge.ready_since_s is None
    merge.release(6.0)
    assert merge.ready_since_s == 6.0


@dataclass
class Reader:
    """What a frontend has had of each request, checked as it comes."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    payloads: list[int] = field(default_factory=list)

    def read(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "something came behind the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.payload is not None:
                # Its tokens are those that it came with.
                assert output.payload == [repr(output.token_ids).encode()]
                self.payloads += output.token_ids
            if output.finish is not None:
                self.ended.add(output.request_id)


REQUESTS = ("a", "b", "c")
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("step"),
            st.lists(
                st.tuples(st.sampled_from(REQUESTS), st.integers(0, 3), st.booleans()), max_size=4
            ),
            st.booleans(),
        ),
        st.tuples(st.sampled_from(["release", "drain"])),
        st.tuples(st.sampled_from(["abort", "fail", "end"]), st.sampled_from(REQUESTS)),
    ),
    max_size=30,
)


@given(actions=actions, held=st.sets(st.sampled_from(REQUESTS)))
def test_no_token_is_lost_doubled_or_overtaken(
    actions: list[tuple[object, ...]], held: set[str]
) -> None:
    merge, reader = merge_of(*sorted(held)), Reader()
    sent: dict[str, list[int]] = {}
    num_payloads, next_token = 0, 0
    over: set[str] = set()  # what comes no more
    forgotten: dict[str, list[int]] = {}  # with what had been read of it until then

    def output(
        request_id: str, num_tokens: int, finish: int | None = None, *, more: bool = False
    ) -> TokenOutput:
        nonlocal next_token, num_payloads
        token_ids = list(range(next_token, next_token + num_tokens))
        next_token += num_tokens
        sent.setdefault(request_id, []).extend(token_ids)
        payload = [repr(token_ids).encode()] if more else None
        num_payloads += num_tokens if more else 0
        return TokenOutput(request_id, token_ids, finish, payload=payload)

    for what, *rest in actions:
        if what == "step":
            steps, holds = rest
            outputs = [output(key, num, more=more) for key, num, more in steps if key not in over]
            take(merge, *outputs, holds=bool(holds))
        elif what == "release":
            merge.release(1.0)
        elif what == "drain":
            reader.read(drained(merge))
        elif rest[0] not in over:
            key = str(rest[0])
            over.add(key)
            if what == "end":
                take(merge, output(key, 1, STOP), holds=True)
            elif what == "fail":
                reader.read([left for _, left in merge.flush([key])])
                assert reader.tokens.get(key, []) == sent.get(key, [])
                forgotten[key] = list(sent.get(key, []))
            else:
                merge.forget([key])
                forgotten[key] = list(reader.tokens.get(key, []))
    merge.release(1.0)
    reader.read(drained(merge))
    assert not merge.has_held
    for key in REQUESTS:
        assert reader.tokens.get(key, []) == forgotten.get(key, sent.get(key, []))
    if not forgotten:
        assert len(reader.payloads) == num_payloads
