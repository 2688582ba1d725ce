"""Opens the tracer of a process.

Imports `serving.telemetry.otlp`, and with it OpenTelemetry's SDK, only when spans have somewhere to
go.
"""

from serving.telemetry.spans import NO_TRACER, Tracer, TraceSettings


def open_tracer(settings: TraceSettings, service: str, instance: str) -> Tracer:
    """Returns the tracer of this process. `service` and `instance` name it in every span it sends.

    It returns at once: the first sending finds out whether a collector answers.
    """
    if settings.otlp_endpoint is None:
        return NO_TRACER
    # Imported here, so that only a process that traces pays for the SDK.
    from serving.telemetry.otlp import OtlpTracer  # noqa: PLC0415

    return OtlpTracer(
        settings.otlp_endpoint, settings.sample_ratio, service=service, instance=instance
    )
