"""What the fork server imports once, so that a rank is a fork and not a fresh interpreter.

Nothing here may start a thread: a fork keeps only the thread that called it.
"""

import contextlib
import gc
import importlib
import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

for _name in (
    "cloudpickle",
    "pytest",
    "_pytest.assertion.rewrite",  # the assertions of workers are rewritten ones
    "torch",
    "torch.distributed",
    "torch._dynamo.utils",  # torch's DDP imports it on first use: a second of work
    "torch.nn.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
):
    importlib.import_module(_name)

with contextlib.suppress(ImportError):  # a rank that needs pycomm reports why that fails
    importlib.import_module("pycomm")

gc.freeze()  # a collection in a rank need not visit, and so copy, what it shares with the server
