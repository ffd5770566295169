"""From the publisher's files to token rows. Each file does one job, in the order amazon -> retriever -> semantic_ids ->
tokenizer -> teacher -> dataset -> rows, and `python -m data.prepare` runs them all."""
