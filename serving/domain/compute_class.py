"""A compute class as the policy sees it: what its slices cost, how they come, how they go. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeClass:
    """The terms of one compute class for one model's slice shape.

    `usd_per_slice_hour` is what a slice costs while it is had. `is_prepaid`: capacity that is paid
    for whether used or not, up to `max_slices`. `is_revocable`: may be taken away at any time, and
    all of it at once. `correlation_group` names what is lost together (a zone, say); revocable
    classes of different groups are not lost together. `max_slices` is quota, `min_slices` are kept
    whatever the load. `provisioning_s` is how long a slice usually takes to come, until experience
    says better; `load_s` how long an engine then takes to be ready. `losses_per_hour` is how often
    a slice is usually taken away, until experience says better. `patience_s` is how long a wished
    slice may take before others are asked for it (`None`: as long as experience says is usual).
    `max_run_s` is how long a slice is kept at most (`None`: no end).
    """

    name: str
    usd_per_slice_hour: float
    is_prepaid: bool = False
    is_revocable: bool = False
    correlation_group: str = ""
    min_slices: int = 0
    max_slices: int = 1000
    provisioning_s: float = 120.0
    load_s: float = 120.0
    losses_per_hour: float = 0.0
    patience_s: float | None = None
    max_run_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_slices <= self.max_slices:
            msg = f"{self.name}: min_slices={self.min_slices} must lie in 0..{self.max_slices}"
            raise ValueError(msg)
