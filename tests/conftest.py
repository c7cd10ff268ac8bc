"""What holds for all tests."""

import signal

# A shell starts a background job with SIGINT ignored, and all that the job starts inherits it: tests that interrupt a
# process would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
