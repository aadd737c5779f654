"""The systems under test: adapters with contracts, isolated workers, the Triton interpreter."""
