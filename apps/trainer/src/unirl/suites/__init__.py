"""Published benchmarks as data, and what runs them: prompts, samples, scores, intervals, pages."""
