"""Benchmarks of speed, memory and quality. Each prints a readable table and, as its last line, one JSON document."""
