"""Checks: one file, one statement each; `compare.judge` orders what they return."""
