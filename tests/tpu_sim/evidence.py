"""What a run of these tests has seen, as the page that `docs/results/tpu-parity.md` is."""

import time
from dataclasses import dataclass, field

from serving.engine.tpu_sim.replacements import as_markdown

_HEAD = """# tpu-inference on CPU, reference attention

Written by a run of `make test-tpu-sim`. Not a TPU result: everything below ran on x86-64 CPUs, with
what the first table names in the place of a TPU host. It shows that model code, scheduler,
executors, placement and our own parts around them give the right tokens. It says nothing of speed
or memory on a TPU.

"""


@dataclass
class Evidence:
    """Rows of the parity table, and lines on where workers ran."""

    versions: dict[str, str]
    commit: str
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    placement: list[str] = field(default_factory=list)

    def parity(self, what: str, where: str, reference: str, num_equal: int) -> None:
        """So many outputs were equal to the reference, token for token."""
        self.rows.append((what, where, reference, f"{num_equal} of {num_equal}"))

    def placed(self, line: str) -> None:
        """Which worker ran on which host."""
        self.placement.append(line)

    def as_markdown(self) -> str:
        """The page."""
        versions = ", ".join(f"{name} {each}" for name, each in self.versions.items())
        day = time.strftime("%Y-%m-%d", time.gmtime())
        parts = [
            _HEAD,
            f"Versions: {versions}. Run on {day}, at commit {self.commit} or behind it.\n",
            f"## What is replaced\n\n{as_markdown()}\n",
            "## Parity\n\nTiny random models (2 layers, heads of 128), float32, greedy. Outputs "
            "that are equal, token for\ntoken; a single unequal one fails the run.\n",
            "| what | on | equal to | outputs |\n|---|---|---|---|\n"
            + "".join(f"| {' | '.join(row)} |\n" for row in self.rows),
        ]
        if self.placement:
            lines = "".join(f"- {line}\n" for line in self.placement)
            parts.append(f"## Placement and programs\n\n{lines}")
        return "\n".join(parts)
