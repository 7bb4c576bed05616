"""From logits to tokens: processing, noise, log-probabilities."""
