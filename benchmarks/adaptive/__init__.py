"""Whether deciding how much to draft, in every step, is as good as knowing the best K beforehand."""
