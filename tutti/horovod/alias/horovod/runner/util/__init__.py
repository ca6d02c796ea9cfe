"""Helpers that test suites import."""
