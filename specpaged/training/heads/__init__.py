"""Draft heads for any target of the flat decoder, distilled from what the target itself writes."""
