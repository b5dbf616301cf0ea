"""A launcher that computes each step as late as a device could: when its results are asked for."""

from __future__ import annotations

from baton.engine.execution import StepResult
from baton.engine.runner import LaunchedStep, ModelRunner
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.step_inputs import StepInputs
from baton.engine.token_choice import draws_of


class LateStep:
    """A step of which nothing is computed before :meth:`result`, whatever happens meanwhile."""

    def __init__(self, runner: ModelRunner, inputs: StepInputs, before: LateStep | None) -> None:
        self.inputs = inputs
        self.computed: LaunchedStep | None = None
        self.places: dict[Sequence, int] = {}
        self._runner = runner
        self._before = before

    def choose(self) -> None:
        self.places = draws_of(self.inputs.due).places(self.inputs.due)

    def result(self) -> StepResult:
        before, self._before = self._before, None
        chosen = None if before is None or before.computed is None else before.computed.choice
        self.computed = self._runner.start(self.inputs, chosen)
        self.computed.choose()
        return self.computed.result()


class LateLauncher:
    """``baton.engine.execution.Launcher`` over a runner on a CPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._newest: LateStep | None = None

    def launch(self, batch: ScheduledBatch) -> LateStep:
        places = self._newest.places if self._newest is not None else {}
        inputs = self._runner.prepare(batch, places)
        self._newest = LateStep(self._runner, inputs, self._newest)
        return self._newest
