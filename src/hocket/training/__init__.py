"""Training: data, tokenizer, optimizer and the loop. Data and tokenizer load without torch."""
