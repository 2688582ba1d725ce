import pytest

from tests.unselected import module_markers, selects_nothing

DECLARED = frozenset({"slow", "long", "e2e", "imports_vllm"})


@pytest.mark.parametrize(
    ("source", "markers"),
    [
        ("import pytest\n", set()),
        ("pytestmark = pytest.mark.slow\n", {"slow"}),
        ("pytestmark = pytest.mark.timeout(420)\n", {"timeout"}),
        (
            "pytestmark = [pytest.mark.e2e, pytest.mark.timeout(4), needs_redis]\n",
            {"e2e", "timeout"},
        ),
        (
            "pytestmark = [\n    pytest.mark.skipif(True),\n    pytest.mark.long,\n]\n",
            {"skipif", "long"},
        ),
        ("def test_one():\n    pytestmark = pytest.mark.slow\n", set()),
        ('"""Says pytestmark = pytest.mark.slow."""\n', set()),
    ],
)
def test_markers_of_a_file_are_those_of_its_pytestmark(source: str, markers: set[str]) -> None:
    assert module_markers(source) == markers


@pytest.mark.parametrize(
    ("expression", "markers", "is_left_out"),
    [
        ("", {"slow"}, False),
        ("not slow and not e2e", {"slow"}, True),
        ("not slow and not e2e", {"imports_vllm"}, False),
        ("not slow and not e2e", set(), False),
        # A test of the file may be marked itself.
        ("slow and not long", set(), False),
        ("slow and not long", {"e2e"}, False),
        ("slow and not long", {"e2e", "long"}, True),
        ("(slow or e2e) and not long", {"e2e"}, False),
        ("imports_vllm and not imports_vllm", set(), True),
    ],
)
def test_file_is_left_out_where_no_marker_of_a_test_could_bring_it_in(
    expression: str, markers: set[str], is_left_out: bool
) -> None:
    assert selects_nothing(expression, frozenset(markers), DECLARED) is is_left_out
