"""The metrics of all locks of the process for OpenTelemetry.

See https://redislock-fast.github.io/redislock_fast/reference/metrics.html

Nothing needs to be called: the first lock that is made after the program has set a meter provider installs them.
`install` sets another provider or other names, `uninstall` switches them off.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from redislock_fast._lease import metrics
from redislock_fast._observe.libraries import call_library
from redislock_fast._observe.recorder import BOUNDS_S, METRICS, Count, Metric, Recorder, prefix_of
from redislock_fast._version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

__all__ = ["install", "uninstall"]

logger = logging.getLogger(__name__)

_STAND_IN = "_ProxyMeterProvider"
"""The class of what the program's provider takes over, with its instruments, as soon as the program has set it."""

_UNSET = (_STAND_IN, "NoOpMeterProvider")
"""The classes of what `get_meter_provider` returns where the program has set none."""

_outputs: WeakKeyDictionary[Any, _Output] = WeakKeyDictionary()
"""By provider. Its meter makes each instrument once, and later ones of the same name keep the callback of the first."""

_installed: list[Recorder] = []
_undecided = [True]  # empty once `install` or `uninstall` was called, or a thread has found a provider


class _Output:
    """The instruments of a meter. Counters and gauges are read by callbacks.

    Attributes:
        recorders: have the gauges' values: those of locks from before another one was installed, too.
    """

    sets_gauges = False

    def __init__(self, meter: Any) -> None:
        self.recorders: list[Recorder] = []
        self._histograms: dict[Metric, Any] = {}
        self._counts: dict[Metric, dict[tuple[str, ...], Count]] = {}
        for metric in METRICS:
            of_metric = {"unit": metric.unit, "description": metric.text}
            if metric.kind == "histogram":
                self._histograms[metric] = meter.create_histogram(
                    metric.name, **of_metric, explicit_bucket_boundaries_advisory=BOUNDS_S
                )
            elif metric.kind == "counter":
                self._counts[metric] = {}
                meter.create_observable_counter(metric.name, [partial(self._values, metric)], **of_metric)
            else:
                meter.create_observable_up_down_counter(metric.name, [partial(self._values, metric)], **of_metric)

    def _values(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation  # noqa: PLC0415  # of a package that may be missing

        values: Counter[tuple[str, ...]] = Counter()
        if metric.kind == "gauge":
            for recorder in self.recorders:
                for labels, value in recorder.values(metric):
                    values[labels] += value
        else:
            metrics.report_waiting()
            values.update({labels: count.value for labels, count in list(self._counts[metric].items())})
        return [Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in values.items()]

    def observer(self, metric: Metric, labels: tuple[str, ...]) -> Callable[[float], object]:
        attributes = dict(zip(metric.labels, labels, strict=True))
        return partial(call_library, partial(self._histograms[metric].record, attributes=attributes))

    def count(self, metric: Metric, labels: tuple[str, ...], number: int = 1) -> None:
        self._counts[metric].setdefault(labels, Count()).add(number)

    def set(self, metric: Metric, labels: tuple[str, ...], value: int) -> None:
        """Leave it to `_values`."""


def install(meter_provider: MeterProvider | None = None, name_template: Callable[[str], str] = prefix_of) -> None:
    """Have all locks that are made from now on recorded by a meter. Called again, it replaces what it installed.

    Sends nothing, and starts no thread.

    Args:
        meter_provider: of the meter; None: the program's.
        name_template: maps the name of a lock to the attribute `name`. By default, it is the part before the first `:`
            or `{`. A name for each lock would never end: after 100 values, the attribute is "other".

    Raises:
        ImportError: `opentelemetry-api` is not installed, and no provider was given.
    """
    if meter_provider is None:
        from opentelemetry.metrics import get_meter_provider  # noqa: PLC0415  # of a package that may be missing

        meter_provider = get_meter_provider()
    uninstall()
    output = _outputs.get(meter_provider) or _taken_over_by(meter_provider)
    if output is None:
        output = _Output(meter_provider.get_meter("redislock_fast", __version__))
    _outputs[meter_provider] = output
    recorder = Recorder(output, name_template)
    output.recorders.append(recorder)
    _installed.append(recorder)
    metrics.install(recorder)


def _taken_over_by(provider: Any) -> _Output | None:
    """The output whose instruments this provider has taken over; None where there is none."""
    for known, output in list(_outputs.items()):
        if type(known).__name__ == _STAND_IN and sys.modules["opentelemetry.metrics"].get_meter_provider() is provider:
            return output
    return None


def uninstall() -> None:
    """Record no locks that are made from now on, whatever provider the program sets."""
    _undecided.clear()
    while _installed:
        metrics.uninstall(_installed.pop())


def _claimed() -> bool:
    """Whether the caller is the one that decides: another thread may have been faster."""
    with contextlib.suppress(IndexError):
        return _undecided.pop()
    return False


def install_if_set() -> bool:
    """Install the metrics if the program has set a meter provider. Returns whether that is decided forever."""
    if not _undecided:
        return True
    try:
        provider = sys.modules["opentelemetry.metrics"].get_meter_provider()
        if type(provider).__name__ in _UNSET:
            return False
        if _claimed():
            install(provider)
    except Exception:
        logger.exception("The metrics of locks could not be given to OpenTelemetry.")
        _undecided.clear()
    return True
