"""What all tests rely on, however they were started."""

import signal

# A shell that starts this in the background has interrupts ignored, and programs that tests start would inherit that;
# some are interrupted to see what they do.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
