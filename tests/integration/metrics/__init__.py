"""Metrics of all locks of the process: what is recorded, for Prometheus and for OpenTelemetry."""
