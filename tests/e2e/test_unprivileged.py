"""`slicewise sim up` without root: hosts are apart in a user namespace, clients notice nothing."""

import asyncio
from collections.abc import Iterator

import pytest

from deployments.simulation.hosts.namespaces import check_permitted
from serving.domain.tokens.paced import LETTERS, paced_tokens
from tests.hosts.permission import skipped_where_refused
from tests.hosts.unprivileged import without_rights

from .application import RunningApplication, application_args, linked_engines, paced_model
from .streams import begin_all, token_stream

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "paced"
NUM_STREAMS = 16
NUM_TOKENS = 150
READY_S = 300.0
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 1, **V6E_2X4}
    ]
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    with skipped_where_refused():
        check_permitted()
    deployment = {"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X4}
    args = application_args(
        paced_model(pace={"ttft_ms": 50.0, "tpot_ms": 50.0}, deployments=[deployment])
    )
    with RunningApplication(args, through="sim", plan=PLAN, before=without_rights()) as running:
        yield running


async def test_streams_outlive_a_slice_that_is_cut_off(application: RunningApplication) -> None:
    assert "in a user namespace" in application.log_text()
    prompts = [list(f"Stream {number}".encode()) for number in range(NUM_STREAMS)]
    requests = [token_stream(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
    answering = await begin_all(application.base_url, requests, READY_S)
    await asyncio.to_thread(application.simulation, "partition", name="spot-0", for_s=30.0)
    answers = await answering
    assert [answer.choices[0].token_ids for answer in answers] == [
        paced_tokens(prompt, NUM_TOKENS, LETTERS) for prompt in prompts
    ]
    # Back on the network, or another one in its place.
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S)
