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
    assert own == [0.0] * 8
    assert changed[:3] == [0.0] * 3
    assert changed[3] > 0.1
