"""The life of a state: histories of an engine's calls, the bookkeeping of slots, and the ledger that checks it."""
