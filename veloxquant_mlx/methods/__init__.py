"""One file per compression method: its options, its identity and, once built, its recipe."""
