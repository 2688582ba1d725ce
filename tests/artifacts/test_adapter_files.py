"""A bad adapter is named by `slicewise config check`, where its folder is at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.artifacts.adapter_files import adapter_complaints
from tests.e2e.several_models import write_adapter


def changed(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_adapter_that_an_engine_loads_has_no_complaint(tmp_path: Path) -> None:
    assert list(adapter_complaints(write_adapter(tmp_path / "good", rank=8), 8)) == []


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"r": 32}, "its rank is 32"),
        ({"r": 0}, "its rank is 0"),
        ({"rank_pattern": {"q_proj": 64}}, "its rank is 64"),
        ({"bias": "all"}, "it was trained with a bias (all)"),
        ({"use_dora": True}, "it needs use_dora, which vLLM does not compute"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules (lm_head)"),
    ],
)
def test_field_that_vllm_refuses_is_named(
    tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    folder = changed(write_adapter(tmp_path / "bad"), **fields)
    assert [each for each, _ in adapter_complaints(folder, 16)] == [complaint]


def test_folder_without_its_files_is_named(tmp_path: Path) -> None:
    assert [each for each, _ in adapter_complaints(tmp_path, 16)] == [
        "it has no weights",
        "its adapter_config.json cannot be read: No such file or directory",
    ]
    folder = write_adapter(tmp_path / "cut")
    (folder / "adapter_config.json").write_text("{")
    (complaint,) = [each for each, _ in adapter_complaints(folder, 16)]
    assert complaint.startswith("its adapter_config.json is not JSON: ")
    (folder / "adapter_config.json").write_text("[]")
    assert [each for each, _ in adapter_complaints(folder, 16)] == [
        "its adapter_config.json is not a JSON object"
    ]
    (folder / "adapter_config.json").write_text("{}")
    assert [each for each, _ in adapter_complaints(folder, 16)] == [
        "its adapter_config.json lacks r, lora_alpha, target_modules"
    ]
