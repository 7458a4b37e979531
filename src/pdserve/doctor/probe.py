"""Asks routers and instances what they are. Everything is bounded by one timeout, and all are asked at once."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

import pdserve
from pdserve.doctor.facts import Deployment, InstanceFacts, Reach, RouterFacts, RouterStatus
from pdserve.engine.server.about import About
from pdserve.peers.curve import Curve, UnknownPeerError
from pdserve.protocol import MAX_FRAME_BYTES, Goodbye, Hello, Ready, Refused, Role, decode_instance_message, encode

_MAX_THREADS = 16
_NS_PER_S = 1e9


def probe_deployment(
    router_url: str | None,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    timeout_s: float,
    api_key: str | None,
    curve: Curve | None = None,
) -> Deployment:
    """Everything the checks need.

    Args:
        router_url: a router to ask; its instances are asked too. None = no router.
        prefill: more instances, ``host:port``.
        decode: more instances.
        timeout_s: for each question.
        api_key: for the router.
        curve: for the instances, where they are spoken with encrypted.
    """
    router = None if router_url is None else probe_router(router_url, timeout_s, api_key)
    wanted = {(Role.PREFILL, address): None for address in prefill} | {
        (Role.DECODE, address): None for address in decode
    }
    if router is not None and router.status is not None:
        wanted |= {
            (pool.role, i.address.removeprefix("tcp://")): None for pool in router.status.pools for i in pool.instances
        }
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        instances = threads.map(lambda key: probe_instance(key[0], key[1], timeout_s, curve), wanted)
    return Deployment(pdserve.__version__, router, tuple(instances))


def probe_router(url: str, timeout_s: float, api_key: str | None) -> RouterFacts:
    """A router's status."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    before_s = time.time()
    try:
        answer = _get(f"{url.rstrip('/')}/v1/status", timeout_s, headers)
        status = msgspec.json.decode(answer.content, type=RouterStatus)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        return RouterFacts(url, problem=str(error).splitlines()[0])
    return RouterFacts(url, status, clock_offset_s=_bound_offset_s(status.time_ns, before_s))


def probe_instance(role: Role, address: str, timeout_s: float, curve: Curve | None = None) -> InstanceFacts:
    """An instance, first as a router would speak to it, then over its HTTP port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        return InstanceFacts(role, address, Reach.CLOSED, reason=str(error.strerror or error))
    try:
        answer = say_hello(address, timeout_s, curve)
    except UnknownPeerError as error:
        return InstanceFacts(role, address, Reach.SILENT, reason=str(error))
    if isinstance(answer, Refused):
        return InstanceFacts(role, address, Reach.REFUSED, reason=answer.reason)
    if answer is None:
        return InstanceFacts(role, address, Reach.SILENT, reason=f"no answer within {timeout_s:g} s")
    if answer.http_port is None:
        return InstanceFacts(role, address, ready=answer)
    url = f"http://{host}:{answer.http_port}"
    about, offset_s = _get_about(url, timeout_s)
    return InstanceFacts(
        role, address, ready=answer, about=about, clock_offset_s=offset_s, metrics=_get_metrics(url, timeout_s)
    )


def say_hello(address: str, timeout_s: float, curve: Curve | None = None) -> Ready | Refused | None:
    """Open a session as a router does, take the first answer, and say goodbye; None when there is no answer.

    Raises:
        UnknownPeerError: ``curve`` has no key for the address.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 100)
        asking.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if curve is not None:
            curve.secure_connecting(asking, address)
        asking.connect(f"tcp://{address}")
        session = uuid.uuid4().hex
        asking.send(encode(Hello(router_id=f"doctor-{session}", session=session)))
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not asking.poll(max(1, round(1000 * left_s))):
                continue
            try:
                message = decode_instance_message(asking.recv())
            except msgspec.DecodeError:
                return Refused(session=session, reason="its answer is no message of this protocol version")
            if isinstance(message, Ready | Refused):
                asking.send(encode(Goodbye()))
                return message
    return None


def _get(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """An answer that is no error, asked for directly: a proxy in the environment leads elsewhere.

    Raises:
        httpx.HTTPError: there is none.
        httpx.InvalidURL: ``url`` is none.
    """
    with httpx.Client(transport=httpx.HTTPTransport(), timeout=timeout_s) as client:
        return client.get(url, headers=headers).raise_for_status()


def _get_about(url: str, timeout_s: float) -> tuple[About | None, tuple[float, float] | None]:
    before_s = time.time()
    try:
        answer = _get(f"{url}/about", timeout_s)
        about = msgspec.json.decode(answer.content, type=About)
    except (httpx.HTTPError, msgspec.DecodeError):
        return None, None
    return about, _bound_offset_s(about.time_ns, before_s)


def _bound_offset_s(time_ns: int, before_s: float) -> tuple[float, float]:
    """How far another clock is ahead of this one, at least and at most.

    Args:
        time_ns: what it showed at some moment between the question and now.
        before_s: when it was asked.
    """
    return time_ns / _NS_PER_S - time.time(), time_ns / _NS_PER_S - before_s


def _get_metrics(url: str, timeout_s: float) -> dict[str, float]:
    """Samples by name, summed over labels, and by ``name{label="value"}``."""
    try:
        text = _get(f"{url}/metrics", timeout_s).text
    except httpx.HTTPError:
        return {}
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            for label, value in sample.labels.items():
                samples[f'{sample.name}{{{label}="{value}"}}'] = sample.value
    return samples
