"""The container's recipe keeps the rules that hadolint has; compose and the devcontainer name what the recipe makes.

That the recipe's instructions can be carried out, and that training works within the limits, is `make container`.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import recipe as recipes

ROOT: Final = Path(__file__).parents[1]
TEXT: Final = (ROOT / "docker/Dockerfile").read_text()


def faults_of(text: str) -> list[str]:
    return recipes.faults(recipes.parse(text), ROOT)


def test_the_recipe_keeps_the_rules() -> None:
    assert faults_of(TEXT) == []


#: What is replaced in the recipe, by what, and what is said then.
PLANTED: Final = [
    ("13.0.1-devel-ubuntu24.04", "latest", "not pinned"),
    ("13.0.1-base-ubuntu24.04", "13", "not pinned"),
    ("USER pycomm\nCMD", "USER root\nCMD", "ends as root"),
    ("apt-get update", "true", "into one RUN"),
    ("--yes", "--assume-so", "asks: --yes"),
    (" --no-install-recommends", "", "nobody named"),
    ("--mount=type=cache,target=/var/lib/apt/lists,sharing=locked", "--mount=type=tmpfs,target=/x", "lists stay"),
    ("--mount=type=cache,target=/home/pycomm/.cache/pip,", "--mount=type=tmpfs,target=/x,", "pip's cache"),
    ("RUN make build", "RUN cd /opt/pycomm && make build", "cd has no place"),
    ("RUN make build", "RUN sudo make build", "sudo has no place"),
    ('CMD ["bash"]', "CMD bash", "must be a JSON list"),
    ("WORKDIR /opt/pycomm", "WORKDIR pycomm", "must be absolute"),
    ("--from=tested", "--from=later", "no stage before"),
    ("FROM build AS dev", "FROM build AS build", "two of this name"),
    ("COPY --chown=pycomm:pycomm . .", "COPY . .", "belongs to root"),
    ("tools/requirements.py tools", "tools/gone.py tools", "tools/gone.py does not exist"),
    ('SHELL ["/bin/bash", "-o", "pipefail", "-c"]', "ARG NOTHING", "a pipe without"),
    ("PYTHONDONTWRITEBYTECODE=1", "NPM_TOKEN=1", "looks like a secret"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), PLANTED, ids=[said for *_, said in PLANTED])
def test_a_broken_rule_is_told(old: str, new: str, said: str) -> None:
    text = (
        TEXT.replace("RUN make build", "RUN echo 1 | cat && make build") if "pipe" in said else TEXT
    )
    assert old in text
    assert [fault for fault in faults_of(text.replace(old, new)) if said in fault] != []


def test_what_the_parser_does_not_know_is_refused() -> None:
    for text in ("ADD a b", "FROM a:1.2.3", "RUN true"):
        with pytest.raises(ValueError, match="line 1"):
            recipes.parse(text)


def test_commands_are_shell() -> None:
    for stage in recipes.parse(TEXT).stages:
        for one in stage.all("RUN"):
            done = subprocess.run(["bash", "-n", "-c", one.rest], capture_output=True, text=True)
            assert done.returncode == 0, (one.line, done.stderr)


def test_nothing_is_untested() -> None:
    """Both images stand on the stage in which the tests pass, and the GPU's has the compiler."""
    recipe = recipes.parse(TEXT)
    assert recipe.needed_for("runtime") == ["tools", "build", "tested", "runtime"]
    assert recipe.needed_for("dev") == ["tools", "build", "tested", "dev"]
    assert recipe.stages[-1].name == "dev"
    assert "make test " in recipe.stage("tested").all("RUN")[0].rest
    assert "devel" in recipe.line_of("dev")[0].base
    assert re.search(r"^test-gpu:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    return found


def test_compose_has_two_ranks_of_each_profile_within_limits() -> None:
    whole = compose()
    services = whole["services"]
    stages = [stage.name for stage in recipes.parse(TEXT).stages]
    for profile in ("one-host", "two-host"):
        ranks = [s for s in services.values() if s["profiles"] == [profile]]
        assert sorted(s["environment"]["RANK"] for s in ranks) == ["0", "1"]
        for service in ranks:
            assert service["environment"]["WORLD_SIZE"] == "2"
            assert service["build"]["target"] in stages
            folder = ROOT / "docker" / service["build"]["context"]
            assert (folder / service["build"]["dockerfile"]).exists()
            assert (folder / service["command"][1]).exists()
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["user"].startswith("10001")
            for loosens in ("privileged", "cap_add", "shm_size", "ipc", "pid", "ports"):
                assert loosens not in service
    assert {s["profiles"][0] for s in services.values()} == {"one-host", "two-host"}
    assert whole["networks"]["between"]["internal"] is True
    assert services["one-host-0"]["network_mode"] == "none"


def test_the_devcontainer_is_a_stage_of_the_recipe() -> None:
    file = ROOT / ".devcontainer/devcontainer.json"
    described = json.loads(file.read_text())
    build = described["build"]
    assert (file.parent / build["dockerfile"]).resolve() == ROOT / "docker/Dockerfile"
    assert (file.parent / build["context"]).resolve() == ROOT
    stage = recipes.parse(TEXT).stage(build["target"])
    assert stage.all("USER")[-1].rest == described["remoteUser"]


def test_the_context_has_nothing_that_is_built_here() -> None:
    """A module of this machine, or its environment, in the image would be taken for the image's own."""
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    kept_out = {line.strip("/").removeprefix("**/") for line in ignored if line and line[0] != "#"}
    for built in (
        ".venv*",
        "build",
        "dist",
        "runs",
        "*.so",
        "*.egg-info",
        "__pycache__",
        "pycomm/_build_info.py",
    ):
        assert built in kept_out
    for needed in (
        "csrc",
        "pycomm",
        "tests",
        "tools",
        "examples",
        "Makefile",
        "pyproject.toml",
        "setup.py",
    ):
        assert needed not in kept_out
