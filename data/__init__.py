"""From the publisher's files to token rows: one job a file, in the order amazon -> retriever -> semantic_ids
-> tokenizer -> teacher -> dataset, run by `python -m data.prepare`."""
