"""Carries out docker/Dockerfile where there is no container engine, and trains within an engine's limits.

    debootstrap --variant=minbase --include=ca-certificates bookworm /tmp/debian     # once, as root
    python docker/prove.py --root /tmp/debian --arg TESTS=tests/test_collectives.py

The recipe's own instructions run, each stage in an overlay over the ones below it, in a chroot with namespaces of its
own; the Debian root stands in for the base images, so that without nvcc the modules have no CUDA kernels. Needs root
and overlayfs. Then ranks train:

    one container       2 ranks in it
    two containers      a rank in each, in one network namespace: pids, mounts, IPC and host name of their own

each with a root that is read only, 64 MB of /dev/shm, /tmp in memory, user 10001 without capabilities, no new
privileges, no network but the loopback, and a seccomp filter that refuses process_vm_readv, process_vm_writev,
pidfd_getfd, ptrace and kcmp. That each of these limits holds is checked from within before the training.
Exit status: 0 all well, 1 a step or a limit failed, 2 this machine lacks something.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import limits
import recipe as recipes
from limits import REFUSED, refuse_calls

ROOT: Final = Path(__file__).resolve().parents[1]
USER: Final = 10001
_FLAGS: Final = {
    "mount": 0x20000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_MS: Final = {"rdonly": 1, "remount": 32, "bind": 4096, "rec": 16384, "private": 1 << 18}
ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

_libc = ctypes.CDLL(None, use_errno=True)


def system(name: str, *args: Any) -> None:
    """A call of libc; OSError if it fails."""
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """As mount(2)."""
    system("mount", source.encode(), str(target).encode(), kind.encode(), flags, data.encode())


def in_child(work: Callable[[], int]) -> int:
    """The exit status of work in a process of its own, 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def furnish(root: Path, shm: str) -> None:
    """What an engine puts into a container: /proc, a small /dev, /dev/shm."""
    mount("proc", root / "proc", "proc")
    dev = root / "dev"
    mount("tmpfs", dev, "tmpfs", 0, "mode=755,size=1m")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        (dev / name).touch()
        mount(f"/dev/{name}", dev / name, "", _MS["bind"])
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        (dev / name).symlink_to(target)
    hosts = dev / "hosts"  # an engine writes it, too
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    (root / "etc/hosts").touch()
    mount(str(hosts), root / "etc/hosts", "", _MS["bind"])
    (dev / "shm").mkdir()
    mount("tmpfs", dev / "shm", "tmpfs", 0, f"mode=1777,size={shm}")


@dataclass(frozen=True)
class Place:
    """A container: its root, and what a command in it may do."""

    root: Path
    folder: str
    user: int
    limited: bool = False
    own_network: bool = False
    binds: list[tuple[Path, str]] = field(default_factory=list)

    def enter(self) -> None:
        """Furnish the root and make it this process's, in namespaces that are this process's already."""
        mount("none", Path("/"), "", _MS["rec"] | _MS["private"])
        mount(str(self.root), self.root, "", _MS["bind"] | _MS["rec"])
        furnish(self.root, "64m")
        for source, target in self.binds:
            place = self.root / target.lstrip("/")
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.touch()
            mount(str(source), place, "", _MS["bind"])
        if self.own_network:
            bring_loopback_up()
        if self.limited:
            mount("tmpfs", self.root / "tmp", "tmpfs", 0, "mode=1777,size=512m")
            mount("none", self.root, "", _MS["bind"] | _MS["remount"] | _MS["rdonly"])
        os.chroot(self.root)
        os.chdir(self.folder)


def contained(place: Place, command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command in a new container; its exit status."""
    kinds = ["mount", "uts", "ipc", "pid", *(["net"] if place.own_network else [])]
    privileges = ["setpriv", f"--reuid={place.user}", f"--regid={place.user}", "--clear-groups"]
    if place.limited:
        privileges += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    def outer() -> int:
        system("unshare", sum(_FLAGS[kind] for kind in kinds))
        return in_child(inner)

    def inner() -> int:
        place.enter()
        if place.limited:
            refuse_calls(REFUSED)
        return subprocess.run([*privileges, *command], env=environment).returncode

    return in_child(outer)


def bring_loopback_up() -> None:
    """Of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(
            one, 0x8914, struct.pack("16sH22x", b"lo", 0x1 | 0x40)
        )  # SIOCSIFFLAGS: up, running


@dataclass
class State:
    """What instructions leave for those after them."""

    user: int = 0
    folder: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    values: dict[str, str] = field(default_factory=dict)  # of ARG


@dataclass
class Builder:
    """Makes the stages of a recipe, each an overlay over those below it."""

    recipe: recipes.Recipe
    base: Path
    work: Path
    given: dict[str, str]
    shares: list[Path]
    states: dict[str, State] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def root(self, name: str) -> Path:
        """Where a stage's files are."""
        return self.work / name / "root"

    def make(self, name: str) -> None:
        """Carry out a stage's instructions."""
        below = [stage.name for stage in self.recipe.line_of(name)][:-1]
        upper, overlay, root = (self.work / name / part for part in ("upper", "overlay", "root"))
        for place in (upper, overlay, root):
            place.mkdir(parents=True, exist_ok=True)
        done = self.work / name / "done"
        lower = [*(str(self.work / one / "upper") for one in reversed(below)), str(self.base)]
        data = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={overlay}"
        mount("overlay", root, "overlay", 0, data)
        state = deepcopy(self.states[below[-1]]) if below else State()
        state.values = {}
        self.states[name] = state
        for one in self.recipe.stage(name).instructions:
            began = time.monotonic()
            print(f"--- {name}, line {one.line}: {one.name} {one.rest[:100]}", flush=True)
            if one.name in ("COPY", "RUN") and done.exists():
                print("    was carried out before")
            elif one.name == "COPY":
                self.copy(name, one, state.folder)
            elif one.name == "RUN":
                self.run(name, one, state)
            else:
                self.note(one, state)
            self.seconds[f"{name}, line {one.line}: {one.name}"] = time.monotonic() - began
        (root / state.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        done.touch()

    def note(self, one: recipes.Instruction, state: State) -> None:
        """An instruction that only says how the next ones are carried out."""
        key, _, value = one.rest.partition("=")
        if one.name == "ARG":
            state.values[key] = self.given.get(key, value.strip('"'))
        elif one.name == "ENV":
            for pair in one.rest.split():
                key, _, value = pair.partition("=")
                state.environment[key] = recipes.substitute(value, state.environment)
        elif one.name == "USER":
            state.user = 0 if one.rest == "root" else USER
            state.environment["HOME"] = "/home/pycomm" if state.user else "/root"
        elif one.name == "WORKDIR":
            state.folder = one.rest
        elif one.name == "SHELL":
            state.shell = json.loads(one.rest)

    def run(self, name: str, one: recipes.Instruction, state: State) -> None:
        """A RUN; its cache mounts are folders that live on from stage to stage."""
        binds = [(share, str(share)) for share in [Path("/etc/resolv.conf"), *self.shares]]
        for cache in one.mounts:
            place = self.work / "caches" / cache["target"].strip("/").replace("/", "-")
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, int(cache.get("uid", "0")), int(cache.get("gid", "0")))
            binds.append((place, cache["target"]))
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        where = Place(self.root(name), state.folder, state.user, binds=binds)
        command = [*state.shell, recipes.substitute(one.rest, state.values)]
        status = contained(where, command, {**state.environment, **state.values, **pip})
        if status != 0:
            raise SystemExit(f"line {one.line} of the recipe failed with status {status}")

    def copy(self, name: str, one: recipes.Instruction, folder: str) -> None:
        """A COPY: of the context as .dockerignore leaves it, or of another stage."""
        *sources, target = one.rest.split()
        source_stage = one.flag("from")
        number = USER if one.flag("chown") else 0
        place = self.root(name) / folder.lstrip("/") / target
        for source in sources:
            if source_stage:
                found = self.root(source_stage) / source.lstrip("/")
                exclude: list[str] = []
            else:
                found = ROOT / source
                rules = (ROOT / ".dockerignore").read_text().splitlines()
                exclude = [
                    f"--no-anchored --exclude={rule[3:]}"
                    if rule[:3] == "**/"
                    else f"--anchored --exclude=./{rule}"
                    for rule in rules
                    if rule and rule[0] != "#"
                ]
                exclude = " ".join(exclude).split()
            is_folder = found.is_dir()
            into = place if is_folder or not target.endswith("/") else place / found.name
            (into if is_folder else into.parent).mkdir(parents=True, exist_ok=True)
            if is_folder:
                pack = ["tar", "-C", str(found), *exclude, "-cf", "-", "."]
                owner = [f"--owner={number}", f"--group={number}"]
                with subprocess.Popen(
                    [*pack[:1], *owner, *pack[1:]], stdout=subprocess.PIPE
                ) as packed:
                    subprocess.run(
                        ["tar", "-C", str(into), "-xpf", "-", "--numeric-owner"],
                        stdin=packed.stdout,
                        check=True,
                    )
                if packed.returncode != 0:
                    raise SystemExit(f"line {one.line} of the recipe: tar failed")
            else:
                shutil.copy2(found, into)
                os.chown(into, number, number)
                os.chown(into.parent, number, number)

    def close(self) -> None:
        """Unmount what was mounted, last first."""
        for name in reversed(list(self.states)):
            subprocess.run(["umount", "--lazy", str(self.root(name))])


#: What must fail, and what must hold, within the limits.
LIMITS: Final = f"""{Path(limits.__file__).read_text()}
import os, pathlib, socket
assert all(map(is_refused, {REFUSED!r}))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, status["CapEff"]
assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2"
assert os.getuid() == {USER} and os.getpid() < 100
for folder in ("/", "/opt/pycomm", "/home/pycomm"):
    try:
        pathlib.Path(folder, "new").touch()
    except OSError as error:
        assert error.errno in (13, 30), error
    else:
        raise AssertionError(folder + " can be written")
assert pathlib.Path("/opt/pycomm/runs/tested").exists()
try:
    pathlib.Path("/opt/pycomm/pycomm/__init__.py").open("a")
except OSError as error:
    assert error.errno in (13, 30), error
else:
    raise AssertionError("the root can be written")
shm = os.statvfs("/dev/shm")
assert shm.f_blocks * shm.f_frsize == 64 << 20
assert [name for _, name in socket.if_nameindex()] == ["lo"]
print("limits hold: uid", os.getuid(), "pid", os.getpid(), "/dev/shm of 64 MB, root read only, no capability,")
print("refused: {", ".join(REFUSED)}", flush=True)
"""


def train(builder: Builder, name: str) -> int:
    """Within the limits: 2 ranks in a container, then each in its own. The number of failures."""
    state = builder.states[name]
    root, environment = builder.root(name), state.environment
    listed = json.loads(builder.recipe.stage(name).all("CMD")[-1].rest)
    command = [*listed, "--epochs", "3", "--min-accuracy", "0.85"]
    print("--- one container", flush=True)
    alone = Place(root, state.folder, state.user, limited=True, own_network=True)
    failed = sum(
        contained(alone, what, environment) != 0 for what in (["python", "-c", LIMITS], command)
    )

    def together() -> int:
        system("unshare", _FLAGS["net"])
        bring_loopback_up()
        place = Place(root, state.folder, state.user, limited=True)
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        job["MASTER_PORT"] = "29500"
        ranks = []
        for rank in ("0", "1"):
            own = {**environment, **job, "RANK": rank, "LOCAL_RANK": rank}
            if (pid := os.fork()) == 0:
                os._exit(abs(contained(place, command, own)))
            ranks.append(pid)
        return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in ranks)

    print("--- two containers, a rank in each", flush=True)
    return failed + in_child(together)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    add = parser.add_argument
    add(
        "--root",
        type=Path,
        required=True,
        help="a Debian root of debootstrap, in place of the base images; not changed",
    )
    add(
        "--work",
        type=Path,
        default=ROOT / "build/container",
        help="folder for stages and caches (build/container)",
    )
    add("--target", default="runtime", help="the stage to make and train in (runtime)")
    add(
        "--arg",
        action="append",
        default=[],
        help="NAME=VALUE of an ARG, as TESTS=... or TORCH=torch==2.14.1",
    )
    add(
        "--share",
        type=Path,
        action="append",
        default=[],
        help="a file or folder of this machine that RUN sees, as certificates",
    )
    add("--reuse", action="store_true", help="do not make stages again that --keep left")
    add("--keep", action="store_true", help="leave the stages' files (some GB)")
    return parser.parse_args()


def lack(what: str) -> NoReturn:
    """End, with what this machine lacks."""
    print(f"prove.py: {what}", file=sys.stderr)
    raise SystemExit(2)


def main() -> int:
    """Make the stages, train, say what took how long."""
    args = parse_arguments()
    if os.geteuid() != 0:
        lack("needs root, for chroot and mounts")
    if not (args.root / "usr/bin/setpriv").exists():
        lack(f"{args.root} is no Debian root: debootstrap --variant=minbase bookworm {args.root}")
    recipe = recipes.parse((ROOT / "docker/Dockerfile").read_text())
    system("unshare", _FLAGS["mount"])  # what is mounted here goes with this process
    mount("none", Path("/"), "", _MS["rec"] | _MS["private"])
    for folder in args.work.glob("*"):
        if folder.name != "caches" and not args.reuse:
            shutil.rmtree(folder)
    builder = Builder(
        recipe,
        args.root.resolve(),
        args.work.resolve(),
        dict(one.split("=", 1) for one in args.arg),
        args.share,
    )
    for name in recipe.needed_for(args.target):
        builder.make(name)
    failed = train(builder, args.target)
    for step, seconds in builder.seconds.items():
        if seconds >= 1:
            print(f"{step}: {seconds:.1f} s")
    well = f"the recipe was carried out to stage {args.target}, and ranks trained within the limits"
    print("FAILED" if failed else well)
    builder.close()
    if not args.keep:
        for name in recipe.needed_for(args.target):
            shutil.rmtree(args.work / name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
