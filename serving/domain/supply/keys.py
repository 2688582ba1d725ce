"""The keys in Ray's own key-value store under which directory and provisioner meet. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupplyKeys:
    """The keys of one application.

    A beat is written after the report that it names, and shows that the writer of both lives.
    """

    application: str

    @property
    def supply(self) -> bytes:
        """The directory's report of all slices."""
        return self._key("supply")

    @property
    def supply_beat(self) -> bytes:
        """The beat of that report."""
        return self._key("supply-beat")

    @property
    def pods(self) -> bytes:
        """The provisioner's report of pods."""
        return self._key("pods")

    @property
    def pods_beat(self) -> bytes:
        """The beat of that report."""
        return self._key("pods-beat")

    @property
    def faults(self) -> bytes:
        """What is held against slices: the directory's own."""
        return self._key("faults")

    @property
    def orders(self) -> bytes:
        """What operators have ordered: written by `slicewise order` alone."""
        return self._key("orders")

    @property
    def engines(self) -> bytes:
        """What the keys of notes on ready engines begin with: the directory's own, one each."""
        return self._key("engine:")

    @property
    def usage(self) -> bytes:
        """What tenants have used: the directory's own."""
        return self._key("usage")

    @property
    def plan(self) -> bytes:
        """The last scaling plan: written by the policy alone."""
        return self._key("plan")

    def policy_memory(self, model: str) -> bytes:
        """What the policy has learned of a model: its own."""
        return self._key(f"policy-memory:{model}")

    def _key(self, what: str) -> bytes:
        return f"slicewise:{self.application}:slices:{what}".encode()
