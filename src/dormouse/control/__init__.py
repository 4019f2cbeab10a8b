"""The process that decides: clock, timers, journal, catalog; performs the core's commands."""
