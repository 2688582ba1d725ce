import json

import pytest
from golden_server import golden_server

from loadtest.records import FleetSample
from loadtest.run.fleet_watch import fleet_sample, read_fleet


def test_slices_and_chips_are_counted_by_class_and_state() -> None:
    fleet = {
        "slices": [
            {"compute_class": "spot", "state": "ready", "num_chips": 16, "name": "a"},
            {"compute_class": "spot", "state": "ready", "num_chips": 8},
            {"compute_class": "spot", "state": "requested", "num_chips": None},
            {"compute_class": "local", "state": "ready", "num_chips": 0},
        ]
    }
    assert fleet_sample(fleet, 3.0) == FleetSample(
        3.0,
        {
            "spot": {
                "ready": {"slices": 2, "chips": 24},
                "requested": {"slices": 1, "chips": 0},
            },
            "local": {"ready": {"slices": 1, "chips": 0}},
        },
    )


@pytest.mark.parametrize("fleet", ["", "[]", '{"slices": 3}', '{"other": []}'])
def test_other_servers_have_no_fleet(fleet: str) -> None:
    with golden_server(fleet=fleet) as golden:
        assert read_fleet(golden.url, "key") is None


def test_fleet_is_read(tmp_path: object) -> None:
    told = {"slices": [{"compute_class": "spot", "state": "ready", "num_chips": 4}]}
    with golden_server(fleet=json.dumps(told)) as golden:
        assert read_fleet(golden.url + "/", None) == told
    assert read_fleet(golden.url, None) is None
