"""One model in several processes: what each rank holds, what they tell each other, and their lives."""
