"""From workload and seed to requests: determinism, lengths, sharing, sessions, shares, replays."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml
from public_traces import public_trace

from loadtest.errors import LoadTestError
from loadtest.planned_request import Api, PlannedRequest
from loadtest.workload.build import Workload, build_workload
from loadtest.workload.prompts import Vocabulary, prompt_token_ids
from loadtest.workload.spec import WorkloadSpec, workload_from_file

ROOT = Path(__file__).parents[3]
LENGTHS = {"input": {"law": "fixed", "value": 50}, "output": {"law": "fixed", "value": 5}}
POISSON = {"law": "poisson", "rate_per_s": 20}


SpecOf = Callable[..., WorkloadSpec]


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    def written(**fields: object) -> WorkloadSpec:
        path = tmp_path / "workload.yaml"
        path.write_text(yaml.safe_dump({"arrivals": POISSON, "lengths": LENGTHS} | fields))
        return workload_from_file(path)

    return written


def built(spec: WorkloadSpec, duration_s: float = 100.0, seed: int = 1) -> Workload:
    return build_workload(spec, models=["m"], duration_s=duration_s, seed=seed)


def trace_file(folder: Path, *lines: str) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def content_ids(requests: tuple[PlannedRequest, ...]) -> set[str]:
    return {block.content_id for request in requests for block in request.blocks}


@pytest.mark.slow
def test_requests_are_the_same_in_any_process() -> None:
    spec = ROOT / "loadtest/workloads/multi-turn-shared-prefix.yaml"
    code = (
        "from pathlib import Path\n"
        "from loadtest.workload.build import build_workload\n"
        "from loadtest.workload.prompts import Vocabulary, prompt_token_ids\n"
        "from loadtest.workload.spec import workload_from_file\n"
        f"spec = workload_from_file(Path({str(spec)!r}))\n"
        "found = build_workload(spec, models=['m', 'n'], duration_s=60, seed=7).requests\n"
        "print(found)\n"
        "print([prompt_token_ids(each.blocks, Vocabulary(range(1, 1000))) for each in found])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert said[0] == said[1]
    assert said[0].count(b"PlannedRequest(") > 50


def test_another_seed_makes_other_requests(spec_of: SpecOf) -> None:
    first, second = built(spec_of()).requests, built(spec_of(), seed=2).requests

    assert not {each.offset_s for each in first} & {each.offset_s for each in second}
    assert not content_ids(first) & content_ids(second)


def test_another_workload_of_the_same_seed_shares_no_prompt(spec_of: SpecOf) -> None:
    slow = built(spec_of())
    fast = built(spec_of(arrivals={"law": "poisson", "rate_per_s": 40}))

    assert not content_ids(slow.requests) & content_ids(fast.requests)


def test_the_folder_of_a_trace_does_not_matter(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        trace = trace_file(folder, '{"input_tokens": 3, "output_tokens": 2, "offset_s": 0}')
        found.append(built(WorkloadSpec.from_trace(Path(trace))).requests)

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arrivals", "at_s"),
    [
        ({"law": "constant", "rate_per_s": 2}, [0, 0.5, 1, 1.5, 2, 2.5]),
        (
            {
                "law": "steps",
                "points": [{"at_s": 0, "rate_per_s": 1}, {"at_s": 1, "rate_per_s": 2}],
                "cv": 0,
            },
            [0, 1, 1.5, 2, 2.5],
        ),
        (
            {
                "law": "ramp",
                "points": [{"at_s": 0, "rate_per_s": 0}, {"at_s": 3, "rate_per_s": 3}],
                "cv": 0,
            },
            [0, 2**0.5, 2, 6**0.5, 8**0.5],
        ),
    ],
)
def test_even_arrivals_come_when_their_law_says(
    spec_of: SpecOf, arrivals: dict[str, object], at_s: list[float]
) -> None:
    requests = built(spec_of(arrivals=arrivals), 3).requests

    assert [request.offset_s for request in requests] == pytest.approx(at_s)


@pytest.mark.parametrize("cv", [3.0, 0.2])
def test_gamma_arrivals_have_their_variation(spec_of: SpecOf, cv: float) -> None:
    spec = spec_of(arrivals={"law": "gamma", "rate_per_s": 20, "cv": cv})
    gaps_s = np.diff([request.offset_s or 0.0 for request in built(spec, 500).requests])

    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.1)


def test_request_ids_are_unique_and_offsets_ascend(spec_of: SpecOf) -> None:
    requests = built(spec_of()).requests

    assert len({request.request_id for request in requests}) == len(requests)
    offsets_s = [request.offset_s for request in requests]
    assert offsets_s == sorted(offsets_s)


def test_a_longer_run_begins_with_the_shorter(spec_of: SpecOf) -> None:
    shorter, longer = built(spec_of(), 50).requests, built(spec_of(), 100).requests

    assert longer[: len(shorter)] == shorter


def test_the_mix_tenants_and_priorities_have_their_shares(spec_of: SpecOf) -> None:
    spec = spec_of(
        mix=[{"model": "a", "weight": 3}, {"model": "b", "api": "completions"}],
        tenants={"acme": 1, "globex": 4},
        priorities={0: 9, -1: 1},
    )
    requests = build_workload(spec, models=["b", "a", "c"], duration_s=500, seed=1).requests

    def shares(field: str) -> dict[object, float]:
        counts = Counter(getattr(request, field) for request in requests)
        return {key: count / len(requests) for key, count in counts.items()}

    assert shares("model") == pytest.approx({"a": 0.75, "b": 0.25}, abs=0.02)
    assert shares("tenant") == pytest.approx({"acme": 0.2, "globex": 0.8}, abs=0.02)
    assert shares("priority") == pytest.approx({0: 0.9, -1: 0.1}, abs=0.02)
    assert {(request.model, request.api) for request in requests} == {
        ("a", Api.CHAT),
        ("b", Api.COMPLETIONS),
    }


def test_without_a_mix_all_models_are_asked_equally(spec_of: SpecOf) -> None:
    requests = build_workload(spec_of(), models=["a", "b"], duration_s=500, seed=1).requests

    assert Counter(request.model for request in requests)["a"] == pytest.approx(5000, abs=250)


def test_a_model_that_is_not_there_is_refused(spec_of: SpecOf) -> None:
    with pytest.raises(LoadTestError, match="mix has 'x'; allowed: a, m"):
        build_workload(spec_of(mix=[{"model": "x"}]), models=["m", "a"], duration_s=1, seed=1)
    with pytest.raises(LoadTestError, match="no models"):
        build_workload(spec_of(), models=[], duration_s=1, seed=1)


def test_more_than_a_process_can_plan_is_refused(spec_of: SpecOf) -> None:
    with pytest.raises(LoadTestError, match=r"about 2e\+07 requests in all; allowed: at most 1e"):
        built(spec_of(), duration_s=1_000_000)


def test_prefixes_are_shared_by_popularity_and_come_first(spec_of: SpecOf) -> None:
    spec = spec_of(prefixes={"count": 3, "tokens": {"law": "fixed", "value": 64}, "zipf": 1})
    requests = built(spec, 500).requests
    firsts = Counter(request.blocks[0].content_id for request in requests)

    # 1, 1/2 and 1/3 in proportion.
    shares = [count / len(requests) for _, count in firsts.most_common()]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    assert {request.input_tokens for request in requests} == {114}
    assert len({request.blocks[1].content_id for request in requests}) == len(requests)


def test_a_session_has_its_turns_in_order_and_one_prefix(spec_of: SpecOf) -> None:
    spec = spec_of(
        prefixes={"count": 2, "tokens": {"law": "fixed", "value": 64}},
        sessions={
            "turns": {"law": "uniform", "min": 1, "max": 3},
            "think_time_s": {"law": "fixed", "value_s": 2},
        },
        tenants={"a": 1, "b": 1},
    )
    requests = built(spec).requests
    starts = [at for at, request in enumerate(requests) if request.turn == 0]
    sessions = [requests[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]

    assert {len(turns) for turns in sessions} == {1, 2, 3}
    for turns in sessions:
        assert [turn.turn for turn in turns] == list(range(len(turns)))
        assert [turn.offset_s is None for turn in turns] == [False] + [True] * (len(turns) - 1)
        assert [turn.think_time_s for turn in turns] == [0.0] + [2.0] * (len(turns) - 1)
        assert [turn.input_tokens for turn in turns] == [114] + [50] * (len(turns) - 1)
        assert len({turn.tenant for turn in turns}) == 1
        assert {turn.session_id is None for turn in turns} == {len(turns) == 1}


def test_a_short_context_cuts_prompts_and_ends_sessions(spec_of: SpecOf) -> None:
    spec = spec_of(
        lengths={
            "input": {"law": "uniform", "min": 10, "max": 200},
            "output": {"law": "uniform", "min": 1, "max": 90},
        },
        sessions={
            "turns": {"law": "fixed", "value": 4},
            "think_time_s": {"law": "fixed", "value_s": 0},
        },
        max_context_tokens=100,
    )
    requests = built(spec).requests
    totals: Counter[str] = Counter()
    for request in requests:
        totals[request.session_id or request.request_id] += (
            request.input_tokens + request.output_tokens
        )

    assert max(totals.values()) == 100
    assert max(request.output_tokens for request in requests) == 50
    assert {request.turn for request in requests} >= {0, 1}


def test_a_closed_loop_has_conversations_without_end_and_no_schedule() -> None:
    spec = WorkloadSpec.from_users(4, input_tokens=10, output_tokens=5, think_time_s=1.5)
    workload = built(spec)
    shares = [list(islice(workload.closed_loop(worker, 2), 500)) for worker in range(2)]
    requests = [each for share in shares for (each,) in share]

    assert (workload.num_users, workload.requests) == (4, ())
    assert {(request.offset_s, request.think_time_s) for request in requests} == {(None, 1.5)}
    assert len({request.request_id for request in requests}) == 1000
    # How many processes share them does not change them.
    alone = islice(built(spec).closed_loop(0, 1), 1000)
    assert {turns[0] for turns in alone} == set(requests)


def test_an_open_loop_has_no_users(spec_of: SpecOf) -> None:
    workload = built(spec_of())

    assert workload.num_users is None
    with pytest.raises(LoadTestError, match="closed loop was asked of an open one"):
        workload.closed_loop(0, 1)


ROWS = tuple(
    f'{{"input_tokens": {n + 1}, "output_tokens": 2, "offset_s": {n}}}' for n in range(100)
)


def replay(folder: Path, *rows: str, **fields: object) -> WorkloadSpec:
    path = folder / "workload.yaml"
    trace = trace_file(folder, *rows)
    lengths = fields.pop("lengths", None)
    arrivals = {"law": "replay", "trace": trace} | fields
    path.write_text(yaml.safe_dump({"arrivals": arrivals, "lengths": lengths}))
    return workload_from_file(path)


def test_a_replay_is_the_trace_as_it_stands(tmp_path: Path) -> None:
    requests = built(replay(tmp_path, *ROWS), 50).requests

    assert [request.offset_s for request in requests] == list(range(50))
    assert [request.input_tokens for request in requests] == list(range(1, 51))


def test_a_replay_runs_as_fast_as_its_scale(tmp_path: Path) -> None:
    requests = built(replay(tmp_path, *ROWS, scale=4), 50).requests

    assert [request.offset_s for request in requests] == [n / 4 for n in range(100)]


def test_a_replay_is_thinned_to_a_rate(tmp_path: Path) -> None:
    instants_s = [n / 64 for n in range(6400)]
    rows = [f'{{"input_tokens": 1, "output_tokens": 2, "offset_s": {at}}}' for at in instants_s]
    requests = built(replay(tmp_path, *rows, rate_per_s=12.8), 100).requests

    assert len(requests) == pytest.approx(1280, abs=4 * (6400 * 0.2 * 0.8) ** 0.5)
    assert {request.offset_s for request in requests} <= set(instants_s)


def test_a_rate_above_the_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"rate_per_s is 3; allowed: at most 1, what .* 100 s"):
        built(replay(tmp_path, *ROWS, rate_per_s=3), 500)


def test_a_replay_that_repeats_has_prompts_of_its_own_each_time(tmp_path: Path) -> None:
    requests = built(replay(tmp_path, *ROWS, repeat=True), 250).requests

    assert [request.offset_s for request in requests] == pytest.approx(list(range(250)))
    assert requests[100].input_tokens == 1
    assert len(content_ids(requests)) == 250


@pytest.mark.parametrize("fields", [{"repeat": True}, {"rate_per_s": 1}])
def test_a_trace_that_comes_at_once_has_no_rate(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(LoadTestError, match="all of it comes at once"):
        built(replay(tmp_path, ROWS[0], **fields))


def test_the_arrivals_of_a_trace_may_have_other_lengths(tmp_path: Path) -> None:
    law = {"input": {"law": "fixed", "value": 9}}
    requests = built(replay(tmp_path, *ROWS, lengths=law), 50).requests

    assert [request.offset_s for request in requests] == list(range(50))
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(9, 2)}


def test_a_traces_sessions_stay_together(tmp_path: Path) -> None:
    rows = (
        '{"session": "s", "input_tokens": 5, "output_tokens": 1, "offset_s": 0}',
        '{"input_tokens": 6, "output_tokens": 1, "offset_s": 1}',
        '{"session": "s", "input_tokens": 7, "output_tokens": 1, "offset_s": 8}',
        '{"session": "s", "input_tokens": 8, "output_tokens": 1, "offset_s": 9, "think_time_s": 3}',
    )
    first, second, third, alone = built(replay(tmp_path, *rows, scale=2)).requests

    assert [each.offset_s for each in (first, second, third, alone)] == [0, None, None, 0.5]
    assert [each.think_time_s for each in (first, second, third)] == [0, 4, 1.5]
    assert first.session_id == second.session_id == third.session_id is not None
    assert alone.session_id is None


def test_texts_are_sent_word_for_word_with_a_law_for_their_answers(tmp_path: Path) -> None:
    rows = (
        '{"prompt": "one", "offset_s": 0}',
        '{"prompt": "two", "input_tokens": 3, "offset_s": 1}',
    )
    law = {"output": {"law": "fixed", "value": 9}}
    one, two = built(replay(tmp_path, *rows, lengths=law)).requests

    assert (one.text, one.input_tokens, one.output_tokens) == ("one", 0, 9)
    assert (two.text, two.input_tokens, two.output_tokens) == ("two", 3, 9)


def test_a_row_that_lacks_its_answers_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"no output_tokens; allowed: lengths\.output"):
        built(replay(tmp_path, '{"prompt": "one", "offset_s": 0}'))


def test_a_replay_of_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="it says no times"):
        built(replay(tmp_path, '{"prompt": "one", "output_tokens": 1}'))


def test_lengths_of_a_trace_come_all_once_before_any_comes_again(
    spec_of: SpecOf, tmp_path: Path
) -> None:
    spec = spec_of(lengths={"trace": trace_file(tmp_path, *ROWS)})
    requests = built(spec).requests
    lengths = [request.input_tokens for request in requests]

    assert lengths[:100] != list(range(1, 101))
    assert sorted(lengths[:100]) == sorted(lengths[100:200]) == list(range(1, 101))
    assert len(content_ids(requests)) == len(requests)


def test_sessions_of_a_trace_without_times_follow_at_once(spec_of: SpecOf, tmp_path: Path) -> None:
    row = '{"session": "s", "input_tokens": 5, "output_tokens": 1}'
    requests = built(spec_of(lengths={"trace": trace_file(tmp_path, row, row)})).requests

    first, second = requests[:2]
    assert first.session_id == second.session_id is not None
    assert (second.turn, second.offset_s, second.think_time_s) == (1, None, 0)


def test_prefixes_before_texts_are_refused(spec_of: SpecOf, tmp_path: Path) -> None:
    trace = trace_file(tmp_path, '{"prompt": "one", "output_tokens": 1}')
    prefixes = {"count": 1, "tokens": {"law": "fixed", "value": 4}}

    with pytest.raises(LoadTestError, match="prefixes beside a trace's texts"):
        built(spec_of(lengths={"trace": trace}, prefixes=prefixes))


def test_equal_hash_ids_are_equal_tokens(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}',
        '{"timestamp": 1500, "input_length": 1024, "output_length": 6, "hash_ids": [7, 9]}',
        '{"timestamp": 1700, "input_length": 540, "output_length": 6, "hash_ids": [7, 8]}',
    )
    vocabulary = Vocabulary(range(100, 30_001))
    first, second, third = (
        prompt_token_ids(request.blocks, vocabulary)
        for request in built(replay(tmp_path, *rows)).requests
    )

    assert [len(each) for each in (first, second, third)] == [600, 1024, 540]
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]
    assert first[:540] == third


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_servegens_clients_come_at_the_wanted_rate(scale: float, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,40,1,Gamma,1,1\n")
    (tmp_path / "b.csv").write_text("0,20,2,Weibull,0.6,1\n")
    wanted = WorkloadSpec.from_trace(
        tmp_path, rate_per_s=30.0 * scale, input_tokens=9, output_tokens=1
    )
    scaled = WorkloadSpec.from_trace(tmp_path, scale=scale / 2, input_tokens=9, output_tokens=1)

    assert len(built(wanted, 500).requests) == pytest.approx(15_000 * scale, rel=0.04)
    offsets = [
        [request.offset_s for request in built(spec, 50).requests] for spec in (wanted, scaled)
    ]
    assert offsets[0] == offsets[1]


def test_an_idle_stretch_of_servegen_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,0,0,,0,0\n600,2,1,Gamma,1,1\n")
    spec = WorkloadSpec.from_trace(tmp_path, rate_per_s=3.0, input_tokens=9, output_tokens=1)

    with pytest.raises(LoadTestError, match="nothing arrives in 60 s"):
        built(spec, 60)


def test_a_duration_that_is_none_is_refused(spec_of: SpecOf) -> None:
    with pytest.raises(LoadTestError, match="duration_s is 0; allowed: above 0"):
        built(spec_of(), 0)


def test_the_azure_conversation_is_thinned_to_what_is_wanted() -> None:
    trace = public_trace("azure2023/AzureLLMInferenceTrace_conv.csv")
    requests = built(WorkloadSpec.from_trace(trace, rate_per_s=2.0), 3000).requests

    assert len(requests) / 3000 == pytest.approx(2.0, abs=0.1)
    mean = sum(request.input_tokens for request in requests) / len(requests)
    assert mean == pytest.approx(1155, rel=0.05)
