"""The throughput that others have published for a model on chips, with its source. Pure.

All are of tpu-inference's own continuous integration: the least that its nightly runs accept.
"""

from dataclasses import dataclass

# Read 2026-11-22.
_SOURCE = "lower bound of tpu-inference's CI, tpu-inference 0.32.0 .buildkite"


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """Requests per second of one engine, on so many chips; `model` ends a Hugging Face id."""

    model: str
    generation: str
    num_chips: int
    requests_per_s: float
    input_tokens: int = 1800
    output_tokens: int = 128
    # Users who wait for their answers: enough that the engine is never short of work.
    concurrency: int = 128
    source: str = _SOURCE


FIGURES = (
    PublishedFigure("Llama-3.1-8B-Instruct", "v6e", 1, 10.77),
    PublishedFigure("Llama-3.3-70B-Instruct", "v6e", 8, 7.0),
    PublishedFigure("Qwen3-32B", "v6e", 8, 12.46),
    PublishedFigure("Qwen3-30B-A3B", "v6e", 8, 7.20),
    PublishedFigure("Qwen3-4B", "v6e", 1, 11.0),
)


def published_for(source: str, generation: str, num_chips: int) -> PublishedFigure | str:
    """Returns the figure for a model on one slice, or why none holds."""
    name = source.rstrip("/").rpartition("/")[2].lower()
    of_model = [figure for figure in FIGURES if figure.model.lower() == name]
    for figure in of_model:
        if (figure.generation, figure.num_chips) == (generation, num_chips):
            return figure
    if not of_model:
        return f"no figure known for {source}"
    known = ", ".join(f"{figure.num_chips} chips of {figure.generation}" for figure in of_model)
    return f"no figure known for {source} on {num_chips} chips of {generation}, only on {known}"
