"""The life of a state: histories of calls, the bookkeeping of slots, and the ledger that checks it."""
