"""Reads Dockerfiles, and the rules that ours keep. Heredocs are not read: a rule forbids them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_EXACT_TAG = re.compile(r"[a-z0-9./_-]+:\d+\.\d+\.\d+[a-z0-9.-]*(@sha256:[0-9a-f]{64})?")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY)", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction with its arguments on one line; `flags` are those like `--from=x`."""

    line: int
    name: str
    flags: tuple[str, ...]
    rest: str


def parse(text: str) -> list[Instruction]:
    found, parts, start = [], [], 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        # A comment within a continued instruction is no part of it.
        if stripped.startswith("#") or (not stripped and not parts):
            continue
        start = start if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            found.append(_instruction(start, " ".join(parts)))
            parts = []
    assert not parts, "the last instruction goes on"
    return found


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    flags = []
    while (match := re.match(r"\s*(--[a-z-]+(=\S+)?)\s+", rest)) is not None:
        flags.append(match[1])
        rest = rest[match.end() :]
    return Instruction(line, name.upper(), tuple(flags), rest.strip())


def stages(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The instructions of each stage, from its FROM on."""
    found: list[list[Instruction]] = []
    for each in instructions:
        if each.name == "FROM":
            found.append([])
        if found:
            found[-1].append(each)
    return found


def commands(instruction: Instruction) -> list[list[str]]:
    """The words of each command of a RUN."""
    parts = re.split(r"&&|;|\|\|", instruction.rest)
    return [shlex.split(part) for part in parts]


def environment(stage: list[Instruction]) -> dict[str, str]:
    pairs = [pair for each in stage if each.name == "ENV" for pair in shlex.split(each.rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def problems(text: str) -> Iterator[str]:
    """What is against our rules: the rule, by its short name, and the line."""
    instructions = parse(text)
    all_stages = stages(instructions)
    last = all_stages[-1]
    names = {each.rest.split()[-1] for each in instructions if each.name == "FROM"}
    if len(all_stages) < 2:
        yield "stages: one only"
    for each in instructions:
        yield from _of_one(each, names)
    yield from _of_last(last)


def _of_one(each: Instruction, stage_names: set[str]) -> Iterator[str]:
    where = f"line {each.line}"
    if each.name == "FROM":
        image = each.rest.split()[0]
        if image not in stage_names - {image} and not _EXACT_TAG.fullmatch(image):
            yield f"base: {image} is no exact version, {where}"
    if each.name == "ADD":
        yield f"add: {where}"
    if each.name == "HEALTHCHECK":
        yield f"healthcheck: {where}"
    if each.name in ("ENV", "ARG") and _SECRET.search(each.rest):
        yield f"secret: {where}"
    if each.name == "COPY" and not any(flag.startswith("--from=") for flag in each.flags):
        sources = each.rest.split()[:-1]
        if any(source in (".", "./", "*") for source in sources):
            yield f"copy: the whole context, {where}"
    if each.name == "RUN":
        yield from _of_run(each, where)


def _of_run(each: Instruction, where: str) -> Iterator[str]:
    if "<<" in each.rest:
        yield f"heredoc: {where}"
        return
    for words in commands(each):
        if words[:1] in (["curl"], ["wget"]) or words[:1] == ["sudo"]:
            yield f"fetch: {words[0]}, {where}"
        if "pip" in words and "install" in words:
            is_own = words[-1] == "/build/source"
            if "--no-deps" not in words:
                yield f"pip: dependencies are not the lock's, {where}"
            if not is_own and "-r" not in words:
                yield f"pip: not from the lock, {where}"
            if is_own and "--no-build-isolation" not in words:
                yield f"pip: the build's own packages are not the lock's, {where}"
            if not any("target=/var/cache/pip" in flag for flag in each.flags):
                yield f"cache: pip, {where}"
        if words[:2] == ["apt-get", "install"]:
            if "--no-install-recommends" not in words:
                yield f"apt: recommends, {where}"
            if not any("target=/var/lib/apt/lists" in flag for flag in each.flags):
                yield f"cache: apt, {where}"


def _of_last(last: list[Instruction]) -> Iterator[str]:
    users = [each for each in last if each.name == "USER"]
    if not users or users[-1].rest != "1000:1000":
        yield "user: the last is not 1000:1000, as the pods say"
    elif any(each.name in ("RUN", "COPY") for each in last[last.index(users[-1]) :]):
        yield "user: something is done as the user who runs it"
    if any("pip" in words for each in last if each.name == "RUN" for words in commands(each)):
        yield "size: pip in the last stage"
    if environment(last).get("RAY_worker_niceness") != "0":
        yield "niceness: not 0"
    labels = {
        pair.split("=", 1)[0]
        for each in last
        if each.name == "LABEL"
        for pair in shlex.split(each.rest)
    }
    for label in ("title", "version", "licenses"):
        if f"org.opencontainers.image.{label}" not in labels:
            yield f"label: {label}"
