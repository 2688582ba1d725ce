"""Traces: formats told apart, rows as they stand, refusals by line and field, published figures."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from public_traces import public_trace

from loadtest.planned_request import PromptBlock
from loadtest.workload.traces import Trace, TraceError, TraceFormat, detect_format, read_trace

pytestmark = pytest.mark.slow

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:46.6805901,396,109\r
2023-11-17 00:00:00.0000000,879,55"""


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def token_counts(trace: Trace) -> list[tuple[int | None, int | None]]:
    """Input and output tokens of each row."""
    return [(row.input_tokens, row.output_tokens) for row in trace.rows]


def test_azure_rows_keep_the_seventh_decimal_and_the_last_line(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))

    assert trace.format is TraceFormat.AZURE
    assert token_counts(trace) == [(374, 44), (396, 109), (879, 55)]
    assert trace.offsets_s == pytest.approx([0, 1e-7, 20653.31941], abs=1e-8)


def test_mooncake_rows_have_equal_blocks_for_equal_ids_and_a_short_last_one(tmp_path: Path) -> None:
    lines = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 9]}
"""
    trace = read_trace(written(tmp_path, lines))

    assert trace.format is TraceFormat.MOONCAKE
    assert trace.offsets_s.tolist() == [0, 1.5]
    first, second = trace.rows
    assert first.blocks == (PromptBlock("h7", 512), PromptBlock("h8", 88))
    assert second.blocks == (PromptBlock("h7", 512), PromptBlock("h9", 512))


def test_own_rows_may_be_prompts_messages_or_lengths(tmp_path: Path) -> None:
    lines = (
        """{"prompt": "Why slices?", "output_tokens": 9, "timestamp": 1700000010.5, "source": "x"}
{"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "What is a host?"}],
""".replace("],\n", '], "timestamp": 1700000009}\n')
        + (
            '{"input_tokens": 12, "output_tokens": 3, "session": 4, "think_time_s": 2, '
            '"timestamp": 1700000012}\n'
        )
    )
    asked, said, counted = read_trace(written(tmp_path, lines)).rows

    assert (asked.text, asked.offset_s, asked.output_tokens) == ("What is a host?", 0, None)
    assert (said.text, said.offset_s, said.input_tokens) == ("Why slices?", 1.5, None)
    assert (counted.session, counted.think_time_s, counted.input_tokens) == ("4", 2, 12)


def test_own_rows_without_times_stay_in_order_and_say_so(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, '{"prompt": "b"}\n\n{"prompt": "a"}\n'))

    assert [row.text for row in trace.rows] == ["b", "a"]
    with pytest.raises(TraceError, match="no times"):
        _ = trace.offsets_s


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (AZURE.replace(",396,", ",many,"), r"line 3: ContextTokens is 'many'; allowed: a whole"),
        (AZURE.replace(",109", ",0"), r"line 3: GeneratedTokens is '0'; allowed: .* at least 1"),
        (AZURE.replace(",109", ""), r"line 3: GeneratedTokens is missing"),
        (AZURE.replace("11-17", "13-17"), r"line 4: TIMESTAMP is '2023-13-17 .*a time such as"),
        ('{"prompt": 3}', r"line 1: prompt is 3; allowed: a text"),
        ('{"messages": []}', r"line 1: messages is \[\]; allowed"),
        ('{"role": "user"}', r"line 1: nothing to send; allowed: prompt, messages or input_tokens"),
        ('{"input_tokens": true}', r"line 1: input_tokens is True"),
        ('{"prompt": "a", "offset_s": -1}', r"line 1: offset_s is -1; allowed: a number"),
        ('{"prompt": "a", "offset_s": NaN}', r"line 1: offset_s is nan"),
        ('{"prompt": "a"}\n[1]', r"line 2: '\[1\]'; allowed: a JSON object"),
        ('{"prompt": "a"}\n{', r"line 2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": "a", "offset_s": 1}', r"some rows have a time and some"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            r"line 1: hash_ids is \[1, 2\]; allowed: 1 ids, one for each 512 of 5 tokens",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}',
            r"line 1: hash_ids is \['x'\]; allowed: a list of whole numbers",
        ),
        ("hello", r"line 1: 'hello' begins no known trace"),
        ("", r"line 1: '' begins no known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"no requests in it"),
        ("0,1,1,Gamma,1,1", r"which are no requests"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: it cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b'{"prompt": "\xff"}')

    with pytest.raises(TraceError, match="no text in UTF-8"):
        read_trace(path)


def test_a_folder_is_taken_for_servegen(tmp_path: Path) -> None:
    assert detect_format(tmp_path) is TraceFormat.SERVEGEN


def test_a_trace_off_the_grid_is_not_spread(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))

    assert trace.spread(np.random.default_rng(1)) is trace


def mooncake(folder: Path, instants_ms: list[int]) -> Trace:
    lines = (
        f'{{"timestamp": {at}, "input_length": {n}, "output_length": 1}}'
        for n, at in enumerate(instants_ms, 1)
    )
    return read_trace(written(folder, "\n".join(lines)))


def test_spreading_stays_within_each_step_and_in_order(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [0] * 20 + [3000] * 20 + [5999] * 20 + [12000] * 20)
    spread = trace.spread(np.random.default_rng(1))

    by_step = spread.offsets_s.reshape(4, 20)
    assert (by_step >= [[0], [3], [5.999], [12]]).all()
    assert (by_step < [[3], [5.999], [8.999], [15]]).all()
    assert len(np.unique(by_step)) == 80
    # Rows keep their order: the lengths count up.
    assert [row.input_tokens for row in spread.rows] == list(range(1, 81))
    assert spread.spread(np.random.default_rng(2)) is spread


def test_spreading_depends_on_the_seed_alone(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [0, 0, 3000])

    def spread(seed: int) -> list[float]:
        return list(trace.spread(np.random.default_rng(seed)).offsets_s)

    assert spread(1) == spread(1) != spread(2)


@pytest.mark.parametrize(
    ("name", "num_rows", "rate_per_s", "cv", "means"),
    [
        ("azure2023/AzureLLMInferenceTrace_conv.csv", 19366, 5.53, 1.09, (1155, 211)),
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8819, 2.57, 13.2, (2048, 28)),
        ("mooncake/conversation_trace.jsonl", 12031, 3.40, 3.03, (12035, 343)),
    ],
)
def test_public_traces_have_their_published_figures(
    name: str, num_rows: int, rate_per_s: float, cv: float, means: tuple[int, int]
) -> None:
    trace = read_trace(public_trace(name))
    gaps_s = np.diff(trace.offsets_s)

    assert len(trace.rows) == num_rows
    assert 1 / gaps_s.mean() == pytest.approx(rate_per_s, abs=0.005)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, abs=0.06)
    assert np.mean(token_counts(trace), axis=0).round().tolist() == list(means)


def test_mooncake_shares_the_published_part_of_its_blocks() -> None:
    trace = read_trace(public_trace("mooncake/conversation_trace.jsonl"))
    seen: set[str] = set()
    num_blocks = num_hits = 0
    for row in trace.rows:
        ids = [block.content_id for block in row.blocks]
        # A cache helps up to the first block that it lacks.
        missed = next((at for at, hash_id in enumerate(ids) if hash_id not in seen), len(ids))
        num_hits += missed
        num_blocks += len(ids)
        seen.update(ids)

    assert num_hits / num_blocks == pytest.approx(0.366, abs=0.0005)
    assert all(
        sum(block.num_tokens for block in row.blocks) == row.input_tokens for row in trace.rows
    )


def test_mooncake_is_about_poisson_once_it_is_spread() -> None:
    trace = read_trace(public_trace("mooncake/conversation_trace.jsonl"))
    gaps_s = np.diff(trace.spread(np.random.default_rng(1)).offsets_s)

    assert trace.grid_s == 3.0
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.05)


def test_reading_traces_loads_nothing_of_the_load_test_beyond_blocks() -> None:
    code = (
        "import sys, loadtest.workload.traces, loadtest.workload.servegen\n"
        "print(*sorted(m for m in sys.modules if m.startswith('loadtest.')))\n"
        "print(*({'gevent', 'locust', 'pydantic', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    ours, heavy = done.stdout.split("\n")[:2]
    assert set(ours.split()) == {
        "loadtest.planned_request",
        "loadtest.workload",
        "loadtest.workload.traces",
        "loadtest.workload.servegen",
    }
    assert heavy == ""
