"""Traces of requests for OpenTelemetry, one trace from the client through router, prefill, transfer and decode.

    spans.py   a timeline as a tree of spans, as plain values
    tracer.py  who gets them: nobody, or an OTLP collector

The instances' events travel with their outputs and carry wall-clock times, so the router knows every span when a
request ends, and instances need no exporter of their own.
"""
