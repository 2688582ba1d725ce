"""No secret leaves with the evidence, and what is none stays readable."""

import pytest

from deployments.first_run.record.masking import (
    MASK,
    is_secret_name,
    mask,
    mask_environment,
    secrets_of,
)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLICEWISE_API_KEY", "VLLM_API_KEYS",
     "DB_PASSWORD", "password", "api-key", "GOOGLE_CREDENTIAL", "keys"],
)  # fmt: skip
def test_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "keys_file", "TPU_NAME", "num_tokens", "tokenizer",
     "max_num_batched_tokens", "MONKEY_BUSINESS", "HF_HOME"],
)  # fmt: skip
def test_name_of_what_is_no_secret_is_left_alone(name: str) -> None:
    assert not is_secret_name(name)


def test_secret_of_the_environment_is_masked_wherever_it_stands() -> None:
    secrets = secrets_of({"MY_TOKEN": "sesame-open", "PATH": "/usr/bin"})
    text = mask("GET http://u:sesame-open@host/usr/bin", secrets)
    assert text == f"GET http://u:{MASK}@host/usr/bin"


def test_secret_of_the_configuration_is_masked() -> None:
    settings = {
        "applications": [{"args": {"models": [{"engine_env": {"S3_SECRET": "opensesame"}}]}}]
    }
    assert mask("opensesame", secrets_of({}, settings)) == MASK


def test_longer_secret_is_masked_whole_when_it_holds_a_shorter_one() -> None:
    secrets = secrets_of({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghij"})
    assert mask("abcdefghij", secrets) == MASK


def test_short_value_does_not_blot_out_the_rest() -> None:
    assert mask("it is true", secrets_of({"USE_TOKEN": "true"})) == "it is true"


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "aB3" * 10,
        "sk-" + "x9" * 12,
        "Authorization: Bearer abcdefghijklmnop",
        'token="abcdefghijklmnop1234"',
        '"api_key": "abcdefghijklmnop1234"',
        "-----BEGIN PRIVATE KEY-----\nMIIE\nabc\n-----END PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_masked_though_nobody_named_it(text: str) -> None:
    masked = mask(f"before {text} after", ())
    assert MASK in masked
    for word in ("aB3aB3", "x9x9", "abcdefghijklmnop", "MIIE"):
        assert word not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


@pytest.mark.parametrize(
    "text",
    ["12 tokens: 1, 2, 3", "token_ids: [1, 2]", '"max_tokens": 1234567890123', "tokens=128"],
)
def test_tokens_of_a_model_are_no_secrets(text: str) -> None:
    assert mask(text, ()) == text


def test_environment_is_told_with_its_values_and_without_its_secrets() -> None:
    environment = {"HF_TOKEN": "x", "TPU_NAME": "slice-0", "URL": "http://opensesame@h"}
    told = mask_environment(environment, ["opensesame"])
    assert told == {"HF_TOKEN": MASK, "TPU_NAME": "slice-0", "URL": f"http://{MASK}@h"}
