"""Connectors that keep or end the process in native code, where nothing of Python can stop them."""

from __future__ import annotations

import ctypes
import os
from typing import ClassVar

from pdserve.connectors.base import ConnectorContext, KVRequest, MatchResult
from pdserve.connectors.null import NullConnector, NullScheduler


class HoldsTheInterpreter(NullScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        while True:
            ctypes.PyDLL(None).pause()


class LocksItselfOut(NullScheduler):
    """Other threads run on, and signals reach it: it waits again after each."""

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
        raise AssertionError("the mutex can be locked twice")


class ReadsNowhere(NullScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        ctypes.string_at(0)
        raise AssertionError("there is memory at 0")


class Exits(NullScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        os._exit(3)


class _Connector(NullConnector):
    scheduler_type: ClassVar[type[NullScheduler]]

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> NullScheduler:
        return cls.scheduler_type()


class HoldingConnector(_Connector):
    scheduler_type = HoldsTheInterpreter


class LockedOutConnector(_Connector):
    scheduler_type = LocksItselfOut


class CrashingConnector(_Connector):
    scheduler_type = ReadsNowhere


class ExitingConnector(_Connector):
    scheduler_type = Exits
