"""Freezes the names of all options: whoever renames or drops one breaks people's scripts and has to mean it."""

from __future__ import annotations

import pytest

from pdserve.commands.doctor import DoctorConfig
from pdserve.commands.keys import ApiKeyConfig, CurveKeyConfig
from pdserve.commands.up import UpConfig
from pdserve.decode.main import DecodeConfig
from pdserve.prefill.main import PrefillConfig
from pdserve.router.config import RouterSettings
from pdserve.settings import option_flags

EVERY = "--config --help --version"
ENGINE = """
    --model --served-model-name --dtype --max-model-len --quantization --device --kernel-backend --num-threads
    --tensor-parallel-size --pipeline-parallel-size --worker-timeout-s
    --block-size --kv-dtype --num-blocks --memory-fraction --enable-prefix-caching
    --policy --max-num-seqs --max-num-batched-tokens --max-queue-len --kv-load-failure-policy
    --connector --connector-option
"""
INSTANCE = """
    --host --port --http-port --instance-id --drain-timeout-s --session-timeout-s --heartbeat-interval-s
    --debug-blocks --watchdog-interval-s --max-transfer-age-s --discovery --advertise-host --log-level --ready-file
    --curve-secret-key --curve-peer-keys --allowed-peers
"""
ROUTING = """
    --prefill-policy --decode-policy --disaggregation-threshold-tokens --max-tries --prefill-wait-s
    --cache-events --max-faults --ejection-s --slow-start-s --key-max-concurrent --key-tokens-per-minute
    --failover-wait-s --max-concurrent --max-queue --max-choices --request-timeout-s --timeline-capacity
    --tool-call-parser --reasoning-parser --max-body-bytes --client-stall-timeout-s --otlp-endpoint --trace-sample-ratio
    --api-keys-file --public-metrics --tls-certificate --tls-key
"""
ROUTER = """
    --host --port --ready-file --shutdown-timeout-s --log-level --model --served-model-name
    --prefill --decode --heartbeat-interval-s --heartbeat-timeout-s
    --instances-file --discovery --discovery-interval-s --curve-secret-key --curve-peer-keys
"""
DOCTOR = "--router --timeout-s"
UP = "--prefill --decode --host --port --ask --pin --log-level --drain-timeout-s"


@pytest.mark.parametrize(
    ("root", "groups"),
    [
        (PrefillConfig, (ENGINE, INSTANCE)),
        (DecodeConfig, (ENGINE, INSTANCE)),
        (RouterSettings, (ROUTER, ROUTING)),
        (UpConfig, (UP, ENGINE, ROUTING)),
        (DoctorConfig, (DOCTOR, ROUTER, ROUTING)),
        (ApiKeyConfig, ("--name --admin",)),
        (CurveKeyConfig, ("--name --directory",)),
    ],
)
def test_option_names_are_frozen(root: type, groups: tuple[str, ...]) -> None:
    assert option_flags(root) == sorted(" ".join((EVERY, *groups)).split())


def test_default_ports_do_not_meet() -> None:
    prefill, decode, router = PrefillConfig().instance, DecodeConfig().instance, RouterSettings().http
    ports = [prefill.port, prefill.resolve_http_port(), decode.port, decode.resolve_http_port(), router.port]
    assert ports == [8100, 9100, 8200, 9200, 8000]
