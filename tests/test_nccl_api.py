"""NCCL's function table: which library, which version, and what its errors become; also of the real library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from fake_nccl import build

import pycomm
from pycomm import nccl
from pycomm.extension import core

ROOT: Final = Path(__file__).resolve().parent.parent
#: A torch for CUDA brings the library and, if the toolkit's wheels are there, the headers.
REAL: Final = [p for p in nccl._wheels(["nccl/lib"], "libnccl.so.2") if Path(p).exists()]
HEADERS: Final = [
    *nccl._wheels(["nccl"], "include"),
    *(str(root / "include") for root in sorted(Path("/usr/local").glob("cuda*"), reverse=True)),
    *nccl._wheels(["cu13", "cuda_runtime"], "include"),
]

needs_library = pytest.mark.skipif(not REAL, reason="needs NVIDIA's NCCL wheel")
ALL: Final = {
    *("float8", "traffic_class", "comm_name", "policies", "shrink"),
    *("windows", "revoke", "grow"),
}


def fake(monkeypatch: pytest.MonkeyPatch, version: int) -> Any:
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(version))
    return core.NcclApi(build(), build())


# which library


def test_a_missing_library_is_named() -> None:
    with pytest.raises(pycomm.Error, match=r"does not load.*/nowhere/libnccl\.so"):
        core.NcclApi("/nowhere/libnccl.so")


def test_what_is_no_nccl_is_refused() -> None:
    library = str(core.__file__)
    with pytest.raises(pycomm.Error, match="has no function ncclGetVersion"):
        core.NcclApi(library)


def test_what_is_no_cuda_runtime_is_refused() -> None:
    with pytest.raises(pycomm.Error, match=r"has no function cuda\w+: it is no CUDA runtime"):
        core.NcclApi(build(), str(core.__file__))


def in_a_process(code: str, **env: str) -> str:
    """What a fresh process prints that has loaded no NCCL before, unlike one with torch's CUDA build."""
    name = Path(str(core.__file__)).name
    load = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_core', {str(ROOT / 'pycomm' / name)!r})\n"
        "core = importlib.util.module_from_spec(spec)\n"
        "import types, importlib\n"
        f"package = types.ModuleType('pycomm'); package.__path__ = [{str(ROOT / 'pycomm')!r}]\n"
        "sys.modules['pycomm'] = package\n"
        "spec.loader.exec_module(core)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", load + code], env={**os.environ, **env}, text=True, timeout=60,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_without_any_library_the_words_say_what_to_do() -> None:
    said = in_a_process(
        "try:\n  core.NcclApi(nccl_candidates=['/nowhere/a.so'])\nexcept RuntimeError as e:\n  print(e)\n"
    )
    assert "no NCCL library is loaded in this process, and there is none at /nowhere/a.so" in said
    assert "PYCOMM_NCCL_LIB" in said


def test_the_loaded_library_is_taken_and_two_are_refused(tmp_path: Path) -> None:
    """One copy in the process is found by itself; of two, the user has to choose."""
    one, two = tmp_path / "libnccl.so.2", tmp_path / "other" / "libnccl.so.2"
    two.parent.mkdir()
    shutil.copy(build(), one)
    shutil.copy(build(), two)
    said = in_a_process(
        f"import ctypes; ctypes.CDLL({str(one)!r})\n"
        "print(core.NcclApi(cuda=False).path)\n"
        f"ctypes.CDLL({str(two)!r})\n"
        "try:\n  core.NcclApi(cuda=False)\nexcept RuntimeError as e:\n  print(e)\n"
        f"print(core.NcclApi({str(two)!r}, cuda=False).path)\n"
    ).splitlines()
    assert said[0] == str(one)
    assert said[1].startswith("several NCCL libraries are loaded in this process: ")
    assert str(one) in said[1]
    assert str(two) in said[1]
    assert "PYCOMM_NCCL_LIB" in said[1]
    assert said[2] == str(two)


# which version


@pytest.mark.parametrize("version", [21805, 22099])
def test_too_old(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"2.{version // 100 % 100}.{version % 100}"
    with pytest.raises(pycomm.Error, match=f"is NCCL {text}, but pycomm needs 2.21.0 or later"):
        fake(monkeypatch, version)


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        (22105, ALL),
        (22403, ALL - {"float8"}),
        (22605, ALL - {"float8", "traffic_class"}),
        (22703, {"revoke", "grow"}),
        (22907, set()),
        (23201, set()),
    ],
)
def test_capabilities_follow_the_version(
    version: int, missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = fake(monkeypatch, version)
    assert api.version == version
    has = api.capabilities()
    assert set(has) == ALL
    assert {name for name, there in has.items() if not there} == missing


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        (1, pycomm.NcclError, "ncclUnhandledCudaError"),
        (2, pycomm.NcclError, "ncclSystemError"),
        (3, pycomm.NcclError, "ncclInternalError"),
        (4, pycomm.NcclError, "ncclInvalidArgument"),
        (5, pycomm.NcclError, "ncclInvalidUsage"),
        (6, pycomm.PeerDiedError, "ncclRemoteError"),
        (8, pycomm.TimeoutError, "ncclTimeout"),
        (77, pycomm.NcclError, "an unknown result"),
    ],
)
def test_every_result_is_one_error(code: int, kind: type[Exception], word: str) -> None:
    """The message has the call, the version, name and number of the result, and advice."""
    with pytest.raises(kind) as caught:
        core.NcclApi(build(), build()).check(code, "rank 3: all_reduce")
    assert str(caught.value).startswith(
        f"rank 3: all_reduce: NCCL 2.30.7 reports {word} ({code}), "
    )
    assert isinstance(caught.value, pycomm.Error)


def test_success_and_progress_are_none() -> None:
    api = core.NcclApi(build(), build())
    assert api.check(0, "x") is None
    assert api.check(7, "x") is None


def test_no_gpu_and_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    api = core.NcclApi(build(), build())
    assert api.devices() == 2
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    with pytest.raises(pycomm.Error, match="no GPU can be used: no CUDA-capable device"):
        api.devices()
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "-1")
    with pytest.raises(pycomm.Error, match=r"driver version is insufficient.*nvidia-smi"):
        api.devices()


# the real library


@needs_library
def test_real_library() -> None:
    """Version and ids of the real library need no GPU; ids differ from each other."""
    api = core.NcclApi(REAL[0], cuda=False)
    assert api.version >= 22100
    assert api.path == REAL[0]
    ids = {api.unique_id() for _ in range(3)}
    assert len(ids) == 3
    assert all(len(one) == 128 for one in ids)
    if api.version >= 23000:
        assert all(api.capabilities().values())


@needs_library
def test_real_errors_are_translated() -> None:
    """The words are the real library's own for each code."""
    api = core.NcclApi(REAL[0], cuda=False)
    for code, word in {1: "cuda", 2: "system", 3: "internal", 4: "argument", 5: "usage"}.items():
        with pytest.raises(pycomm.NcclError) as caught:
            api.check(code, "rank 0: x")
        assert word in str(caught.value).split("), ", 1)[1].lower()
    with pytest.raises(pycomm.PeerDiedError, match="ncclRemoteError"):
        api.check(6, "rank 0: x")


@needs_library
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_real_library_without_a_gpu() -> None:
    """Our configuration is taken, and what comes back says what NCCL said last."""
    with pytest.raises(pycomm.NcclError) as caught:
        core.NcclApi(REAL[0], cuda=False).try_init()
    text = str(caught.value)
    assert "ncclUnhandledCudaError (1)" in text
    assert "it said last: " in text
    assert "nvidia-smi" in text


@needs_library
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_real_cuda_runtime_without_a_gpu() -> None:
    api = nccl.load_api("", "")
    with pytest.raises(pycomm.Error, match="no GPU can be used"):
        api.devices()


@pytest.mark.skipif(
    not any(Path(h, "nccl.h").exists() for h in HEADERS)
    or not any(Path(h, "crt/host_config.h").exists() for h in HEADERS),
    reason="needs nccl.h and the headers of a CUDA toolkit",
)
def test_layout_is_that_of_the_real_header(tmp_path: Path) -> None:
    flags = [f"-I{folder}" for folder in HEADERS]
    source = ROOT / "tests/nccl_layout.cpp"
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *flags, str(source)], text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    # The check can fail: a field less, and the layout differs.
    broken = tmp_path / "csrc/nccl/nccl_types.h"
    broken.parent.mkdir(parents=True)
    text = (ROOT / "csrc/nccl/nccl_types.h").read_text()
    assert text.count("  int min_ctas = kUndefined;\n") == 1
    broken.write_text(text.replace("  int min_ctas = kUndefined;\n", ""))
    (tmp_path / "tests").mkdir()
    shutil.copy(source, tmp_path / "tests")
    again = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *flags, str(tmp_path / "tests/nccl_layout.cpp")],
        text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert again.returncode != 0
    assert "min_ctas" in again.stdout
