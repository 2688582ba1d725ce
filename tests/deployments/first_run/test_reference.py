"""The reference judges answers token by token, by the shipped model itself."""

import pytest

pytestmark = pytest.mark.slow

MODEL = "models/slicewise-demo"


def test_own_choices_have_no_gap_and_another_token_has_one() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from deployments.first_run.requests.reference import main

    prompt = [5, 17, 200, 31]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    answer = whole[0, len(prompt) :].tolist()
    other = [*answer[:3], (answer[3] + 1) % 1536, *answer[4:]]
    own, changed = main(MODEL, "float32", [(prompt, answer), (prompt, other)])
    assert [gap.nats for gap in own] == [0.0] * 8
    assert [gap.nats for gap in changed[:3]] == [0.0] * 3
    assert changed[3].nats > 0.1
    assert all(0 < gap.step < 1e-4 for gap in own)


def test_step_is_how_far_the_next_number_of_the_type_is() -> None:
    import torch

    from deployments.first_run.requests.reference import steps_at

    sizes = torch.tensor([0.5, 15.9, 16.0, 25.0, 31.8, 32.0, -20.0], dtype=torch.bfloat16)
    larger = torch.nextafter(sizes.abs(), torch.tensor(float("inf"), dtype=torch.bfloat16))
    apart = (larger.float() - sizes.abs().float()).tolist()
    assert steps_at(sizes).tolist() == apart
    assert steps_at(sizes)[3] == 0.125
    assert steps_at(torch.tensor([25.0])).item() == pytest.approx(2**-19)
