"""The decode role: ``run-decode``."""

if __name__ == "decode":
    raise ImportError("import pdserve.decode: the bare name is not a package of pdserve")
