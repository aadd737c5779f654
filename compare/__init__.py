"""Verdicts: checks by tier, localisation, reports."""
