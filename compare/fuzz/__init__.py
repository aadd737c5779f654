"""Fuzzing: seeded cases without end, judged by the rules of `diff`, what fails kept once and confirmed."""
