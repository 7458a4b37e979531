"""Settings: frozen dataclasses become command lines and TOML sections.

A component declares its settings as a frozen dataclass (a section) whose fields are made with `setting`. A
process composes sections in one more frozen dataclass, the root, and calls `load_settings` on it::

    @dataclass(frozen=True)
    class RouterSettings:
        port: int = setting(8000, help="port of the HTTP API", minimum=0, maximum=65535)

    @dataclass(frozen=True)
    class RouterConfig:
        router: RouterSettings = section(RouterSettings)

    config = load_settings(RouterConfig, prog="run-router", description="Serve the OpenAI API.")

Every field is then ``--port 8000`` on the command line and ``port = 8000`` under ``[router]`` in the file
that ``--config`` names. The command line goes over the file, the file over the defaults. What is unknown,
ill-typed or out of range is a `ConfigError` that names the key and the nearest known one. The commands of a service
may share a file; see `toml_file`.
"""

from pdserve.settings.fields import describe_settings, section, setting
from pdserve.settings.loading import build_parser, load_settings, option_flags, to_arguments

__all__ = [
    "build_parser",
    "describe_settings",
    "load_settings",
    "option_flags",
    "section",
    "setting",
    "to_arguments",
]
