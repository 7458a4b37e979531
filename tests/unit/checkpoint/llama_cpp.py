"""llama.cpp's own tokenizer, through the server that xllamacpp carries."""

import http.client
import json
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCppTokenizer:
    """Loads a GGUF file and tokenises with the rules that llama.cpp reads from it."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 256, 64, 64, 1
        params.warmup = params.fit_params = False
        params.cpuparams.n_threads = 1
        params.port = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self._connection = http.client.HTTPConnection(self._server.listening_address.removeprefix("http://"))

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        return list(self._post("/tokenize", body)["tokens"])

    def close(self) -> None:
        self._connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with self._connection.getresponse() as response:
            return dict(json.loads(response.read()))
