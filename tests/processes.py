"""Child processes that receive signals, whatever the tests themselves run under."""

import fcntl
import signal
import subprocess
import termios

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def start(command, *, terminal=None, **options) -> subprocess.Popen:
    """Start a process with the default handling of SIGHUP, SIGINT and SIGTERM.

    Under `nohup`, and in the background of a shell script, SIGHUP and SIGINT are ignored, and
    children inherit that.

    Args:
        terminal: A terminal that becomes the controlling one, with all output on it.
    """

    def prepare():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if terminal is not None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    if terminal is not None:
        options |= {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        options["start_new_session"] = True
    return subprocess.Popen(command, preexec_fn=prepare, **options)
