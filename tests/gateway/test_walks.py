"""The walk of a chat request in the guide is the way that a request takes."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from serving.telemetry.spans import NO_TRACER

from .test_http_edge import client_of
from .test_request_traces import stage_for

pytestmark = pytest.mark.imports_vllm

ROOT = Path(__file__).parents[2]
# What a walk says of a vLLM engine is driven here with a paced one, and its timetable.
PACED = {
    "serving/engine/paced/engine.py": "serving/engine/vllm/engine.py",
    "serving/engine/paced/batch.py": "serving/engine/vllm/engine.py",
    "serving/domain/tokens/paced.py": "serving/engine/vllm/engine.py",
}
# Of these, a request enters no function: they are the records, and what was built before it came.
WITHOUT_A_CALL = {"serving/link/messages.py", "serving/gateway/frontend.py"}
# Not of the request: heartbeats, the line that logs it, the numbers of metrics, and the questions
# whether it is sampled, how busy the loop is, when it begins, whose the connection is, whether
# its client has left, how its prompt ends, which engine has room for it or its beginning, and whose
# turn it is, and whether its answer may begin.
BESIDE = {
    "serving/engine/stats.py",
    "serving/domain/capacity/choice_costs.py",
    "serving/domain/capacity/objectives.py",
    "serving/domain/capacity/overdue.py",
    "serving/domain/models/request_fields/service_class.py",
    "serving/domain/tokens/cached_blocks.py",
    "serving/domain/tokens/named_blocks.py",
    "serving/domain/usage/tenant_shares.py",
    "serving/gateway/dispatch/batch_work.py",
    "serving/gateway/dispatch/choice/cache_index.py",
    "serving/gateway/dispatch/choice/engine_roster.py",
    "serving/gateway/dispatch/choice/popular.py",
    "serving/gateway/dispatch/deadlines.py",
    "serving/gateway/dispatch/first_token_times.py",
    "serving/gateway/dispatch/first_tokens.py",
    "serving/gateway/dispatch/full_time.py",
    "serving/gateway/dispatch/demand.py",
    "serving/gateway/dispatch/choice/engine_table.py",
    "serving/gateway/dispatch/choice/few_engines.py",
    "serving/gateway/dispatch/forecast.py",
    "serving/gateway/dispatch/known_room.py",
    "serving/gateway/dispatch/line.py",
    "serving/gateway/dispatch/waiting.py",
    "serving/gateway/edge/answers/exchange.py",
    "serving/gateway/streams/answer_head.py",
    "serving/gateway/streams/connections.py",
    "serving/gateway/streams/detokenizing.py",
    "serving/gateway/streams/hold.py",
    "serving/gateway/streams/known/chats.py",
    "serving/gateway/streams/known/events.py",
    "serving/gateway/streams/known/forms.py",
    "serving/gateway/streams/known/prompts.py",
    "serving/gateway/streams/leaving.py",
    "serving/gateway/streams/pace.py",
    "serving/gateway/streams/turns.py",
    "serving/gateway/telemetry/request_metrics.py",
    "serving/gateway/telemetry/request_story.py",
    "serving/link/batch_counts.py",
    "serving/link/cache_teller.py",
    "serving/link/heartbeat.py",
    "serving/link/request_spans.py",
    "serving/link/rooms/dealing.py",
    "serving/link/rooms/gateway_rooms.py",
    "serving/link/rooms/room.py",
    "serving/link/rooms/step_watch.py",
    "serving/link/rooms/turns.py",
    "serving/link/rooms/ways.py",
    "serving/telemetry/log_lines.py",
    "serving/telemetry/loop_turns.py",
}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is a slice?"}],
    "max_tokens": 8,
    "stream": True,
}


def walk_of(title: str) -> list[str]:
    """The numbered files of a section of the guide."""
    text = (ROOT / "docs/guide/walks.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", section, re.M)


async def test_chat_request_enters_the_files_of_its_walk_and_no_others() -> None:
    listed = walk_of("A chat request")
    assert len(listed) == len(set(listed)) <= 23
    entered: set[str] = set()
    ours = f"{ROOT}/serving/"

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ours):
            entered.add(str(Path(path).relative_to(ROOT)))

    async with stage_for(NO_TRACER, 1) as stage, client_of(stage.edge) as client:
        first = await client.post("/v1/chat/completions", json=CHAT)  # builds what is built once
        assert first.status_code == 200, first.text
        profiled_before = sys.getprofile()
        sys.setprofile(note)
        try:
            answer = await client.post("/v1/chat/completions", json=CHAT)
        finally:
            sys.setprofile(profiled_before)
    assert answer.status_code == 200
    entered = {PACED.get(path, path) for path in entered} - BESIDE
    assert entered | WITHOUT_A_CALL == set(listed)
