"""Two interpreters as users start them, of which the second one ends in some way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPT: Final = """
import os, signal, sys, time, torch, torch.distributed as dist, pycomm
dist.init_process_group("pycomm")
dist.barrier()
if dist.get_rank() == 1:
    {}
try:
    dist.all_reduce(torch.ones(3))
except pycomm.Error as error:
    print(type(error).__name__, error, flush=True)
"""
#: What rank 1 does; the error of rank 0, and words in it.
ENDS: Final = [
    ("raise ValueError('boom')", "PeerDiedError", "because of ValueError: boom"),
    ("sys.exit(0)", "PeerDiedError", "ended without destroying its process group"),
    ("dist.destroy_process_group(); sys.exit(0)", "MismatchError", "has destroyed the group"),
    ("os._exit(0)", "PeerDiedError", "which died"),
]


def check_last_words(
    ending: tuple[str, str, str], folder: Path, launcher: Sequence[str] = ()
) -> str:
    """What rank 0 printed, when rank 1 ended so; each is started by the launcher, such as unshare."""
    act, error, words = ending
    script = folder / "script.py"
    script.write_text(SCRIPT.format(act))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen(
            [*launcher, sys.executable, str(script)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    text, problems = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert text.startswith(error), (text, problems)
    assert words in text
    return text
