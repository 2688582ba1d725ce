"""Where the policy keeps the plan board: one key in Ray's own key-value store."""

from ray.experimental import internal_kv

from serving.domain.plan_report import BOARD_KEY, PlanBoard, encode_board


def write_board(board: PlanBoard) -> None:
    """Replaces the board. Blocks for a round trip to Ray's head: call it in a thread."""
    internal_kv._internal_kv_put(BOARD_KEY, encode_board(board), overwrite=True)
