"""One file per compression method: its options, its identity and its recipe."""
