"""The axes of the sweep: one file each, walked through the table in `table`."""
