"""Each request under a grammar gets its own mask from tpu-inference."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.tpu.grammar_rows import rows_as_read

IDS = st.lists(st.text("0189ab-", min_size=1, max_size=4), unique=True, max_size=8)


def read(
    request_ids: Sequence[str], masks: npt.NDArray[np.int32], batch: Sequence[str]
) -> dict[str, list[int]]:
    """As tpu-inference 0.32.0 reads them."""
    found: dict[str, list[int]] = {}
    for name in sorted(request_ids):
        if name in batch:
            found[name] = masks[len(found)].tolist()
    return found


def masks_of(request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
    """One row for each, which tells whose it is."""
    return np.array([[hash(name) % 1000, place] for place, name in enumerate(request_ids)], "i4")


@given(IDS, st.data())
def test_each_request_of_the_batch_has_its_own_mask(
    request_ids: list[str], data: st.DataObject
) -> None:
    batch = data.draw(st.lists(st.sampled_from(request_ids), unique=True) if request_ids else IDS)
    masks = masks_of(request_ids)
    own = {name: masks[request_ids.index(name)].tolist() for name in request_ids if name in batch}
    assert read(*rows_as_read(request_ids, masks, batch), batch) == own


def test_without_the_order_masks_would_be_mixed_up() -> None:
    """What tpu-inference does with them as they come."""
    request_ids = ["1-9", "1-10"]
    masks = masks_of(request_ids)
    assert read(request_ids, masks, request_ids)["1-9"] == masks[1].tolist()
