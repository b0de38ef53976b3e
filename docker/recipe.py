"""A Dockerfile as data: stages of instructions, for tests/test_container.py to judge and docker/prove.py to carry out.

Of the language it knows what ours uses: continuation lines, comments, ARG, ENV, ${NAME}, RUN and COPY with flags;
another instruction is refused, not skipped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR")


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``COPY --from=build a b`` has flags (("from", "build"),) and rest "a b"."""

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    rest: str

    def flag(self, name: str) -> str | None:
        """The value of a flag, or None."""
        return dict(self.flags).get(name)

    @property
    def mounts(self) -> list[dict[str, str]]:
        """The --mount flags of a RUN."""
        given = [value for name, value in self.flags if name == "mount"]
        return [dict(part.partition("=")[::2] for part in one.split(",")) for one in given]


@dataclass
class Stage:
    """A FROM and what follows it."""

    line: int
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        """The instructions of one kind."""
        return [one for one in self.instructions if one.name == name]


@dataclass(frozen=True)
class Recipe:
    """A whole Dockerfile."""

    arguments: dict[str, str]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of this name."""
        return next(stage for stage in self.stages if stage.name == name)

    def line_of(self, name: str) -> list[Stage]:
        """A stage and those that it stands on, lowest first."""
        names = {stage.name for stage in self.stages}
        stage = self.stage(name)
        return [*(self.line_of(stage.base) if stage.base in names else []), stage]

    def needed_for(self, name: str) -> list[str]:
        """The stages that have to be made for one, in order, itself last: its base and those it copies from."""
        needed: list[str] = []
        for stage in self.line_of(name):
            sources = [one.flag("from") for one in stage.all("COPY")]
            below = [stage.base] if stage.base in {s.name for s in self.stages} else []
            for other in [*below, *(source for source in sources if source)]:
                needed += [n for n in self.needed_for(other) if n not in needed]
            needed += [stage.name] if stage.name not in needed else []
        return needed


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``${NAME}`` and ``$NAME`` of known names by their values; others stay."""
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda m: values.get(m[1] or m[2], m[0]), text)


def _flags(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
    flags = []
    while found := re.match(r"--(\w+)=(\S+)\s+", text):
        flags.append((found[1], found[2]))
        text = text[found.end() :]
    return tuple(flags), text


def parse(text: str) -> Recipe:
    """Raises ValueError, with the line, for what it does not know."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start = number + 1
        parts: list[str] = []
        while number < len(lines):
            line = lines[number]
            number += 1
            if line.lstrip().startswith("#") or not line.strip():
                if parts:
                    continue
                break
            parts.append(line.rstrip().removesuffix("\\").rstrip())
            if not line.rstrip().endswith("\\"):
                break
        if not parts:
            continue
        name, _, rest = " ".join(part.strip() for part in parts).partition(" ")
        if name not in KNOWN:
            raise ValueError(f"line {start}: {name} is not among {', '.join(KNOWN)}")
        flags, rest = _flags(rest.lstrip())
        if name == "ARG" and not stages:
            key, _, value = rest.partition("=")
            arguments[key] = " ".join(shlex.split(value))
        elif name == "FROM":
            base, *more = substitute(rest, arguments).split()
            if len(more) != 2 or more[0].upper() != "AS":
                raise ValueError(f"line {start}: a stage needs a name: FROM {base} AS name")
            stages.append(Stage(start, base, more[1]))
        elif not stages:
            raise ValueError(f"line {start}: {name} before the first FROM")
        else:
            stages[-1].instructions.append(Instruction(start, name, flags, rest))
    return Recipe(arguments, stages)


def faults(recipe: Recipe, root: Path) -> list[str]:
    """What is wrong with a recipe whose context is `root`, after the rules that hadolint has and some of our own.

    DL3000 absolute WORKDIR, DL3002 last user, DL3003 cd, DL3004 sudo, DL3006 and 7 tags, DL3009, 14, 15, 27 apt, DL3022
    and 24 stages, DL3025 JSON, DL3042 pip's cache, DL3045 relative COPY, DL4003 one CMD, DL4006 pipefail.
    """
    found: list[str] = []
    names: list[str] = []
    for stage in recipe.stages:
        where = f"line {stage.line}: stage {stage.name}"
        if stage.base not in names:
            tag = stage.base.partition("@")[0].rpartition(":")[2]
            if not re.match(r"\d+\.\d+\.\d+", tag):
                found.append(f"{where}: {stage.base} is not pinned to a whole version")
        if stage.name in names:
            found.append(f"{where}: there are two of this name")
        names.append(stage.name)
        line = recipe.line_of(stage.name)
        inherited = [one for part in line for one in part.instructions]
        users = [one.rest for one in inherited if one.name == "USER"]
        is_last = stage is recipe.stages[-1]
        if (is_last or stage.all("CMD")) and (
            not users or users[-1].split(":")[0] in ("root", "0")
        ):
            found.append(f"{where}: ends as root")
        has_pipefail = any(one.name == "SHELL" and "pipefail" in one.rest for one in inherited)
        if len(stage.all("CMD")) > 1:
            found.append(f"{where}: more than one CMD")
        for one in stage.instructions:
            found += [f"line {one.line}: {fault}" for fault in _faults_of(one, names, root)]
            if one.name == "RUN" and re.search(r"[^|]\|[^|]", one.rest) and not has_pipefail:
                found.append(f"line {one.line}: a pipe without SHELL -o pipefail")
        if any(
            c.name == "COPY" and not c.rest.split()[-1].startswith("/") for c in inherited
        ) and not any(one.name == "WORKDIR" for one in inherited):
            found.append(f"{where}: copies to a relative path without WORKDIR")
    return found


def _faults_of(one: Instruction, names: list[str], root: Path) -> list[str]:
    """Of one instruction, by itself."""
    text, found = one.rest, []
    words = set(re.findall(r"[\w./-]+", text))
    if one.name == "RUN":
        found += [
            f"{word} has no place in a recipe"
            for word in ("sudo", "ssh", "cd", "curl", "wget", "apt")
            if word in words
        ]
        if "apt-get" in words:
            if not re.search(r"apt-get update.*&&.*apt-get install", text, re.DOTALL):
                found.append("apt-get update and install belong into one RUN")
            if "install" in words and not {"--yes", "-y"} & words:
                found.append("apt-get install asks: --yes")
            if "install" in words and "--no-install-recommends" not in words:
                found.append("apt-get install brings what nobody named: --no-install-recommends")
            cached = {mount.get("target") for mount in one.mounts if mount.get("type") == "cache"}
            if "/var/lib/apt/lists" not in cached and "rm -rf /var/lib/apt/lists" not in text:
                found.append("package lists stay in the layer: a cache mount, or remove them")
        has_cache = any(mount.get("target", "").endswith("/pip") for mount in one.mounts)
        if {"pip", ".venv/.installed"} & words and "--no-cache-dir" not in words and not has_cache:
            found.append("pip's cache stays in the layer: a cache mount")
    if one.name in ("CMD", "SHELL") and not text.startswith("["):
        found.append(f"{one.name} must be a JSON list, or signals do not reach the program")
    if one.name == "WORKDIR" and not text.startswith("/"):
        found.append("WORKDIR must be absolute")
    if one.name == "COPY":
        source = one.flag("from")
        if source is not None and source not in names[:-1]:
            found.append(f"copies from {source}, which is no stage before this one")
        if source is None:
            missing = [name for name in text.split()[:-1] if not (root / name).exists()]
            found += [f"{name} does not exist" for name in missing]
            if "chown" not in dict(one.flags):
                found.append("what is copied belongs to root: --chown")
    if one.name == "ENV":
        keys = re.findall(r"(?:^|\s)(\w+)=", text)
        found += [
            f"{key} looks like a secret"
            for key in keys
            if re.search("TOKEN|SECRET|PASSWORD|KEY", key)
        ]
    return found
