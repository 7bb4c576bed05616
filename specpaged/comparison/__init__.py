"""One set of prompts, decoded in several ways, and the outputs compared."""
