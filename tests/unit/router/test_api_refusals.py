"""What a client does wrong is a 4xx with OpenAI's body that names the parameter: never a 500, never retried."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_bench import MODEL, with_client
from fake_instances import DRAINING, ENGINE_ERROR, OVERLOADED, FakeInstance, Fault

from pdserve.protocol import Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def with_arguments(text: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": text}}]}


def post(path: str, body: Any, *, decode: FakeInstance | None = None) -> httpx.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)

    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, content=content)

    answer: httpx.Response = with_client(test, decode=[decode or FakeInstance(Role.DECODE, "d0")])
    return answer


def check_error(answer: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "Traceback" not in answer.text
    return str(error["message"])


BOTH: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": 7}, 400, "model"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 1.0}, 400, "max_tokens"),
    ({"max_tokens": 10**6}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 10**30}, 400, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 2.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 10**30}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"n": 0}, 400, "n"),
    ({"n": 9}, 400, "n"),
    ({"n": "two"}, 400, "n"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": "x"}, 400, "seed"),
    ({"priority": 2**70}, 400, "priority"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop[1]"),
    ({"stop": 5}, 400, "stop"),
    ({"stop": "x" * 2000}, 400, "stop"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    ({"stop_token_ids": "x"}, 400, "stop_token_ids"),
    ({"logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"²": 1}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 99}, 400, "prompt_logprobs"),
    ({"timeout": 0}, 400, "timeout"),
    ({"timeout": "soon"}, 400, "timeout"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": "x" * 300}, 400, "cache_salt"),
    ({"ignore_eos": 1}, 400, "ignore_eos"),
    ({"guided_json": {}}, 400, "guided_json"),
    ({"allowed_token_ids": [1]}, 400, "allowed_token_ids"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"response_format": "json_object"}, 400, "response_format"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        400,
        "response_format.json_schema.schema",
    ),
    *(
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, 400, "response_format")
        for schema in (
            {"type": "strin"},
            {"not": {"type": "string"}},
            {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
            {"type": "string", "format": "frob"},
            {"type": "integer", "minimum": 5, "maximum": 3},
            {"$ref": "http://127.0.0.1:1/schema.json"},
            json.loads('{"items":' * 200 + "{}" + "}" * 200),
        )
    ),
    ({"structured_outputs": {}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "["}}, 400, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, 400, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, 400, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos"),
    ({"return_token_ids": True}, 400, "return_token_ids"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        400,
        "stream_options.continuous_usage_stats",
    ),
]
COMPLETIONS_ONLY: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [49152]}, 400, "prompt"),
    ({"prompt": [10**30]}, 400, "prompt"),
    ({"prompt": ["a"] * 9}, 400, "prompt"),
    ({"prompt": ["a"] * 5, "n": 2}, 400, "n"),
    ({"prompt": [5] * 64}, 400, "prompt"),
    ({"prompt": [5] * 60, "max_tokens": 5}, 400, "max_tokens"),
    ({"logprobs": 6}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"best_of": 1, "n": 2}, 400, "best_of"),
    ({"best_of": 0}, 400, "best_of"),
    ({"best_of": 9}, 400, "best_of"),
    ({"best_of": 2, "stream": True}, 400, "best_of"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"tools": [TOOL]}, 400, "tools"),
    ({"echo": "yes"}, 400, "echo"),
    ({"max_completion_tokens": 5}, 400, "max_completion_tokens"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
]
CHAT_ONLY: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{}]}, 400, "messages[0].role"),
    ({"messages": ["hi"]}, 400, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [with_arguments("[" * 5_000)]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "word " * 80}]}, 400, "messages"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"logprobs": 5}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 2}, 400, "best_of"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"tools": [TOOL]}, 400, "tools"),
    ({"tools": ["f"]}, 400, "tools"),
    ({"tools": [TOOL, TOOL], "tool_choice": "required"}, 400, "tools"),
    ({"tools": [TOOL, TOOL], "tool_choice": "none"}, 400, "tools"),
    ({"tools": [{"type": "retrieval"}]}, 400, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, 400, "tools"),
    ({"tool_choice": "auto"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tool_choice": "maybe", "tools": [TOOL]}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, 400, "tool_choice"),
    ({"tool_choice": "required", "tools": [with_parameters({"type": "array"})]}, 400, "tools"),
    ({"tool_choice": "required", "tools": [with_parameters({"properties": {"a": {"type": "strin"}}})]}, 400, "tools"),
    ({"functions": [{}]}, 400, "functions"),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "status", "param"), [*BOTH, *COMPLETIONS_ONLY])
def test_completions_refuse(fields: dict[str, Any], status: int, param: str | None) -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    check_error(post(COMPLETIONS, {"prompt": "Hi", **fields}, decode=decode), status, param)
    assert decode.messages == []


@pytest.mark.parametrize(("fields", "status", "param"), [*BOTH, *CHAT_ONLY])
def test_chat_refuses(fields: dict[str, Any], status: int, param: str | None) -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    check_error(post(CHAT, {"messages": MESSAGES, **fields}, decode=decode), status, param)
    assert decode.messages == []


NO_OBJECTS = [
    b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("body", NO_OBJECTS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(path: str, body: bytes) -> None:
    check_error(post(path, body), 400, None, "invalid_json")


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages"), ("/detokenize", "tokens")])
def test_required_field_is_named(path: str, param: str) -> None:
    check_error(post(path, {}), 400, param, "missing_required_parameter")


def test_context_length_is_named_with_the_limit() -> None:
    message = check_error(post(COMPLETIONS, {"prompt": [5] * 70}), 400, "prompt", "context_length_exceeded")
    assert "64" in message
    assert "70" in message


def test_body_too_large_is_refused_by_its_announced_length_and_by_what_comes() -> None:
    check_error(post(COMPLETIONS, {"prompt": "x" * 30_000}), 413, None, "request_too_large")

    async def send_in_parts(client: httpx.AsyncClient) -> httpx.Response:
        async def parts() -> Any:
            for _ in range(40):
                yield b" " * 1000

        return await client.post(COMPLETIONS, content=parts())

    answer = with_client(send_in_parts, decode=[FakeInstance(Role.DECODE, "d0")])
    check_error(answer, 413, None, "request_too_large")


def test_no_decode_instance_is_503() -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    decode.ready = None
    answer = post(COMPLETIONS, {"prompt": "Hi"}, decode=decode)
    check_error(answer, 503, None, "service_unavailable")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "no decode instance takes work: d0 is absent; try again later"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(OVERLOADED, 429), (DRAINING, 429), (ENGINE_ERROR, 500)])
def test_error_before_the_first_token_has_its_own_status_also_when_streaming(
    error: Any, status: int, stream: bool
) -> None:
    decode = FakeInstance(Role.DECODE, "d0", [Fault(error=error)] * 5)
    answer = post(COMPLETIONS, {"prompt": "Hi", "stream": stream}, decode=decode)
    check_error(answer, status, None)
    assert ("retry-after" in answer.headers) == (status == 429)


def test_unknown_path_and_method_have_openai_bodies() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        check_error(await client.get("/v1/nothing"), 404, None, "not_found")
        refused = await client.get(COMPLETIONS)
        check_error(refused, 405, None, "method_not_allowed")
        assert refused.headers["allow"] == "POST"
        check_error(await client.get("/v1/models/other"), 404, "model", "model_not_found")
        check_error(await client.get("/v1/requests/x/timeline"), 404, "id", "request_not_found")
        assert (await client.head("/health")).status_code == 200
        assert (await client.head(COMPLETIONS)).status_code == 405

    with_client(test, decode=[FakeInstance(Role.DECODE, "d0")])


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": 1}, "store": False, "unknown_field": [1]},
        {"suffix": None, "best_of": 1, "n": 1, "temperature": None, "stop": None, "logit_bias": None},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"kv_transfer_params": {"connector": "x", "transfer_id": "y", "do_remote_prefill": True}},
        {"model": MODEL, "logit_bias": {}, "stop": [], "stop_token_ids": [], "seed": -1, "top_k": -1, "priority": -5},
    ],
)
def test_harmless_fields_are_taken_and_made_up_transfer_parameters_are_not(fields: dict[str, Any]) -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    answer = post(COMPLETIONS, {"prompt": "Hi", **fields}, decode=decode)
    assert answer.status_code == 200, answer.text
    assert decode.messages[0].kv_transfer_params is None


def test_error_inside_the_router_is_a_500_without_its_inside() -> None:
    class Broken(FakeInstance):
        def start_leg(self, message: Any) -> Any:
            raise ZeroDivisionError("secret")

    answer = post(COMPLETIONS, {"prompt": "Hi"}, decode=Broken(Role.DECODE, "d0"))
    message = check_error(answer, 500, None)
    assert "secret" not in message


def test_a_body_for_another_endpoint_can_be_tokenized() -> None:
    fields = {
        "messages": MESSAGES,
        "max_completion_tokens": 5,
        "response_format": {"type": "nothing of the kind"},
        "best_of": 3,
    }
    assert post("/tokenize", fields).status_code == 200
    check_error(post("/tokenize", {**fields, "chat_template": "x"}), 400, "chat_template")
