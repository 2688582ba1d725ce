"""The daily table: increases from one reading to the next, and the files that others read."""

import datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_ledger_table import CHIPS, HOUR_S, PRICES, hour_long_ledger, invoke, page, serving

from deployments.ledger.daily import (
    Amounts,
    LedgerReading,
    RowKey,
    TableFileError,
    add,
    latest_increase,
    parse_reading,
)
from deployments.ledger.parquet import SCHEMA, DayTable, read_table, write_table
from deployments.ledger.record import STATE_FILE, LedgerRecorder, wait_s
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.ledger.ledger import EngineUse, Ledger

IDLE = RowKey("class", "idle", "spot", "chat")
ACME = RowKey("class", "serving", "spot", "chat", "acme")
DAY_S = 24 * 3600.0


def reading(gateway_id: str, started_s: float, at_s: float, idle_s: float) -> LedgerReading:
    return LedgerReading(gateway_id, started_s, at_s, {IDLE: Amounts(idle_s, idle_s / 100)})


def shared_ledger() -> Ledger:
    """An hour of serving, three quarters of it for acme."""
    life = SliceLifecycle((Transition(SliceState.READY, 0.0, ""),), "s-1")
    record = SliceRecord("r", "chat", "spot", life, "v6e", "2x4", engine_id="e")
    ledger = Ledger(0)
    use = {"e": EngineUse({"acme": 300, "default": 100})}
    ledger.observe(Snapshot("v", (record,)), {"e": True}, HOUR_S * 1000, use)
    return ledger


def test_page_becomes_rows_by_tenant_and_by_slice_that_each_sum_to_the_whole() -> None:
    sums = parse_reading(page(shared_ledger(), "g", PRICES), 1.0).sums
    assert sums == {
        ACME: Amounts(0.75 * CHIPS * HOUR_S, 9.0, 300),
        ACME._replace(tenant="default"): Amounts(0.25 * CHIPS * HOUR_S, 3.0, 100),
        RowKey("slice", "serving", "spot", "chat", None, "s-1"): Amounts(CHIPS * HOUR_S, 12.0),
    }


def test_states_without_a_tenant_and_classes_without_a_price_keep_their_nulls() -> None:
    sums = parse_reading(page(hour_long_ledger(), "g", PRICES), 1.0).sums
    waited = RowKey("class", "provisioning", "spot", "chat")
    assert sums[waited] == Amounts(CHIPS * HOUR_S / 2, 0.0)
    assert sums[IDLE._replace(compute_class="reserved")] == Amounts(CHIPS * HOUR_S, None)


def test_increase_is_of_the_gateway_that_counts_longest() -> None:
    before = {each.gateway_id: each for each in (reading("a", 0, 60, 6), reading("b", 30, 60, 3))}
    now = [reading("b", 30, 120, 9.5), reading("a", 0, 120, 12)]
    increase, from_s = latest_increase(before, now)
    assert (from_s, increase) == (60, {IDLE: Amounts(6, pytest.approx(0.06))})


def test_gateway_that_takes_over_gives_its_own_increase() -> None:
    before = {each.gateway_id: each for each in (reading("a", 0, 60, 6), reading("b", 30, 60, 3))}
    increase, _ = latest_increase(before, [reading("b", 30, 120, 9.5)])
    assert increase[IDLE].chip_seconds == 6.5


def test_gateway_that_began_since_counts_from_its_start_and_an_unknown_older_one_not() -> None:
    before = {"a": reading("a", 0, 60, 6)}
    assert latest_increase(before, [reading("new", 70, 120, 5)])[1] == 70
    assert latest_increase(before, [reading("old", 10, 120, 9)]) == ({}, None)
    assert latest_increase({}, [reading("a", 0, 60, 6)]) == ({}, None)


def test_sums_that_one_side_does_not_know_are_the_others() -> None:
    assert add({ACME: Amounts(1, None, 5)}, {ACME: Amounts(2, 0.5, 6)}) == {
        ACME: Amounts(3, 0.5, 11)
    }


def test_recorder_keeps_one_file_a_day_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    assert LedgerRecorder(tmp_path).take([reading("a", 0, 1000, 10)]) is None
    first = LedgerRecorder(tmp_path).take([reading("a", 0, 2000, 25)])
    again = LedgerRecorder(tmp_path).take([reading("a", 0, DAY_S, 45)])
    after = LedgerRecorder(tmp_path).take([reading("a", 0, DAY_S + 60, 46)])
    assert first == again == tmp_path / "1970-01-01.parquet"
    assert after == tmp_path / "1970-01-02.parquet"
    table = read_table(tmp_path / "1970-01-01.parquet")
    assert table is not None
    assert (table.from_s, table.until_s, table.sums[IDLE].chip_seconds) == (1000, DAY_S, 35)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1970-01-01.parquet",
        "1970-01-02.parquet",
        STATE_FILE,
    ]


def test_file_has_the_documented_columns_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "day.parquet"
    sums = parse_reading(page(shared_ledger(), "g", PRICES), 1.0).sums
    table = DayTable(datetime.date(2026, 11, 21), 0.0, 60.0, sums)
    write_table(path, table)
    assert read_table(path) == table
    # As pandas and DuckDB do, without knowing of us.
    columns = pq.read_table(path).to_pydict()
    assert list(columns) == SCHEMA.names
    text = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    assert all(f"| `{name}`" in text or f", `{name}` |" in text for name in columns)
    assert sum(
        seconds
        for scope, seconds in zip(columns["scope"], columns["chip_seconds"], strict=True)
        if scope == "class"
    ) == (CHIPS * HOUR_S)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1970-01-01.parquet").write_bytes(b"PAR1 or not")
    recorder = LedgerRecorder(tmp_path)
    recorder.take([reading("a", 0, 1000, 10)])
    with pytest.raises(TableFileError, match="no daily table"):
        recorder.take([reading("a", 0, 2000, 25)])
    (tmp_path / STATE_FILE).write_text("[1]")
    with pytest.raises(TableFileError, match="no recorder's state"):
        LedgerRecorder(tmp_path)


def test_midnight_comes_before_the_interval() -> None:
    assert wait_s(DAY_S - 10, 60.0) == 10
    assert wait_s(DAY_S, 60.0) == 60


def test_command_writes_the_sums_of_now(tmp_path: Path) -> None:
    path = tmp_path / "now.parquet"
    with serving(200, page(shared_ledger(), "g", PRICES)) as (url, _):
        code, out, _ = invoke("--url", url, "--parquet", f"{path}")
    assert (code, out) == (0, f"written: {path}, 3 rows\n")
    table = read_table(path)
    assert table is not None
    assert table.sums[ACME].tokens == 300


def test_command_refuses_two_outputs(tmp_path: Path) -> None:
    code, _, err = invoke("--csv", "--parquet", f"{tmp_path / 'x'}")
    assert code == 2
    assert "one of" in err
