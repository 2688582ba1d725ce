"""The same requests once more, on simulated gateways and engines.

The simulation is told which request was sent when. Which gateway it came to nobody knows: here it
is chance. What a gateway's own work and the way to it take is not simulated.
"""

import asyncio
import random
from collections.abc import Sequence

from benchmarks.conversations.live import Sent
from benchmarks.conversations.loads import NUM_ENGINES, NUM_GATEWAYS, PACE, Load
from benchmarks.conversations.records import SIMULATED, Run, Turn
from benchmarks.servers import MODEL
from loadtest.planned_request import PlannedRequest
from loadtest.workload.prompts import Vocabulary, prompt_token_ids
from serving.domain.tokens.paced import LETTERS, paced_tokens
from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.simulated_fleet import SimulatedFleet, engines_of, simulated_fleet
from tests.gateway.dispatch.simulated_network import run_on_network

_MS = 1e-3
ENGINE = PacedConfig(
    time_per_token_s=PACE["tpot_ms"] * _MS,
    tpot_per_seq_s=PACE["tpot_per_seq_ms"] * _MS,
    prefill_tokens_per_s=PACE["prefill_tokens_per_s"],
    max_num_seqs=PACE["max_num_seqs"],
    max_num_batched_tokens=PACE["max_num_batched_tokens"],
    max_model_len=PACE["max_model_len"],
    kv_cache_tokens=PACE["kv_cache_tokens"],
    block_size=PACE["block_size"],
    vocab_size=2**31,
)


def replay(sent: Sent, load: Load, pair: int, seed: int) -> Run:
    """Answers what was sent, at the instants at which it was sent."""
    prompts = prompts_of(sent.planned, sent.prompts.vocabularies[MODEL])
    turns: list[Turn] = []
    run_on_network(_replay(sent, prompts, turns))
    return Run(SIMULATED, load.name, pair, seed, None, tuple(turns))


async def _replay(sent: Sent, prompts: dict[str, list[int]], turns: list[Turn]) -> None:
    chance, loop = random.Random(1), asyncio.get_running_loop()
    async with simulated_fleet(NUM_GATEWAYS, engines_of(ENGINE, NUM_ENGINES)) as fleet:
        began_s = loop.time()
        for record in sent.records:
            await asyncio.sleep(max(0.0, began_s + record.sent_s - loop.time()))
            request_id = record.request_id
            chance.choice(fleet.gateways).submit(
                request_id, prompts[request_id], record.planned_output_tokens
            )
        await fleet.until_done()
        turns += _turns(sent, fleet)


def _turns(sent: Sent, fleet: SimulatedFleet) -> list[Turn]:
    answers = {name: each for gateway in fleet.gateways for name, each in gateway.answers.items()}
    turns = []
    for record in sent.records:
        answer = answers[record.request_id]
        assert answer.ended_at_s is not None, "all were answered"
        whole_s = answer.ended_at_s - answer.came_at_s
        used = answer.prompt_tokens, answer.num_cached, answer.num_tokens
        turns.append(Turn(record.turn, round(answer.ttft_s, 6), round(whole_s, 6), *used))
    return turns


def prompts_of(planned: Sequence[PlannedRequest], vocabulary: Vocabulary) -> dict[str, list[int]]:
    """The whole prompts by request id: all turns before with their answers, and their own blocks.

    Turns of a conversation follow each other in `planned`.
    """
    prompts: dict[str, list[int]] = {}
    so_far: list[int] = []
    for each in planned:
        if each.turn == 0:
            so_far = []
        prompt = so_far + prompt_token_ids(each.blocks, vocabulary)
        prompts[each.request_id] = prompt
        so_far = prompt + paced_tokens(prompt, each.output_tokens, LETTERS)
    return prompts
