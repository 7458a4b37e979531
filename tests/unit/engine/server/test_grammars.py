"""A request with a grammar waits for its compilation, and nobody else does."""

from __future__ import annotations

from pdserve.engine.server.inbox import Drain
from pdserve.protocol import AbortRequests, FinishReason


def test_others_go_on_while_a_grammar_is_compiled(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_compile.clear()
    router.add("slow", [10], grammar="a")
    wait(lambda: instance.engine.compiling == ["a"], "the compilation")
    router.add("free", [50])
    assert router.tokens("free") == [51, 52, 53]
    assert "slow" not in router.outputs
    instance.engine.may_compile.set()
    assert router.tokens("slow") == [11, 12, 13]


def test_a_request_given_up_while_its_grammar_is_compiled_never_runs(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_compile.clear()
    router.add("left", [10], grammar="a")
    wait(lambda: instance.engine.compiling == ["a"], "the compilation")
    router.send(AbortRequests(["left"]))
    router.add("free", [50])
    assert router.tokens("free") == [51, 52, 53]
    instance.engine.may_compile.set()
    router.add("next", [70], grammar="b")
    assert router.tokens("next") == [71, 72, 73]
    assert not instance.engine.made.keys() & {key for key in instance.engine.made if key.endswith("left")}
    assert "left" not in router.outputs


def test_a_grammar_that_cannot_be_followed_is_the_clients_mistake_and_a_mistake_of_ours_is_not(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    for grammar, status, param in (("wrong", 400, "grammar"), ("mistake", 500, None)):
        router.add(grammar, [10], grammar=grammar)
        (output,) = router.finish(grammar)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None
        assert (output.error.http_status, output.error.param) == (status, param)
    router.add("after", [10], grammar="a")
    assert router.tokens("after") == [11, 12, 13]


def test_a_drain_waits_for_compilations(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_compile.clear()
    router.add("early", [10], grammar="a")
    wait(lambda: instance.engine.compiling == ["a"], "the compilation")
    instance.inbox.put(Drain("test"))
    wait(lambda: not instance.inbox, "the drain to begin")
    instance.engine.may_compile.set()
    (output,) = router.finish("early")
    assert output.error is not None
    assert output.error.code == "service_unavailable"
    assert instance.join() == 0
