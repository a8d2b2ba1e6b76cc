"""What the commands say to shells as they end, where 0, 1 and 2 do not say it."""

INTERRUPTED = 130
"""Ctrl-C ended it: 128 and the signal's number, as shells have it."""
