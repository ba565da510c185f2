"""Traces of OpenTelemetry, from the request that submits a job to its first step: one trace a job.

    POST /v1/jobs              the request, below the span that the client names in `traceparent`, if it does
    |- queued                  from the acceptance to the launcher
    |- launcher submit
    |- driver up               of each attempt: from the start of its process until it has its cluster
    |- workers joined          on rank 0: from the start of its process until it has its place among the others
    |- first step              from there on
    '- attempt                 from the driver's begin to its end

Which trace a job belongs to stands in its job.json, `traceparent` (W3C Trace Context), and where spans go,
`otlp_endpoint`. Tokens for that place are in the environment of each process, OTEL_EXPORTER_OTLP_HEADERS.

Spans wait in a queue of bounded length for a thread of their own. Who makes one never waits: what does not fit, or what
the collector does not take, is dropped and counted. Nothing of OpenTelemetry is imported where no endpoint is set.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from thinwire.contract import logs
from thinwire.contract.redaction import redacted

logger = logging.getLogger(__name__)

MOST_WAITING, AT_ONCE = 2048, 512
EVERY_S, TIMEOUT_S, END_S = 1.0, 5.0, 3.0
"""Between two posts; for one of them; for the rest, when a process ends."""
TRACEPARENT: Final = "traceparent"
ENDPOINT: Final = "otlp_endpoint"
"""In job.json."""

Attributes = Mapping[str, str | int | float | bool]
Count = Callable[[str, int], None]
"""Of spans: `exported` or `dropped`, and how many."""


class TracesMissing(Exception):
    """OpenTelemetry is not installed here; the message says what to install."""


class Traces:
    """Of one process. Its methods wait for nobody, but `close`."""

    def __init__(self, endpoint: str, service: str, count: Count = lambda outcome, number: None) -> None:
        """endpoint: an OTLP collector over HTTP, such as http://127.0.0.1:4318. service: what this process is called.

        Raises: TracesMissing.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracesMissing(f"traces need OpenTelemetry ({error}): pip install 'thinwire[otel]'") from error
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        # One line of ours says that nobody takes spans; theirs come with each batch.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._queue = _Queue(exporter, count)
        provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        provider.add_span_processor(self._queue)  # type: ignore[arg-type]
        self._tracer = provider.get_tracer("thinwire")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str | None = None, *, server: bool = False) -> Span:
        """A span that begins now. parent: a traceparent; one that is none is passed over, and a trace begins."""
        return self._span(name, parent, None, server=server)

    def past(
        self,
        name: str,
        parent: str | None,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> None:
        """A span of what is over. start, end: unix seconds. error: in words, where it failed."""
        span = self._span(name, parent, start, server=False)
        span.set(attributes or {})
        span.end(error, max(start, end))

    def _span(self, name: str, parent: str | None, start: float | None, *, server: bool) -> Span:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({TRACEPARENT: parent} if parent else {})
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        at = None if start is None else round(start * 1e9)
        return Span(self._tracer.start_span(name, context, kind, start_time=at))

    def close(self, timeout_s: float = END_S) -> None:
        """Send the rest, for so long at most."""
        self._queue.close(timeout_s)


class Span:
    """Something that goes on."""

    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """What spans below it name."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def rename(self, name: str) -> None:
        """It is called so."""
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Say more of it. Secrets are hidden."""
        for name, value in attributes.items():
            self._span.set_attribute(name, redacted(value, name) if isinstance(value, str) else value)

    def end(self, error: str | None = None, at: float | None = None) -> None:
        """It is over, now or at that time. error: in words, where it failed."""
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, redacted(error)[:2000]))
        self._span.end(None if at is None else round(at * 1e9))


class _Queue:
    """A SpanProcessor of OpenTelemetry: hands spans to the exporter from a thread."""

    def __init__(self, exporter: Any, count: Count) -> None:
        self._exporter, self._count = exporter, count
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closing, self._silent = False, False
        self._thread: threading.Thread | None = None

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Nothing."""

    def on_end(self, span: Any) -> None:
        """Take it, if there is room."""
        if not span.context.trace_flags.sampled:
            return
        with self._changed:
            full = self._closing or len(self._waiting) >= MOST_WAITING
            if not full:
                self._waiting.append(span)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="thinwire-traces", daemon=True)
                    self._thread.start()
        if full:
            self._count("dropped", 1)

    _on_ending = on_start

    def shutdown(self) -> None:
        """As `close`."""
        self.close(END_S)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing: the thread sends soon."""
        return True

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                with self._changed:
                    left, self._waiting = len(self._waiting), deque()
                logger.warning("traces_undelivered spans=%d", left)
                self._count("dropped", left)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(EVERY_S)
                is_last = self._closing
                batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            if batch:
                self._export(batch)
            elif is_last:
                return

    def _export(self, batch: list[Any]) -> None:
        try:
            taken = self._exporter.export(batch).value == 0
        except Exception:  # noqa: BLE001 - whatever the exporter raises: it is as if nobody had answered
            taken = False
        self._count("exported" if taken else "dropped", len(batch))
        if taken is self._silent:
            self._silent = not taken
            words = "traces_taken_again" if taken else "traces_not_taken"
            logger.warning("%s: spans that the collector does not take are dropped, and counted", words)


class OfJob:
    """The trace of a job, in one of its processes; with nothing in job.json that asks for one it does nothing."""

    def __init__(self, job: Mapping[str, Any], attempt: int, process: str) -> None:
        """job: job.json. process: what this one is called."""
        self._parent = job.get(TRACEPARENT)
        self._of_all: dict[str, str | int] = {
            "thinwire.job_id": str(job.get("job_id", "")),
            "thinwire.attempt": attempt,
        }
        self._traces: Traces | None = None
        if endpoint := job.get(ENDPOINT):
            try:
                self._traces = Traces(str(endpoint), f"thinwire-{process}")
            except TracesMissing as error:
                logger.warning("traces_left_out reason=%s", error)

    @property
    def is_on(self) -> bool:
        """Does anything come of it?"""
        return self._traces is not None

    def past(
        self, name: str, start: float, end: float | None = None, error: str | None = None, **attributes: str | int
    ) -> None:
        """Of what is over; default: just now."""
        if self._traces is not None:
            named = {f"thinwire.{key}": value for key, value in attributes.items()}
            self._traces.past(name, self._parent, start, end or time.time(), {**self._of_all, **named}, error)

    def close(self, timeout_s: float = END_S) -> None:
        """Send the rest, for so long at most."""
        if self._traces is not None:
            self._traces.close(timeout_s)


@contextmanager
def submitted(
    traces: Traces | None, parent: str | None, accepted_at: float, attempt: int, job_id: str
) -> Iterator[None]:
    """A launcher is handed a job, which has waited since then. An error is noted, and raised."""
    began, error = time.time(), None
    try:
        yield
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        if traces is not None:
            of_job: Attributes = {"thinwire.job_id": job_id, "thinwire.attempt": attempt}
            if attempt == 1 and error is None:
                traces.past("queued", parent, min(accepted_at, began), began, of_job)
            traces.past("launcher submit", parent, began, time.time(), of_job, error)


_current: ContextVar[str | None] = ContextVar("thinwire_traceparent", default=None)


def enter(span: Span) -> None:
    """What is done in this context from here on is below this span; what is logged has the ID of its trace."""
    _current.set(span.traceparent)
    logs.bind(trace_id=span.traceparent.split("-")[1])


def told() -> dict[str, str]:
    """What job.json says of the trace of the request that this is called in; nothing where it has none."""
    parent = _current.get()
    return {} if parent is None else {TRACEPARENT: parent}
