"""The version of specplan, in one place."""

VERSION = "0.1.0"
#: The day on which this version was last worked on: a clock that is behind it is wrong.
DATE = "2026-12-01"
