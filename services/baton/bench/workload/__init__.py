"""What is asked in a measurement: prompts, lengths of answers and, from traces, when."""
