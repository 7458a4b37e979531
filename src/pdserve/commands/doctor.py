"""``pdserve doctor``: what is wrong with a deployment, in plain sentences, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve import env
from pdserve.doctor.checks import CHECKS, run_checks
from pdserve.doctor.facts import Deployment
from pdserve.doctor.findings import Finding
from pdserve.doctor.probe import probe_deployment
from pdserve.errors import ConfigError
from pdserve.peers.curve import read_curve
from pdserve.router.config import RouterSettings, endpoint_of
from pdserve.settings import load_settings, section, setting


@dataclass(frozen=True)
class DoctorSettings:
    """Whom to ask."""

    router: str | None = setting(None, help="a running router; its instances are asked too", metavar="URL")
    timeout_s: float = setting(5.0, help="for each question", minimum=0.1)


@dataclass(frozen=True)
class DoctorConfig:
    """The doctor's settings, and a router's: its file and its command line say which instances there are."""

    doctor: DoctorSettings = field(default_factory=DoctorSettings)
    router: RouterSettings = section(RouterSettings)


def run(argv: Sequence[str]) -> int:
    """Check, and tell; returns 0 when nothing is wrong, else 1.

    Raises:
        ConfigError: there is nobody to ask.
    """
    config = load_settings(
        DoctorConfig,
        prog="pdserve doctor",
        description="Say what is wrong with a deployment and what to do about it; the exit status is 1 if anything is.",
        examples=[
            "pdserve doctor --router http://127.0.0.1:8000",
            "pdserve doctor --prefill 10.0.0.5:8100 --decode 10.0.0.6:8200",
            "pdserve doctor --config router.toml",
        ],
        argv=argv,
    )
    pools = config.router.pools
    if config.doctor.router is None and not (pools.prefill or pools.decode):
        raise ConfigError(
            "there is nobody to ask; give --router URL, --prefill and --decode HOST:PORT, or --config FILE"
        )
    deployment = probe_deployment(
        config.doctor.router,
        [_address_of(address) for address in pools.prefill],
        [_address_of(address) for address in pools.decode],
        timeout_s=config.doctor.timeout_s,
        api_key=env.get_api_key(),
        curve=read_curve(pools.curve_secret_key, pools.curve_peer_keys),
    )
    findings = run_checks(deployment)
    print(describe(deployment, findings))
    return 1 if findings else 0


def _address_of(address: str) -> str:
    return endpoint_of(address).removeprefix("tcp://")


def describe(deployment: Deployment, findings: Sequence[tuple[str, Finding]]) -> str:
    """The report."""
    asked = [] if deployment.router is None else [f"router {deployment.router.url}"]
    asked += [instance.name for instance in deployment.instances]
    lines = [f"{len(CHECKS)} checks of {', '.join(asked)}"]
    for name, finding in findings:
        lines += ["", f"{finding.subject}: {finding.problem}.", f"  to do: {finding.remedy}. [{name}]"]
    lines += ["", "nothing is wrong" if not findings else f"{len(findings)} found"]
    return "\n".join(lines)
