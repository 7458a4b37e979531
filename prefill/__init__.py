"""The prefill role: ``run-prefill``."""

if __name__ == "prefill":
    raise ImportError("import pdserve.prefill: the bare name is not a package of pdserve")
