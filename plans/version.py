"""The version of specplan, in one place."""

VERSION = "0.1.0"
