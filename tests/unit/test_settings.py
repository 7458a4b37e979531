from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.settings import describe_settings, load_settings, option_flags, section, setting, to_arguments


@dataclass(frozen=True)
class Shape:
    """How big it is."""

    max_num_seqs: int = setting(64, help="requests at once", minimum=1, maximum=1000)
    ratio: float = setting(0.5, help="a share in (0, 1], 50% by default", minimum=0)
    limit: int | None = setting(None, help="a limit")
    policy: str = setting("fcfs", choices=("fcfs", "priority"), help="an order")


@dataclass(frozen=True)
class Wire:
    """Where it listens."""

    host: str = setting("127.0.0.1", help="address", metavar="HOST")
    peers: list[str] = setting([], help="addresses of peers", metavar="ADDRESS")
    warm: bool = setting(True, help="warm up at start")
    connector_options: dict[str, Any] = setting({}, help="options")
    inner: str = setting("decided here", help="not for users")


@dataclass(frozen=True)
class Group:
    shape: Shape = field(default_factory=Shape)


@dataclass(frozen=True)
class Root:
    group: Group = field(default_factory=Group)
    wire: Wire = section(Wire, exclude=("inner",))


def load(*argv: str) -> Root:
    return load_settings(Root, prog="run-x", description="Test.", examples=["run-x --warm"], argv=argv)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_gives_the_defaults() -> None:
    assert load() == Root()


def test_command_line_sets_every_kind() -> None:
    config = load(
        *[
            "--max-num-seqs=3",
            "--ratio",
            "1",
            "--limit",
            "7",
            "--policy",
            "priority",
            "--host",
            "::1",
            "--no-warm",
        ],
        *["--peers", "a:1", "b:2", "--peers", "c:3"],
        *[
            "--connector-option",
            "path=/tmp/x",
            "--connector-option",
            "max_bytes=12",
            "--connector-option",
            "on=true",
        ],
        *("--connector-option", "nested={a = [1, 2.5]}", "--connector-option", "day=2026-01-02"),
    )
    assert config.group.shape == Shape(max_num_seqs=3, ratio=1.0, limit=7, policy="priority")
    assert isinstance(config.group.shape.ratio, float)
    assert config.wire.peers == ["a:1", "b:2", "c:3"]
    assert not config.wire.warm
    assert config.wire.connector_options == {
        "path": "/tmp/x", "max_bytes": 12, "on": True, "nested": {"a": [1, 2.5]}, "day": "2026-01-02",
    }  # fmt: skip


def test_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.toml",
        '[shape]\nmax_num_seqs = 5\nratio = 1\n[wire]\npeers = ["a"]\n[wire.connector_options]\nk = 1\nj = 2\n',
    )
    config = load("--config", str(path), "--max-num-seqs", "6", "--connector-option", "k=3")
    assert config.group.shape == Shape(max_num_seqs=6, ratio=1.0)
    assert config.wire == Wire(peers=["a"], connector_options={"k": 3, "j": 2})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "3"], "unknown argument --max-num-seq; the nearest known one is --max-num-seqs"),
        (["--max-num-seqs", "many"], "--max-num-seqs: 'many' is not an integer"),
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is below 1"),
        (["--max-num-seqs", "1001"], "--max-num-seqs: 1001 is above 1000"),
        (["--ratio", "nan"], "--ratio: nan is below 0"),
        (["--ratio", "x"], "--ratio: 'x' is not a number"),
        (["--policy", "lifo"], "--policy: 'lifo' is not one of fcfs, priority"),
        (["--connector-option", "path"], "--connector-option: 'path' is not of the form key=value"),
        (["--host"], "--host: expected one argument"),
        (["--inner", "x"], "unknown argument --inner"),
        (["stray"], "unknown argument stray"),
        (["--config", "/nonexistent/x.toml"], "/nonexistent/x.toml: No such file or directory"),
    ],
)
def test_wrong_command_lines_name_the_option(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[shap]\n", "unknown section [shap]; the nearest known one is [shape]"),
        ("shape = 3\n", "shape = 3 is not a table"),
        ("[shape]\nmax_seqs = 3\n", "[shape] unknown key max_seqs; the nearest known one is max_num_seqs"),
        ('[shape]\nmax_num_seqs = "3"\n', "[shape] max_num_seqs: '3' is not an integer"),
        ("[shape]\nmax_num_seqs = true\n", "[shape] max_num_seqs: True is not an integer"),
        ("[shape]\nmax_num_seqs = 1.5\n", "[shape] max_num_seqs: 1.5 is not an integer"),
        ("[shape]\nratio = false\n", "[shape] ratio: False is not a number"),
        ("[wire]\nwarm = 1\n", "[wire] warm: 1 is not true or false"),
        ('[wire]\npeers = "a"\n', "[wire] peers: 'a' is not a list of strings"),
        ("[wire]\nconnector_options = 1\n", "[wire] connector_options: 1 is not a table"),
        ('[wire]\ninner = "x"\n', "[wire] unknown key inner"),
        ("[shape\n", "is not TOML"),
    ],
)
def test_wrong_files_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "x.toml", text)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(path))
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_help_shows_groups_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in (
        "shape:",
        "How big it is.",
        "(default: 64)",
        "--no-warm",
        "50% by default",
        "run-x --warm",
        "HOST",
    ):
        assert part in text
    assert "inner" not in text


def test_secrets_are_masked_where_settings_are_described() -> None:
    options = {"password": "x", "host": "y", "url": "redis://me:x@h:1/0"}
    config = Root(wire=Wire(connector_options=options, host="http://me:x@h/p?q=a@b"))
    described = describe_settings(config)
    assert described["wire.connector_options"] == {"password": "***", "host": "y", "url": "redis://***@h:1/0"}
    assert described["wire.host"] == "http://***@h/p?q=a@b"
    assert described["shape.max_num_seqs"] == 64
    assert "shape.limit" not in described


def test_two_sections_with_one_option_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Twice:
        one: Shape = field(default_factory=Shape)
        two: Shape = field(default_factory=Shape)

    with pytest.raises(ValueError, match="several settings called --limit"):
        load_settings(Twice, prog="x", description="", argv=[])


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(
    seqs=st.integers(1, 1000), ratio=st.floats(0, 1e300), limit=st.none() | st.integers(), host=texts,
    peers=st.lists(texts), warm=st.booleans(),
    options=st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), toml_values, max_size=3),
)  # fmt: skip
def test_arguments_written_are_read_back_as_the_same(
    seqs: int,
    ratio: float,
    limit: int | None,
    host: str,
    peers: list[str],
    warm: bool,
    options: dict[str, Any],
) -> None:
    config = Root(
        group=Group(Shape(max_num_seqs=seqs, ratio=ratio, limit=limit)),
        wire=Wire(host=host, peers=peers, warm=warm, connector_options=options),
    )
    assert load(*to_arguments(config)) == config


def test_option_names_are_those_of_the_fields() -> None:
    assert option_flags(Root) == sorted(
        [
            "--help",
            "--version",
            "--config",
            "--max-num-seqs",
            "--ratio",
            "--limit",
            "--policy",
            "--host",
            "--peers",
            "--warm",
            "--connector-option",
        ]
    )
