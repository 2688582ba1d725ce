"""ServeGen's laws: their files, idle stretches, rates, burstiness kept when they are scaled."""

from pathlib import Path

import numpy as np
import pytest
from public_traces import public_trace

from loadtest.workload.servegen import (
    ClientLaw,
    GapLaw,
    LawWindow,
    client_instants,
    mean_rate_per_s,
    read_clients,
)
from loadtest.workload.traces import TraceError

TWO_WINDOWS = "600,2,1.5,Gamma,0.5,1\n1200,0,0,,0,0\n1800,4,2,Weibull,0.6,0.1\n"


def client(*windows: LawWindow) -> ClientLaw:
    return ClientLaw("one", windows)


def test_rows_are_windows_from_zero_on(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(TWO_WINDOWS)
    (tmp_path / "a.csv").write_text("0,1,1,Gamma,1,1\n")

    first, second = read_clients(tmp_path)

    assert (first.name, first.length_s) == ("a", 600)
    assert second.windows == (
        LawWindow(0, 600, 2, GapLaw.GAMMA, 0.5),
        LawWindow(600, 1200, 0, None, 0),
        LawWindow(1200, 1800, 4, GapLaw.WEIBULL, 0.6),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,1,1,Gamma,1\n", r"line 1: 5 columns; allowed: start_s, rate_per_s, cv, law"),
        ("0,1,1,Pareto,1,1\n", r"line 1: law is 'Pareto'; allowed: Gamma, Weibull"),
        ("0,x,1,Gamma,1,1\n", r"line 1: rate_per_s is 'x'; allowed: a number"),
        ("0,-1,1,Gamma,1,1\n", r"line 1: rate_per_s is '-1'; allowed: a number, at least 0"),
        ("0,1,1,Gamma,0,1\n", r"line 1: shape is '0'; allowed: a number above 0"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", r"line 1: start_s does not ascend"),
        ("", r"no rows"),
    ],
)
def test_a_bad_law_is_refused_by_line_and_field(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "client.csv"
    path.write_text(text)

    with pytest.raises(TraceError, match=problem):
        read_clients(path)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no CSV file in it"):
        read_clients(tmp_path)


@pytest.mark.parametrize(
    ("law", "shape", "cv"),
    [(GapLaw.GAMMA, 0.25, 2.0), (GapLaw.GAMMA, 4.0, 0.5), (GapLaw.WEIBULL, 0.5, 5**0.5)],
)
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_client_keeps_its_burstiness_at_any_rate(
    law: GapLaw, shape: float, cv: float, factor: float
) -> None:
    windows = client(LawWindow(0, 600, 100, law, shape)).stretch(0, 6000 / factor)
    gaps_s = np.diff(client_instants(windows, factor, np.random.default_rng(1)))

    assert gaps_s.mean() == pytest.approx(1 / (100 * factor), rel=0.01)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("law", list(GapLaw))
def test_short_stretches_have_their_rate_too(law: GapLaw) -> None:
    windows = (LawWindow(0, 4, 2, law, 0.4),)
    counts = [
        len(client_instants(windows, 1.0, np.random.default_rng(seed))) for seed in range(4000)
    ]

    # Standard error below 0.1; a process that began with a whole gap would have 2 more.
    assert np.mean(counts) == pytest.approx(8, abs=0.35)


def test_nothing_arrives_while_a_client_is_idle() -> None:
    windows = (
        LawWindow(0, 100, 3, GapLaw.GAMMA, 1),
        LawWindow(100, 200, 0, None, 0),
        LawWindow(200, 300, 6, GapLaw.GAMMA, 1),
    )
    found = client_instants(windows, 10.0, np.random.default_rng(1))
    counts, _ = np.histogram(found, bins=[0, 100, 200, 300])

    assert counts[1] == 0
    assert counts[[0, 2]] == pytest.approx([3000, 6000], abs=320)
    assert (np.diff(found) >= 0).all()


def test_a_stretch_begins_anywhere_and_starts_over_at_the_end() -> None:
    law = client(LawWindow(0, 600, 1, GapLaw.GAMMA, 1), LawWindow(600, 1200, 2, GapLaw.WEIBULL, 1))

    stretch = law.stretch(start_s=1100, duration_s=800)

    assert [(each.start_s, each.end_s, each.rate_per_s) for each in stretch] == [
        (0, 100, 2),
        (100, 700, 1),
        (700, 800, 2),
    ]
    assert mean_rate_per_s((law, law), 1100, 800) == pytest.approx(2 * 1000 / 800)


def test_the_public_laws_have_their_idle_windows() -> None:
    clients = read_clients(public_trace("servegen/language-m-small"))

    assert [len(client.windows) for client in clients] == [2016] * 8
    assert sum(window.law is None for client in clients for window in client.windows) == 752
    assert all(client.length_s == 14 * 24 * 3600 for client in clients)
