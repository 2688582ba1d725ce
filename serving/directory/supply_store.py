"""What the directory keeps and publishes of slices, in Ray's own key-value store.

Owns the calls. They block for a round trip to Ray's head, which keeps everything in Redis where it
has one: faults outlive directory and head.
"""

from ray.experimental import internal_kv

from serving.domain.supply.beat import ReportBeat, decode_beat
from serving.domain.supply.faults import FaultsError, SliceFaults, decode_faults
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.orders import StandingOrders, decode_orders
from serving.domain.supply.pods import GroupPods, decode_pods
from serving.domain.supply.records import SupplyReport, encode_supply


def read_faults(keys: SupplyKeys) -> SliceFaults:
    """Returns what is held against slices; nothing if another version wrote it."""
    text: bytes | None = internal_kv._internal_kv_get(keys.faults)
    try:
        return SliceFaults() if text is None else decode_faults(text)
    except FaultsError:
        return SliceFaults()


def write_faults(keys: SupplyKeys, text: bytes) -> None:
    """Stores what is held against slices."""
    internal_kv._internal_kv_put(keys.faults, text, overwrite=True)


def read_orders(keys: SupplyKeys) -> StandingOrders:
    """Returns what operators have ordered.

    Raises:
        OrdersError: another version wrote them.
    """
    text: bytes | None = internal_kv._internal_kv_get(keys.orders)
    return decode_orders(text)


def read_pods_beat(keys: SupplyKeys) -> ReportBeat | None:
    """Returns the provisioner's last beat; `None` where none ever ran."""
    text: bytes | None = internal_kv._internal_kv_get(keys.pods_beat)
    return None if text is None else decode_beat(text)


def read_pods(keys: SupplyKeys) -> tuple[GroupPods, ...]:
    """Returns the provisioner's last report.

    Raises:
        PodsReportError: another version wrote it.
    """
    text: bytes | None = internal_kv._internal_kv_get(keys.pods)
    return () if text is None else decode_pods(text)


def write_supply(keys: SupplyKeys, report: SupplyReport) -> None:
    """Publishes the records of all slices; the beat that names this version has to follow."""
    internal_kv._internal_kv_put(keys.supply, encode_supply(report), overwrite=True)


def write_supply_beat(keys: SupplyKeys, beat: ReportBeat) -> None:
    """Shows that the directory lives."""
    internal_kv._internal_kv_put(keys.supply_beat, beat.encode(), overwrite=True)
