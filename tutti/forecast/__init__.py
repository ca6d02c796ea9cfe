"""Throughput on more ranks than were measured, with an interval, and the check of it when the runs exist."""
