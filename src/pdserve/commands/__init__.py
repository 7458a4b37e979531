"""The subcommands of ``pdserve``, one module each."""
