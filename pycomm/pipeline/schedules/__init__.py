"""Pipeline schedules as data, without torch: who runs which stage's F, B, I or W of which microbatch, and when.

``build(name, ranks=, microbatches=)`` makes one, ``validate`` checks it, ``lower`` adds the messages, ``simulate``
plays it on a clock.
"""

from pycomm.pipeline.schedules.action import Action, Batch, Kind, Limits, Program, Schedule, Step
from pycomm.pipeline.schedules.build import NAMES, build
from pycomm.pipeline.schedules.costs import Costs
from pycomm.pipeline.schedules.draw import draw, plot
from pycomm.pipeline.schedules.lower import lower
from pycomm.pipeline.schedules.simulate import Interval, Simulation, simulate
from pycomm.pipeline.schedules.validate import validate

__all__ = [
    "NAMES",
    "Action",
    "Batch",
    "Costs",
    "Interval",
    "Kind",
    "Limits",
    "Program",
    "Schedule",
    "Simulation",
    "Step",
    "build",
    "draw",
    "lower",
    "plot",
    "simulate",
    "validate",
]
