"""The fixed prompts of a first run: the same on every machine, so that answers can be compared."""

# Short enough for any model: none has more than 80 characters.
PROMPTS = (
    "The capital of France is",
    "A slice is a set of chips joined by a fast network, and a host is",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "Once upon a time there was a small",
    "The first ten prime numbers are 2, 3, 5,",
    "To be, or not to be, that is the",
    "SELECT name, count(*) FROM slices GROUP BY",
    "Monday, Tuesday, Wednesday,",
    '{"chips": 4, "hosts": [0, 1],',
    "The opposite of cold is",
    "In the year 1969 the first human walked on the",
    "Translate to German: Good morning. Answer:",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 =",
    "The chemical symbol of gold is",
    "A request waits until an engine has",
    "import os\n\nprint(os.",
    "The sun rises in the east and sets in the",
    "Roses are red, violets are",
    "What is the meaning of the word replica? It is",
)
