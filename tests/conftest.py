"""The settings of the suite, in each process that runs tests."""

import signal

import pytest

# A shell starts a command in the background with Ctrl-C ignored, and programs inherit it: tests that press it would
# wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.support")


def pytest_configure(config):
    # A process that only hands tests out to others imports neither PyTorch nor memscale, while these wait for it.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.support.settings")
