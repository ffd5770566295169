"""What a reader may skip: flags, files on disk, the training loop's bookkeeping, tables, timing and figures."""
