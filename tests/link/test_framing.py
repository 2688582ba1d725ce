import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.link.connection import FrameSplitter, encode_frame
from serving.link.errors import FrameError
from serving.link.messages import MAX_FRAME_BYTES, Reply


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_bodies_survive_any_split_into_chunks(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    chunks = [
        stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    splitter = FrameSplitter(300)
    assert [body for chunk in chunks for body in splitter.feed(chunk)] == bodies


def test_frame_above_the_limit_is_refused_before_its_body_comes() -> None:
    splitter = FrameSplitter(10)
    with pytest.raises(FrameError, match="frame of 11 bytes, at most 10"):
        list(splitter.feed((11).to_bytes(4, "big")))


def test_limit_raised_between_two_frames_counts_for_the_next() -> None:
    splitter = FrameSplitter(3)
    bodies = splitter.feed(frame(b"abc") + frame(b"abcdef"))
    assert next(bodies) == b"abc"
    splitter.max_frame_bytes = 6
    assert next(bodies) == b"abcdef"


def test_message_above_the_limit_is_not_encoded() -> None:
    with pytest.raises(FrameError, match="at most"):
        encode_frame(Reply(0, bytes(MAX_FRAME_BYTES)))
