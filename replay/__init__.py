"""Reads traces of PyTorch trainings, without torch.

import replay

trace = replay.open("runs/a")
trace.tensor(step=120, layer="layer1.0.conv1", kind="grad_output")
"""

from replay.check import Finding as Finding
from replay.check import check as check
from replay.diff import Diff as Diff
from replay.diff import diff as diff
from replay.divergence import Divergence as Divergence
from replay.errors import BadQuery as BadQuery
from replay.errors import MissingPackage as MissingPackage
from replay.errors import NotRecorded as NotRecorded
from replay.errors import ReplayError as ReplayError
from replay.errors import StepNotCommitted as StepNotCommitted
from replay.errors import TraceDamaged as TraceDamaged
from replay.errors import TraceNotFound as TraceNotFound
from replay.errors import TraceTooNew as TraceTooNew
from replay.following import follow as follow
from replay.following import follow_all as follow_all
from replay.grid import NotApplicable as NotApplicable
from replay.grid import Records as Records
from replay.grid import Seen as Seen
from replay.rulebook import Rule as Rule
from replay.rulebook import rule as rule
from replay.selection import Selection as Selection
from replay.trace import Trace as Trace
from replay.trace import open as open
