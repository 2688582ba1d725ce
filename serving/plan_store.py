"""Where the plan board is kept: one key in Ray's own key-value store, as Serve keeps its state.

Both calls block for a round trip to Ray's head: call them in a thread.
"""

from ray.experimental import internal_kv

from serving.plan_board import PlanBoard, decode_board, encode_board

_KEY = b"slicewise:plan-board"


def write_board(board: PlanBoard) -> None:
    """Replaces the board."""
    internal_kv._internal_kv_put(_KEY, encode_board(board), overwrite=True)


def read_board() -> PlanBoard | None:
    """The board; `None` when none was ever written in this cluster.

    Raises:
        PlanBoardError: another version wrote it.
    """
    text: bytes | None = internal_kv._internal_kv_get(_KEY)
    return None if text is None else decode_board(text)
