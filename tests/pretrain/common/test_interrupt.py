"""Requests to stop that signals make."""

import os
import signal

import pytest

from pretrain.common.interrupt import StopRequest


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_a_request_and_only_a_second_ctrl_c_interrupts(name: str) -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        stop = StopRequest()
        with stop.handle_signals():
            os.kill(os.getpid(), signal.Signals[name])
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == name
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == ""
    finally:
        signal.signal(signal.SIGHUP, earlier)
