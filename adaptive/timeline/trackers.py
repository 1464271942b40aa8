"""Sinks for experiment trackers: Weights & Biases and MLflow.

Both write the numbers of thinned.py, no more than one step a second (a tracker's server is slower
than a file), the run's settings, and each switch with its reason. A package is imported when its
sink is made.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from adaptive.timeline.records import Event, Header
from adaptive.timeline.thinned import ThinnedTimeline, settings_of

STEP = "adaptive/step"
"""The axis that W&B draws our numbers over: W&B's own step counts rows, whoever has logged them."""

SECONDS = 1.0
"""Between two steps that are written, unless `interval` says otherwise."""

SWITCHES_FILE = "cf_switches.txt"

_CHARTS = ("cf", "cf_layer", "gain", "throughput", "bytes", "time", "policy", "gradient")
_VALUE = 500
"""Characters of a setting: MLflow's stores do not all take more."""


class WandbTimeline(ThinnedTimeline):
    """A sink that logs to a run of Weights & Biases.

    run: a run that is open, and stays open; None: the one that `wandb.init` has begun, or at the
        first record one of our own, which ends with the compressor.
    interval: write every this many steps; None: every step, but no more than one a second. A step
        with another CF than the one before is always written, and so is the one before it.
    init: for `wandb.init`, if it is ours to call, such as project="..." or mode="offline".
    Rows are logged without W&B's own step, as frameworks do: log your own without `step=`, too, or
    rows may come too late for it. ImportError, naming the extra to install, without the package.
    """

    def __init__(self, run: Any = None, interval: int | None = None, **init: Any) -> None:
        super().__init__(interval, SECONDS)
        try:
            import wandb
        except ImportError as error:
            raise _missing("WandbTimeline", "wandb") from error
        self._wandb, self._init = wandb, init
        self._run, self._own = run, False
        self._settings: dict[str, Any] = {}

    def start(self, header: Header) -> None:
        self._settings = settings_of(header)

    def event(self, event: Event) -> None:
        self._opened().log({"policy/switch": _switch(event), STEP: event.step})

    def close(self) -> None:
        if self._run is None:
            return
        self._write_skipped()
        self._run.summary.update(self._final_numbers())
        if self._own:
            atexit.unregister(self.close)
            self._run.finish()
        self._run = None

    def _opened(self) -> Any:
        """The run, from the first record on, so on the writing rank only."""
        if self._settings or self._run is None:
            self._run = self._run or self._wandb.run
            if self._run is None:
                self._run, self._own = self._wandb.init(**self._init), True
                atexit.register(self.close)
            self._run.config.update({"compression": self._settings}, allow_val_change=True)
            self._settings = {}
            self._run.define_metric(STEP, hidden=True)
            for chart in _CHARTS:
                self._run.define_metric(f"{chart}/*", step_metric=STEP)
        return self._run

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._opened().log({**values, STEP: step})


class MLflowTimeline(ThinnedTimeline):
    """A sink that logs to a run of MLflow.

    run_id: of a run, which stays open; None: the active one, or at the first record one of our own,
        which ends with the compressor.
    interval: see `WandbTimeline`.
    experiment: name of the experiment that a run of our own belongs to; None: the active one.
    Switches go into an artifact, cf_switches.txt. ImportError, naming the extra to install, without
    the package.
    """

    def __init__(
        self, run_id: str | None = None, interval: int | None = None, experiment: str | None = None
    ) -> None:
        super().__init__(interval, SECONDS)
        try:
            import mlflow
        except ImportError as error:
            raise _missing("MLflowTimeline", "mlflow") from error
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id, self._experiment = run_id, experiment
        self._own = self._opened = False
        self._settings: dict[str, Any] = {}
        self._switches: list[str] = []

    def start(self, header: Header) -> None:
        self._settings = settings_of(header)

    def event(self, event: Event) -> None:
        self._switches.append(f"step {event.step}: {_switch(event)}\n")

    def flush(self) -> None:
        if self._switches:
            run_id = self._open()
            self._client.log_text(run_id, "".join(self._switches), SWITCHES_FILE)

    def close(self) -> None:
        if self._last is None and not self._switches:
            return
        self._write_skipped()
        step = self._last.report.step if self._last is not None else 0
        self._log(self._final_numbers(), step)
        self.flush()
        if self._own:
            atexit.unregister(self.close)
            self._client.set_terminated(self._run_id)
        self._last, self._opened, self._switches = None, False, []

    def _open(self) -> str:
        """The id of the run, from the first record on, so on the writing rank only."""
        mlflow = self._mlflow
        if not self._opened:
            self._opened, self._client = True, mlflow.MlflowClient()
            active = mlflow.active_run()
            if self._run_id is None and active is not None:
                self._run_id = active.info.run_id
            if self._run_id is None:
                if self._experiment is not None:
                    mlflow.set_experiment(self._experiment)
                with mlflow.start_run() as run:  # ends, and is opened again
                    self._run_id, self._own = run.info.run_id, True
                self._client.update_run(self._run_id, status="RUNNING")
                atexit.register(self.close)
            params = {f"compression.{name}": value for name, value in self._settings.items()}
            texts = [
                mlflow.entities.Param(name, str(value)[:_VALUE]) for name, value in params.items()
            ]
            self._client.log_batch(self._run_id, params=texts)
        assert self._run_id is not None
        return self._run_id

    def _write_numbers(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._log(values, step, at)

    def _log(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        when = self._last_time = self._last_time if at is None else int(1000 * at)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, when, step) for name, value in values.items()]
        if metrics:
            run_id = self._open()
            self._client.log_batch(run_id, metrics=metrics)

    _last_time = 0  # in ms since the epoch


def _switch(event: Event) -> str:
    return f"CF {event.cf_before:g} -> {event.cf:g}: {event.reason}"


def _missing(what: str, package: str) -> ImportError:
    return ImportError(
        f"{what} needs the {package} package: pip install 'adaptive-compression[{package}]'"
    )
