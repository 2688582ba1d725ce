"""A field that an engine cannot honour: 400 that names it, before any engine is asked."""

import pytest

from serving.errors import MalformedRequestError
from serving.gateway.refused_fields import ON_TPU, check_fields

from .test_http_edge import EchoFrontend, client_of, edge_over


@pytest.mark.parametrize("value", ["0", "7", '"x"', " 12 ", "[1]"])
def test_seed_is_refused_whatever_it_is(value: str) -> None:
    with pytest.raises(MalformedRequestError, match="no seed per request") as caught:
        check_fields(b'{"prompt": "a", "seed": %s}' % value.encode(), ON_TPU)
    assert (caught.value.param, caught.value.status) == ("seed", 400)


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "seed"}', b'{"seed": null}', b'{"x": {"seed": 1}}', b"[]", b"{", b""],
)
def test_what_sets_no_seed_passes(body: bytes) -> None:
    check_fields(body, ON_TPU)


def test_any_field_passes_where_none_is_refused() -> None:
    check_fields(b'{"seed": 1}', {})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_seed_to_a_model_on_tpu_is_answered_with_400_that_says_so(path: str) -> None:
    tpu = EchoFrontend("tpu", ("adapter",))
    tpu.refused_fields = ON_TPU
    async with client_of(edge_over(tpu, EchoFrontend("cpu"))) as client:
        for name in ("tpu", "adapter"):
            answer = await client.post(path, json={"model": name, "seed": 1, "stream": True})
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": ON_TPU["seed"],
                "type": "invalid_request_error",
                "param": "seed",
                "code": "unsupported_parameter",
            }
        assert tpu.num_admitted == 0
        assert (await client.post(path, json={"model": "cpu", "seed": 1})).status_code == 200
        assert (await client.post(path, json={"model": "tpu"})).status_code == 200
