"""What our EAGLE-3 drafter proposes, beside what vLLM's own CPU runner does."""
