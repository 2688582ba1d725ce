"""A simulated cluster's Redis keeps what it was given, unless it is lost."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.simulation.redis import RedisServer, RedisUnavailableError
from deployments.start.ports import free_ports

pytestmark = [
    pytest.mark.process,
    pytest.mark.needs("redis-server"),
]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", free_ports(1)[0]) as running:
        yield running


def ask(redis: RedisServer, command: str) -> str:
    """The answer to a command; of a value, the value."""
    host, port = redis.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{command}\r\n".encode())
        with connection.makefile() as answers:
            answer = answers.readline().strip()
            if not answer.startswith("$"):
                return answer
            return "(none)" if answer == "$-1" else answers.readline().strip()


def test_redis_that_is_killed_and_started_again_knows_what_it_was_told(redis: RedisServer) -> None:
    assert ask(redis, "SET head alive") == "+OK"
    redis.kill()
    assert not redis.is_running
    redis.start()
    assert ask(redis, "GET head") == "alive"


def test_redis_that_is_lost_begins_empty(redis: RedisServer) -> None:
    assert ask(redis, "SET head alive") == "+OK"
    redis.lose()
    redis.start()
    assert ask(redis, "GET head") == "(none)"


def test_redis_on_a_taken_port_says_what_redis_said(redis: RedisServer, tmp_path: Path) -> None:
    other = RedisServer(tmp_path / "other", int(redis.address.rpartition(":")[2]))
    with pytest.raises(RedisUnavailableError, match="Address already in use"):
        other.start()
    assert not other.is_running
    assert redis.is_running
