"""Defines a configuration's requirements of one engine on TPU, and reads its arguments. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.domain.topology import SliceShape

Args = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class EngineRequirements:
    """The requirements of one engine: its model's name, its slices, and what is set by hand.

    It runs on `num_slices` of `shape`; several are a multislice, over the data-centre network.

    Where a slice is divided, `shape` is the part that it has, and `num_engines` share the slice.

    `args` are vLLM's engine arguments by their Python names, `env` the environment variables of its
    processes. `compile_cache` is the folder on each host below which compiled programs are kept,
    `None` if they are not kept.
    """

    model: str
    shape: SliceShape
    args: Args = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    compile_cache: str | None = None
    num_slices: int = 1
    num_engines: int = 1

    @property
    def strategy(self) -> Args:
        """The `sharding.sharding_strategy` of `additional_config`; empty when not given."""
        sharding = section(section(self.args, "additional_config"), "sharding")
        return section(sharding, "sharding_strategy")

    @property
    def qwix_rules(self) -> tuple[Args, ...]:
        """The rules by which qwix quantises weights as they are loaded; empty when not given."""
        quantization = section(section(self.args, "additional_config"), "quantization")
        rules = section(quantization, "qwix").get("rules")
        given = rules if isinstance(rules, list | tuple) else ()
        return tuple(rule for rule in given if isinstance(rule, Mapping))

    @property
    def num_hosts(self) -> int:
        """The number of hosts of all its slices, each with one worker."""
        return self.num_slices * self.shape.num_hosts

    @property
    def data_parallel(self) -> int:
        """How many copies of the model share one slice; joined slices hold one each besides."""
        return count(self.args, "data_parallel_size") or 1

    @property
    def copies(self) -> int:
        """How many times the engine holds the whole model, each time with requests of its own."""
        return self.num_slices * self.data_parallel

    @property
    def has_lora(self) -> bool:
        """True if adapters may be loaded."""
        return self.args.get("enable_lora") is True


def section(args: Args, name: str) -> Args:
    """Returns a nested mapping; an empty one in place of anything else."""
    value = args.get(name)
    return value if isinstance(value, Mapping) else {}


def count(args: Args, name: str) -> int | None:
    """Returns an argument that is an integer; `None` when it is not given or something else."""
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_on(env: Mapping[str, str], name: str) -> bool:
    """Returns whether a variable is set, as tpu-inference reads a switch."""
    return env.get(name, "").lower() in ("1", "true")
